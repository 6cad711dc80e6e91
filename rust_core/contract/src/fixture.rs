//! Helpers for the cases.

use std::sync::Arc;

use persia_kernels::Gradients;
use persia_types::id::{Id, ShardedIds};
use persia_types::schema::{Initializer, Optimizer};
use persia_types::tables::{
    LookupReport, LookupRequest, Mode, PushReport, PushRequest, Run, TableGradients, TableIds, Tables,
    TablesError,
};
use persia_types::token::{JobId, Token};

use crate::{Make, schema};

pub(super) const JOB: &str = "contract";
pub(super) const GENERATION: u64 = 3;
const RANKS: u32 = 8;

/// An optimizer that computes `w -= g`, so that rows show the number of pushes.
pub(super) const LEDGER: Optimizer = Optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0 };

/// A run that continues to train the rows of [`run`].
pub(super) fn next_run() -> Run {
    Run { generation: GENERATION + 1, continues: GENERATION, ..run() }
}

/// The run with which most cases begin.
pub(super) fn run() -> Run {
    Run {
        job: JOB.into(),
        generation: GENERATION,
        schema: schema(),
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

pub(super) fn token(rank: u32, seq: u64) -> Token {
    Token { job: JobId::from_name(JOB), generation: GENERATION, rank, seq }
}

/// Fresh tables on which [`run`] has begun.
pub(super) fn begun(make: Make<'_>) -> Fixture {
    begun_with(make, &run())
}

pub(super) fn begun_with(make: Make<'_>, run: &Run) -> Fixture {
    let tables = make();
    tables.begin(run).expect("a good run begins");
    Fixture(tables)
}

pub(super) struct Fixture(pub(super) Arc<dyn Tables>);

/// Rows in the order of the caller's ids, not of their shards.
pub(super) type Rows = Vec<Vec<f32>>;

impl Fixture {
    /// Look up ids of one table. The rows are in the order of `ids`.
    pub(super) fn try_lookup(
        &self,
        token: Token,
        mode: Mode,
        table: usize,
        ids: &[Id],
    ) -> Result<(Rows, LookupReport), TablesError> {
        let dim = schema().tables[table].dim;
        let grouped = ShardedIds::group(ids).unwrap();
        // NaN marks a row that was not written.
        let mut floats = vec![f32::NAN; ids.len() * dim];
        let tables = [TableIds { table, ids: &grouped, per_sample: None }];
        let request = LookupRequest { token, step: token.seq, mode, tables: &tables };
        let report = self.0.lookup(&request, &mut [&mut floats])?;
        let place = |id: &Id| grouped.ids().iter().position(|other| other == id).unwrap();
        Ok((ids.iter().map(|id| floats[place(id) * dim..][..dim].to_vec()).collect(), report))
    }

    pub(super) fn train(&self, seq: u64, table: usize, ids: &[Id]) -> (Rows, LookupReport) {
        self.try_lookup(token(0, seq), Mode::Train, table, ids).expect("a training look-up")
    }

    pub(super) fn read(&self, table: usize, ids: &[Id]) -> Rows {
        self.try_lookup(token(0, 1), Mode::Eval, table, ids).expect("an eval look-up").0
    }

    /// Push gradients to one table. `gradients[i]` is for `ids[i]`.
    pub(super) fn try_push(
        &self,
        token: Token,
        table: usize,
        ids: &[Id],
        gradients: &[Vec<f32>],
        lr_factor: f32,
    ) -> Result<PushReport, TablesError> {
        let grouped = ShardedIds::group(ids).unwrap();
        let place = |id: &Id| ids.iter().position(|other| other == id).unwrap();
        let floats: Vec<f32> = grouped.ids().iter().flat_map(|id| gradients[place(id)].clone()).collect();
        let tables = [TableGradients { table, ids: &grouped, gradients: Gradients::Rows(&floats) }];
        self.0.push(&PushRequest { token, step: token.seq, lr_factor, tables: &tables })
    }

    pub(super) fn push(&self, seq: u64, table: usize, ids: &[Id], gradients: &[Vec<f32>]) -> PushReport {
        self.try_push(token(0, seq), table, ids, gradients, 1.0).expect("a push")
    }

    /// Insert rows by a push of the last rank, with gradients of 0.
    pub(super) fn insert(&self, seq: u64, table: usize, ids: &[Id]) -> PushReport {
        let gradients = vec![vec![0.0; schema().tables[table].dim]; ids.len()];
        self.try_push(token(RANKS - 1, seq), table, ids, &gradients, 1.0).expect("a push")
    }

    /// The number of rows of each table.
    pub(super) fn rows_held(&self) -> Vec<u64> {
        self.0.stats().unwrap().rows
    }
}

/// A gradient for each id: `[id % 1000 + 1; dim]`.
pub(super) fn distinct_gradients(table: usize, ids: &[Id]) -> Vec<Vec<f32>> {
    let dim = schema().tables[table].dim;
    ids.iter().map(|id| vec![(*id % 1000 + 1) as f32; dim]).collect()
}

/// The rows, from zeros, after `times` pushes of [`distinct_gradients`] under [`LEDGER`].
pub(super) fn pushed(table: usize, ids: &[Id], times: f32) -> Rows {
    distinct_gradients(table, ids)
        .into_iter()
        .map(|row| row.into_iter().map(|g| 0.0 - g * times).collect())
        .collect()
}

/// Ids in many shards.
pub(super) fn ids(count: u64) -> Vec<Id> {
    (0..count).map(|i| i * 31 + 5).collect()
}
