//! Whole requests on every instruction set, by rows and by samples: the same bits.

use persia_types::kernels::{Gradients, SegmentSum, Uses};
use persia_types::tables::{LookupRequest, PushRequest, Run, TableGradients, TableIds};
use persia_types::{Id, Initializer, JobId, Mode, Optimizer, Schema, ShardedIds, Table, Tables, Token};

use super::{Level, Store, StoreOptions};

const DIMS: [usize; 4] = [3, 16, 19, 64];
const SAMPLES: usize = 2_000;

fn adagrad(vectorwise_shared: bool) -> Optimizer {
    Optimizer::Adagrad {
        lr: 0.1,
        weight_decay: 0.01,
        initial_accumulator_value: 0.1,
        g_square_momentum: 0.9,
        eps: 1e-8,
        vectorwise_shared,
    }
}

fn begun(level: Level, optimizer: Optimizer) -> Store {
    let tables = DIMS.iter().map(|dim| Table { name: format!("dim {dim}"), dim: *dim });
    let schema = Schema { slots: vec![], tables: tables.collect() };
    let mut store = Store::new(schema.clone(), StoreOptions::default()).unwrap();
    store.level = level;
    let run = Run {
        job: "levels".into(),
        epoch: 1,
        schema,
        seed: 5,
        optimizer: Some(optimizer),
        initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
        admit_probability: 0.9,
        weight_bound: 0.0,
        fresh: false,
        world_size: 1,
        reproducible: true,
    };
    store.begin(&run).unwrap();
    store
}

fn number(of: u64) -> f32 {
    (persia_types::id::hash_id(of) >> 40) as f32 / 1e5 - 80.0
}

/// The ids of a step, a quarter of them more than once, and who uses them.
fn used(step: u64) -> (ShardedIds, Vec<u32>, Vec<u32>) {
    let of_samples: Vec<Id> = (0..SAMPLES as u64).map(|i| i * 3 % 1_499 + step * 400).collect();
    let mut unique = of_samples.clone();
    unique.sort_unstable();
    unique.dedup();
    let ids = ShardedIds::group(&unique).unwrap();
    let (mut starts, mut samples) = (vec![0], Vec::new());
    for id in ids.ids() {
        samples.extend((0..SAMPLES as u32).filter(|sample| of_samples[*sample as usize] == *id));
        starts.push(samples.len() as u32);
    }
    (ids, starts, samples)
}

/// Three steps; the bits of everything that was read, and of all rows and states at the end.
fn trained(level: Level, optimizer: Optimizer, by_sample: bool) -> Vec<u32> {
    let store = begun(level, optimizer);
    let mut bits = Vec::new();
    for step in 1..=3 {
        let token = Token { job: JobId::from_name("levels"), epoch: 1, rank: 0, seq: step };
        let (ids, starts, samples) = used(step);
        let uses = Uses { starts: &starts, samples: &samples };
        for_each_table(&store, token, |table, dim| {
            let rows = if by_sample { SAMPLES } else { ids.len() };
            (TableIds { table, ids: &ids, uses: by_sample.then_some(uses) }, vec![f32::NAN; rows * dim])
        })
        .into_iter()
        .zip(DIMS)
        .for_each(|(out, dim)| {
            let of_samples: Vec<f32> = if by_sample {
                out
            } else {
                let mut of_samples = vec![0.0; SAMPLES * dim];
                for (unique, row) in out.chunks(dim).enumerate() {
                    for sample in uses.of(unique) {
                        of_samples[*sample as usize * dim..][..dim].copy_from_slice(row);
                    }
                }
                of_samples
            };
            bits.extend(of_samples.iter().map(|value| value.to_bits()));
        });
        let factors: Vec<f32> = (0..SAMPLES).map(|sample| 1.0 / (1 + sample % 3) as f32).collect();
        let gradients = DIMS.map(|dim| -> Vec<f32> {
            (0..(SAMPLES * dim) as u64).map(|place| number(place ^ step << 32)).collect()
        });
        let sums = [0, 1, 2, 3].map(|table| SegmentSum {
            gradients: &gradients[table],
            dim: DIMS[table],
            uses,
            factors: Some(&factors),
            scale: 0.01,
        });
        let summed = sums.map(|sum| plainly(&sum, ids.len()));
        let tables: Vec<TableGradients<'_>> = (0..DIMS.len())
            .map(|table| {
                let rows = Gradients::Rows(&summed[table]);
                let gradients = if by_sample { Gradients::Samples(sums[table]) } else { rows };
                TableGradients { table, ids: &ids, gradients }
            })
            .collect();
        store.push(&PushRequest { token, step, lr_factor: 1.0, tables: &tables }).unwrap();
    }
    for shard in 0..persia_types::VIRTUAL_SHARDS {
        for table in store.export_shard(shard).tables {
            bits.extend(table.weights.iter().chain(&table.state).map(|value| value.to_bits()));
        }
    }
    bits
}
