//! Tests that a push without enough memory changes nothing, whichever of its allocations is refused.

use persia_kernels::Gradients;
use persia_types::tables::{PushReport, PushRequest, Run, TableGradients};
use persia_types::{
    Admission, Id, Initializer, JobId, Optimizer, Schema, ShardedIds, Table, Tables, TablesError, Token,
    VIRTUAL_SHARDS, shard_of,
};

use crate::checkpoint::ShardRows;
use crate::shard::refusal;
use crate::store::{Store, StoreOptions};

const DIMS: [usize; 2] = [1, 64];

/// A store whose second table admits ids at their second push. The rows of that table are so large that its
/// regions are mappings.
fn begun() -> Store {
    let mut tables = DIMS.map(|dim| Table::new(format!("dim_{dim}"), dim)).to_vec();
    tables[1].settings.admission = Some(Admission { probability: 1.0, min_count: 2 });
    let schema = Schema { slots: vec![], tables };
    let store = Store::new(schema.clone(), StoreOptions::default()).unwrap();
    let run = Run {
        job: "memory".into(),
        generation: 1,
        schema,
        seed: 5,
        optimizer: Some(Optimizer::Adam { lr: 0.1, beta1: 0.9, beta2: 0.9, weight_decay: 0.0, eps: 1e-8 }),
        initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: false,
        continues: 0,
        world_size: 1,
        reproducible: false,
    };
    store.begin(&run).unwrap();
    store
}

/// The ids of a step: half of the ids of the previous step and as many new ones, all in two shards.
fn ids(step: u64) -> ShardedIds {
    let all = (0..).filter(|id| [3, 200].contains(&shard_of(*id)));
    let ids: Vec<Id> = all.skip(40 * step as usize).take(80).collect();
    ShardedIds::group(&ids).unwrap()
}

fn push(store: &Store, step: u64) -> Result<PushReport, TablesError> {
    let ids = ids(step);
    let gradients = DIMS.map(|dim| vec![0.5; ids.len() * dim]);
    let tables: Vec<TableGradients<'_>> = (0..DIMS.len())
        .map(|table| TableGradients { table, ids: &ids, gradients: Gradients::Rows(&gradients[table]) })
        .collect();
    let token = Token { job: JobId::from_name("memory"), generation: 1, rank: 0, seq: step };
    store.push(&PushRequest { token, step, lr_factor: 1.0, tables: &tables })
}

fn content(store: &Store) -> Vec<ShardRows> {
    (0..VIRTUAL_SHARDS).map(|shard| store.export_shard(shard)).collect()
}

#[test]
fn a_push_without_memory_changes_nothing_and_may_be_repeated() {
    let (whole, refused) = (begun(), begun());
    let mut refusals = 0;
    for step in 1..=12 {
        let expected = push(&whole, step).unwrap();
        let before = content(&refused);
        let mut granted = 0;
        let report = loop {
            refusal::after(granted);
            let pushed = push(&refused, step);
            let came = refusal::end();
            match pushed {
                Ok(report) if !came => break report,
                Err(TablesError::OutOfMemory { .. }) if came => {}
                other => panic!("step {step}, refused after {granted} requests: {other:?}"),
            }
            assert_eq!(content(&refused), before, "step {step}, refused after {granted} requests");
            refusals += 1;
            granted += 1;
        };
        assert_eq!(report, expected);
    }
    assert!(refusals > 20, "{refusals}");
    assert_eq!(content(&refused), content(&whole));
}
