//! Code shared by the store's tests: a small schema, a run, and short functions for requests.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;

use persia_kernels::Gradients;
use persia_store::checkpoint::ShardRows;
use persia_store::{Store, StoreOptions};
use persia_types::tables::{
    LookupReport, LookupRequest, PushReport, PushRequest, Run, TableGradients, TableIds,
};
use persia_types::{
    Id, Initializer, JobId, Mode, Optimizer, Schema, ShardedIds, Table, Tables, TablesError, Token,
    VIRTUAL_SHARDS,
};

pub(crate) const JOB: &str = "test";
const RANKS: u32 = 128;
pub(crate) const LEDGER: Optimizer = Optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0 };

pub(crate) fn schema(dims: &[usize]) -> Schema {
    let tables = dims.iter().enumerate().map(|(i, dim)| Table::new(format!("table_{i}"), *dim));
    Schema { slots: vec![], tables: tables.collect() }
}

pub(crate) fn run(dims: &[usize]) -> Run {
    Run {
        job: JOB.into(),
        generation: 1,
        schema: schema(dims),
        seed: 7,
        optimizer: Some(LEDGER),
        initializer: Initializer::Zero,
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: false,
        continues: 0,
        world_size: RANKS,
        reproducible: false,
    }
}

pub(crate) fn store_of(run: &Run, capacity: u64) -> Store {
    let options = StoreOptions { capacity, ..StoreOptions::default() };
    let store = Store::new(run.schema.clone(), options).unwrap();
    store.begin(run).unwrap();
    store
}

pub(crate) fn token(rank: u32, seq: u64) -> Token {
    Token { job: JobId::from_name(JOB), generation: 1, rank, seq }
}

pub(crate) fn grouped(ids: &[Id]) -> ShardedIds {
    ShardedIds::group(ids).unwrap()
}

/// The ids of one table in a request.
pub(crate) type Ids = (usize, ShardedIds);

/// Look up ids. The rows returned are in the order of the grouped ids.
pub(crate) fn try_lookup(
    store: &Store,
    token: Token,
    step: u64,
    mode: Mode,
    parts: &[Ids],
) -> Result<(LookupReport, Vec<Vec<f32>>), TablesError> {
    let tables: Vec<TableIds<'_>> =
        parts.iter().map(|(table, ids)| TableIds { table: *table, ids, per_sample: None }).collect();
    let floats = |(table, ids): &Ids| ids.len() * store.schema().tables[*table].dim;
    // No row has this value, so it marks floats that the store did not write.
    let mut rows: Vec<Vec<f32>> = parts.iter().map(|part| vec![-77.0; floats(part)]).collect();
    let mut buffers: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
    let report = store.lookup(&LookupRequest { token, step, mode, tables: &tables }, &mut buffers)?;
    Ok((report, rows))
}

/// A training look-up of one table, which must succeed.
pub(crate) fn train(store: &Store, seq: u64, table: usize, ids: &[Id]) -> (LookupReport, Vec<f32>) {
    let (report, mut rows) =
        try_lookup(store, token(0, seq), seq, Mode::Train, &[(table, grouped(ids))]).unwrap();
    (report, rows.remove(0))
}

/// The row of one id, as an evaluation look-up reads it.
pub(crate) fn read(store: &Store, table: usize, id: Id) -> Vec<f32> {
    try_lookup(store, token(0, 1), 1, Mode::Eval, &[(table, grouped(&[id]))]).unwrap().1.remove(0)
}

/// Push gradients for ids.
pub(crate) fn try_push(
    store: &Store,
    token: Token,
    step: u64,
    parts: &[Ids],
    gradients: &[Vec<f32>],
) -> Result<PushReport, TablesError> {
    let tables: Vec<TableGradients<'_>> = parts
        .iter()
        .zip(gradients)
        .map(|((table, ids), gradients)| TableGradients {
            table: *table,
            ids,
            gradients: Gradients::Rows(gradients),
        })
        .collect();
    store.push(&PushRequest { token, step, lr_factor: 1.0, tables: &tables })
}

/// A push to one table that must succeed. Every element of every gradient is `value`.
pub(crate) fn push(store: &Store, seq: u64, table: usize, ids: &[Id], value: f32) -> PushReport {
    let ids = grouped(ids);
    let gradients = vec![vec![value; ids.len() * store.schema().tables[table].dim]];
    try_push(store, token(0, seq), seq, &[(table, ids)], &gradients).unwrap()
}

/// Insert rows by a push of another rank, with gradients of 0.
pub(crate) fn insert(store: &Store, seq: u64, table: usize, ids: &[Id]) -> PushReport {
    let ids = grouped(ids);
    let gradients = vec![vec![0.0; ids.len() * store.schema().tables[table].dim]];
    try_push(store, token(RANKS - 1, seq), seq, &[(table, ids)], &gradients).unwrap()
}

/// The content of all shards that have rows.
pub(crate) fn export(store: &Store) -> Vec<ShardRows> {
    (0..VIRTUAL_SHARDS)
        .map(|shard| store.export_shard(shard))
        .filter(|rows| !rows.tables.is_empty())
        .collect()
}

/// `count` ids of one shard.
pub(crate) fn ids_of_shard(shard: usize, count: usize) -> Vec<Id> {
    (0..).filter(|id| persia_types::shard_of(*id) == shard).take(count).collect()
}

/// The `(last_used, weights, state)` of a row.
pub(crate) type RowParts = (u64, Vec<f32>, Vec<f32>);

/// All rows, by table and id.
pub(crate) fn all_rows(store: &Store) -> BTreeMap<(usize, Id), RowParts> {
    let mut rows = BTreeMap::new();
    for table in export(store).iter().flat_map(|shard| &shard.tables) {
        let number = store.schema().tables.iter().position(|known| known.name == table.name).unwrap();
        for (at, id) in table.ids.iter().enumerate() {
            let weights = table.weights[at * table.dim..][..table.dim].to_vec();
            let state = table.state[at * table.state_len..][..table.state_len].to_vec();
            rows.insert((number, *id), (table.last_used[at], weights, state));
        }
    }
    rows
}
