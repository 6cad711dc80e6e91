//! Generates ids, and a store with their rows.

use persia_kernels::Gradients;
use persia_store::{Store, StoreOptions};
use persia_types::tables::{
    LookupReport, LookupRequest, PushReport, PushRequest, Run, TableGradients, TableIds,
};
use persia_types::{Id, Initializer, JobId, Mode, Optimizer, Schema, ShardedIds, Table, Tables, Token};

/// The number of unique ids of one request: 26 features of 4,096 samples.
pub(crate) const BATCH: usize = 26 * 4_096;

/// A generator of pseudorandom numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        ((u128::from(scramble(self.0)) * bound as u128) >> 64) as usize
    }

    /// `count` different numbers below `bound`, or all of them in a random order.
    pub(crate) fn distinct(&mut self, count: usize, bound: usize) -> Vec<u32> {
        let mut taken = vec![false; bound];
        let mut numbers = Vec::with_capacity(count.min(bound));
        while numbers.len() < count.min(bound / 2) {
            let number = self.below(bound);
            if !std::mem::replace(&mut taken[number], true) {
                numbers.push(number as u32);
            }
        }
        numbers
    }
}

fn scramble(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// The id of row `number`. Consecutive rows have unrelated ids, so that no index benefits from their order.
pub(crate) fn id(number: u32) -> Id {
    scramble(u64::from(number) + 1)
}

/// The ids of the rows with these numbers, grouped as the engine groups them.
pub(crate) fn group(numbers: &[u32]) -> ShardedIds {
    ShardedIds::group(&numbers.iter().map(|number| id(*number)).collect::<Vec<_>>()).expect("few enough ids")
}

/// A store with one table, and the number of the next request.
pub(crate) struct Bench {
    pub(crate) store: Store,
    pub(crate) dim: usize,
    pub(crate) rows: usize,
    seq: std::sync::atomic::AtomicU64,
}

impl Bench {
    /// Create a store that contains the rows `0..rows`.
    pub(crate) fn new(dim: usize, rows: usize, optimizer: Optimizer) -> Self {
        Self::of(Table::new("bench", dim), rows, optimizer)
    }

    /// Like [`Self::new`], with several threads for a request.
    pub(crate) fn divided(dim: usize, rows: usize, optimizer: Optimizer, request_threads: usize) -> Self {
        let options = StoreOptions { request_threads, ..StoreOptions::default() };
        Self::with(Table::new("bench", dim), rows, optimizer, options)
    }

    /// Like [`Self::new`], for a given table.
    pub(crate) fn of(table: Table, rows: usize, optimizer: Optimizer) -> Self {
        Self::with(table, rows, optimizer, StoreOptions::default())
    }

    fn with(table: Table, rows: usize, optimizer: Optimizer, options: StoreOptions) -> Self {
        let dim = table.dim;
        let schema = Schema { slots: vec![], tables: vec![table] };
        let store = Store::new(schema.clone(), options).expect("a good schema");
        let run = Run {
            job: "bench".into(),
            generation: 1,
            schema,
            seed: 1,
            optimizer: Some(optimizer),
            initializer: Initializer::Zero,
            admit_probability: 1.0,
            admit_min_count: 1,
            weight_bound: 10.0,
            fresh: false,
            continues: 0,
            world_size: 1,
            reproducible: false,
        };
        store.begin(&run).expect("a good run");
        let bench = Self { store, dim, rows, seq: 0.into() };
        let zeros = vec![0.0; BATCH * dim];
        for start in (0..rows).step_by(BATCH) {
            let numbers: Vec<u32> = (start..rows.min(start + BATCH)).map(|number| number as u32).collect();
            bench.push(bench.next(), &group(&numbers), &zeros[..numbers.len() * dim]);
        }
        bench
    }

    pub(crate) fn next(&self) -> u64 {
        1 + self.seq.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    fn token(seq: u64) -> Token {
        Token { job: JobId::from_name("bench"), generation: 1, rank: 0, seq }
    }

    pub(crate) fn lookup(&self, seq: u64, mode: Mode, ids: &ShardedIds, out: &mut [f32]) -> LookupReport {
        let request = LookupRequest {
            token: Self::token(seq),
            step: seq,
            mode,
            tables: &[TableIds { table: 0, ids, per_sample: None }],
        };
        self.store.lookup(&request, &mut [out]).expect("a good look-up")
    }

    pub(crate) fn push(&self, seq: u64, ids: &ShardedIds, gradients: &[f32]) -> PushReport {
        let tables = [TableGradients { table: 0, ids, gradients: Gradients::Rows(gradients) }];
        let request = PushRequest { token: Self::token(seq), step: seq, lr_factor: 1.0, tables: &tables };
        self.store.push(&request).expect("a good push")
    }
}
