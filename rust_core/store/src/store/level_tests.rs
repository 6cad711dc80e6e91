//! Tests that complete requests, by rows and by samples, give bit-identical results on every instruction set.

use persia_kernels::{Csr, Gradients, SegmentSum};
use persia_types::tables::{LookupRequest, PerSample, PushRequest, Run, TableGradients, TableIds};
use persia_types::{Id, Initializer, JobId, Mode, Optimizer, Schema, ShardedIds, Table, Tables, Token};

use crate::simd::InstructionSet;
use crate::store::{Store, StoreOptions};

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

fn begun(level: InstructionSet, optimizer: Optimizer) -> Store {
    let tables = DIMS.iter().map(|dim| Table::new(format!("dim {dim}"), *dim));
    let schema = Schema { slots: vec![], tables: tables.collect() };
    let mut store = Store::new(schema.clone(), StoreOptions::default()).unwrap();
    store.level = level;
    let run = Run {
        job: "levels".into(),
        generation: 1,
        schema,
        seed: 5,
        optimizer: Some(optimizer),
        initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
        admit_probability: 0.9,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: false,
        continues: 0,
        world_size: 1,
        reproducible: true,
    };
    store.begin(&run).unwrap();
    store
}

fn number(of: u64) -> f32 {
    (persia_types::id::hash_id(of) >> 40) as f32 / 1e5 - 80.0
}

/// The ids of a step, a third of which occur more than once, and the samples that use each id.
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

/// Run three steps. Returns the bits that each sample read, followed by the final bits of all rows and their
/// states.
fn trained(level: InstructionSet, optimizer: Optimizer, by_sample: bool) -> Vec<u32> {
    let store = begun(level, optimizer);
    let mut bits = Vec::new();
    for step in 1..=3 {
        let token = Token { job: JobId::from_name("levels"), generation: 1, rank: 0, seq: step };
        let (ids, starts, samples) = used(step);
        let csr = Csr { offsets: &starts, indices: &samples };

        let rows = if by_sample { SAMPLES } else { ids.len() };
        let mut outs = DIMS.map(|dim| vec![f32::NAN; rows * dim]);
        let tables = [0, 1, 2, 3].map(|table| TableIds {
            table,
            ids: &ids,
            per_sample: by_sample.then_some(PerSample::Gathered(csr)),
        });
        let request = LookupRequest { token, step, mode: Mode::Train, tables: &tables };
        store.lookup(&request, &mut outs.each_mut().map(Vec::as_mut_slice)).unwrap();
        for (out, dim) in outs.iter().zip(DIMS) {
            let of_samples = if by_sample { out.clone() } else { spread(out, dim, csr) };
            bits.extend(of_samples.iter().map(|value| value.to_bits()));
        }

        let factors: Vec<f32> = (0..SAMPLES).map(|sample| 1.0 / (1 + sample % 3) as f32).collect();
        let gradients = DIMS.map(|dim| -> Vec<f32> {
            (0..(SAMPLES * dim) as u64).map(|place| number(place ^ step << 32)).collect()
        });
        let sums = [0, 1, 2, 3].map(|table| SegmentSum {
            gradients: &gradients[table],
            dim: DIMS[table],
            csr,
            factors: Some(&factors),
            per_sample_weights: None,
            scale: 0.01,
        });
        let summed = sums.map(|sum| plainly(&sum, ids.len()));
        let tables = [0, 1, 2, 3].map(|table| {
            let rows = Gradients::Rows(&summed[table]);
            let gradients = if by_sample { Gradients::Samples(sums[table]) } else { rows };
            TableGradients { table, ids: &ids, gradients }
        });
        store.push(&PushRequest { token, step, lr_factor: 1.0, tables: &tables }).unwrap();
    }
    for shard in 0..persia_types::VIRTUAL_SHARDS {
        for table in store.export_shard(shard).tables {
            bits.extend(table.weights.iter().chain(&table.state).map(|value| value.to_bits()));
        }
    }
    bits
}

/// Copy `rows` so that each sample has its row.
fn spread(rows: &[f32], dim: usize, csr: Csr<'_>) -> Vec<f32> {
    let mut of_samples = vec![0.0; SAMPLES * dim];
    for (unique, row) in rows.chunks(dim).enumerate() {
        for sample in csr.of(unique) {
            of_samples[*sample as usize * dim..][..dim].copy_from_slice(row);
        }
    }
    of_samples
}

/// The sums, computed with the plain formula.
fn plainly(sum: &SegmentSum<'_>, ids: usize) -> Vec<f32> {
    let factor = |sample: usize| sum.factors.map_or(1.0, |factors| factors[sample]);
    let of = |unique: usize, column: usize| {
        let samples = sum.csr.of(unique).iter().map(|sample| *sample as usize);
        samples.fold(0.0f32, |all, sample| all + sum.gradients[sample * sum.dim + column] * factor(sample))
            * sum.scale
    };
    (0..ids * sum.dim).map(|place| of(place / sum.dim, place % sum.dim)).collect()
}

#[test]
fn rows_and_samples_give_the_same_bits_on_every_level() {
    let adam = Optimizer::Adam { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, eps: 1e-8 };
    let sgd = Optimizer::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01 };
    for optimizer in [adagrad(false), adagrad(true), adam, sgd] {
        let expected = trained(InstructionSet::PORTABLE, optimizer, false);
        for level in InstructionSet::supported() {
            for by_sample in [false, true] {
                let found = trained(level, optimizer, by_sample);
                assert!(found == expected, "{level:?}, by sample: {by_sample}, {optimizer:?}");
            }
        }
    }
}
