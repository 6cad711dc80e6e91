//! Tests that a middleware pools features with many ids, that the results are bit-identical to those of a
//! store in memory, and that fewer bytes are sent.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use persia_engine::{
    Batch, BatchParts, DrainOutcome, Engine, EngineOptions, Gradient, IdFeature, Next, Output, PushOptions,
};
use persia_kernels::{Bags, Gradients};
use persia_store::{Store, StoreOptions};
use persia_types::id::hash_id;
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Snapshot, Stats, TableGradients,
};
use persia_types::{
    Dtype, HashStack, Id, Initializer, Optimizer, Pooling, Schema, Slot, Table, Tables, TablesError,
};
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::settings::Endpoint;

use crate::stack::{JOB, Plan, Stack, run_of};

const LONG: Duration = Duration::from_secs(60);
const STEPS: u64 = 8;
const SAMPLES: u64 = 64;
/// The capacity. It is so small that rows are evicted constantly.
const CAPACITY: u64 = 3_000;

/// The name, dimension and pooling of each slot. The last two share a table.
fn slots() -> Vec<(&'static str, usize, Slot)> {
    let mean = Slot { pooling: Pooling::Mean, ..Slot::default() };
    let root = Slot { sqrt_scaling: true, ..Slot::default() };
    let stacked = Slot { hash_stack: Some(HashStack { rounds: 2, buckets: 500 }), ..root.clone() };
    let raw = Slot { sample_fixed_size: Some(4), ..Slot::default() };
    // A slot whose batches have more buckets than positions, so that pooled vectors would take fewer bytes.
    let raw_stacked = Slot { hash_stack: Some(HashStack { rounds: 2, buckets: 1_000_000 }), ..raw.clone() };
    vec![
        ("sum", 8, Slot::default()),
        ("mean", 19, mean.clone()),
        ("root", 16, root.clone()),
        ("both", 33, Slot { sqrt_scaling: true, ..mean.clone() }),
        ("weighted", 8, Slot::default()),
        ("weighted_root", 64, root),
        ("stacked", 16, stacked),
        ("single", 8, Slot::default()),
        ("raw", 8, raw),
        ("raw_stacked", 8, raw_stacked),
        ("shared_sum", 12, Slot::default()),
        ("shared_mean", 12, mean),
    ]
}

fn schema() -> Schema {
    let mut schema = Schema { slots: Vec::new(), tables: Vec::new() };
    for (name, dim, slot) in slots() {
        let shared = name == "shared_mean";
        if !shared {
            schema.tables.push(Table::new(format!("table_{name}"), dim));
        }
        schema.slots.push(Slot { name: name.into(), table: schema.tables.len() - 1, ..slot });
    }
    schema
}

fn batch(seq: u64) -> Batch {
    let feature = |(number, (name, ..)): (u64, (&'static str, usize, Slot))| {
        let random = |of: u64| hash_id(of ^ number << 20 ^ seq << 40);
        if name == "single" {
            let ids: Vec<Id> = (0..SAMPLES).map(|sample| random(sample) % 700).collect();
            return IdFeature::single(name, &ids).unwrap();
        }
        let (mut ids, mut offsets) = (Vec::new(), vec![0]);
        for sample in 0..SAMPLES {
            let some = if sample % 9 == 4 { 0 } else { random(sample) % 20 };
            ids.extend((0..some).map(|at| random(sample * 32 + at + 1000) % 4_000));
            offsets.push(ids.len());
        }
        let weights: Vec<f32> = ids.iter().map(|id| (id % 17) as f32 / 7.0 - 1.0).collect();
        let feature = IdFeature::lists(name, &ids, &offsets).unwrap();
        if name.starts_with("weighted") { feature.with_weights(&weights).unwrap() } else { feature }
    };
    let id_features = (0..).zip(slots()).map(feature).collect();
    Batch::new(BatchParts { id_features, requires_grad: true, ..BatchParts::default() }).unwrap()
}

fn run(plan: &Plan) -> Run {
    Run {
        optimizer: Some(Optimizer::Adam { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.01, eps: 1e-8 }),
        initializer: Initializer::Normal { mean: 0.0, std: 0.1 },
        reproducible: true,
        ..run_of(plan)
    }
}

fn plan(servers: u32) -> Plan {
    Plan { schema: schema(), capacity: CAPACITY, ..Plan::new(servers) }
}

/// The values of a feature's samples as bits, with the number of positions and the mask of a raw feature.
type Seen = (Vec<u32>, Option<(usize, Vec<bool>)>);
/// The values of all features at each step, and the counters.
type Trained = (Vec<Vec<Seen>>, Stats);

fn trained(tables: Arc<dyn Tables>, run: &Run) -> Trained {
    tables.begin(run).unwrap();
    let options = EngineOptions { job: JOB.into(), reproducible: true, ..EngineOptions::default() };
    let engine = Engine::new(Arc::clone(&tables), run.schema.clone(), options).unwrap();
    let pipeline = engine.pipeline().unwrap();
    let mut steps = Vec::new();
    for seq in 1..=STEPS {
        pipeline.feed(batch(seq), LONG).unwrap();
        let Next::Ready(looked) = pipeline.next(LONG).unwrap() else { panic!("no batch") };
        let outputs: Vec<&[f32]> = looked.outputs.iter().map(AsRef::as_ref).collect();
        let seen = |output: &Output| {
            let bits = output.as_ref().iter().map(|value| value.to_bits()).collect();
            (bits, output.raw().map(|raw| (raw.places, raw.mask.clone())))
        };
        steps.push(looked.outputs.iter().map(seen).collect());
        // A different gradient for each float, with both signs.
        let gradient = |out: &&[f32]| {
            let of = |(at, value): (usize, &f32)| value + (hash_id(at as u64) % 100) as f32 / 50.0 - 1.0;
            Some(Box::new(out.iter().enumerate().map(of).collect::<Vec<f32>>()) as Gradient)
        };
        let mut gradients: Vec<Option<Gradient>> = outputs.iter().map(gradient).collect();
        if seq == 3 {
            gradients[1] = None;
        }
        let scale = PushOptions { scale: 0.7, ..PushOptions::default() };
        looked.ticket.unwrap().push(gradients, scale).unwrap();
        assert!(matches!(engine.drain(LONG).unwrap(), DrainOutcome::Done));
    }
    let stats = tables.stats().unwrap();
    // These statistics depend on the number of servers.
    (steps, Stats { memory_bytes: 0, tokens: BTreeMap::new(), tables: Vec::new(), ..stats })
}

/// A client. With `only_rows`, it asks for no pooled samples and sends no gradients of samples. Otherwise, it counts
/// the pooled look-ups.
struct Watched {
    tables: WireTables,
    only_rows: bool,
    pooled: AtomicU64,
}

impl Watched {
    fn new(stack: &Stack, only_rows: bool, through: Option<Endpoint>) -> Arc<Self> {
        let mut options = stack.options();
        if let Some(endpoint) = through {
            options.targets = Targets::Fixed(vec![endpoint]);
        }
        let tables = WireTables::connect(options).unwrap();
        Arc::new(Self { tables, only_rows, pooled: AtomicU64::new(0) })
    }
}

impl Tables for Watched {
    fn begin(&self, run: &Run) -> Result<(), TablesError> {
        self.tables.begin(run)
    }

    fn pools(&self, dim: usize, ids: usize, bags: &Bags<'_>) -> bool {
        let pools = !self.only_rows && self.tables.pools(dim, ids, bags);
        self.pooled.fetch_add(u64::from(pools), Ordering::Relaxed);
        pools
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        self.tables.lookup(request, rows)
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        if !self.only_rows {
            return self.tables.push(request);
        }
        let dim = |table: &TableGradients<'_>| schema().tables[table.table].dim;
        let rows: Vec<_> = request
            .tables
            .iter()
            .map(|table| table.gradients.rows(0..table.ids.len(), dim(table)).into_owned())
            .collect();
        let tables: Vec<_> = request
            .tables
            .iter()
            .zip(&rows)
            .map(|(table, rows)| TableGradients { gradients: Gradients::Rows(rows), ..*table })
            .collect();
        self.tables.push(&PushRequest { tables: &tables, ..*request })
    }

    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.tables.prepare_snapshot(number)
    }

    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.tables.abort_snapshot(number)
    }

    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        self.tables.write_snapshot(dir, number)
    }

    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.tables.restore(dir, files)
    }

    fn stats(&self) -> Result<Stats, TablesError> {
        self.tables.stats()
    }

    fn clear(&self) -> Result<(), TablesError> {
        self.tables.clear()
    }
}

fn in_memory() -> Trained {
    let store = Store::new(schema(), StoreOptions { capacity: CAPACITY, ..StoreOptions::default() }).unwrap();
    trained(Arc::new(store), &run(&plan(1)))
}

#[test]
fn training_on_samples_pooled_elsewhere_gives_the_bits_of_a_store_in_memory() {
    let reference = in_memory();
    assert!(reference.1.pushes.rows_evicted > 0, "the test is to evict");
    for plan in [plan(1), plan(3), Plan { middleware: false, ..plan(1) }] {
        let stack = Stack::start(plan);
        let tables = Watched::new(&stack, false, None);
        let found = trained(Arc::clone(&tables) as Arc<dyn Tables>, &run(&stack.plan));
        let Plan { servers, middleware, .. } = stack.plan;
        assert!(found == reference, "{servers} servers, middleware: {middleware}");
        // The first seven features are pooled at each step.
        let pooled = if middleware { 7 * STEPS } else { 0 };
        assert_eq!(tables.pooled.load(Ordering::Relaxed), pooled);
    }
}

#[test]
fn numbers_of_sixteen_bits_give_equal_bits_on_any_number_of_servers() {
    let reference = in_memory();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let [one, three] = [1, 3].map(|servers| {
            let stack = Stack::start(plan(servers));
            let tables = WireTables::connect(ClientOptions { wire_dtype: dtype, ..stack.options() }).unwrap();
            trained(Arc::new(tables), &run(&stack.plan))
        });
        assert!(one == three && one != reference, "{dtype:?}");
    }
}

/// Forwards connections to `target`, and counts the bytes in both directions.
fn relay(target: &Endpoint) -> (Endpoint, Arc<AtomicU64>) {
    let Endpoint::Tcp { host, port } = target.clone() else { panic!("a TCP endpoint") };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::Tcp { host: host.clone(), port: listener.local_addr().unwrap().port() };
    let bytes = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&bytes);
    std::thread::spawn(move || {
        for caller in listener.incoming().map_while(Result::ok) {
            let callee = TcpStream::connect((host.as_str(), port)).unwrap();
            for (from, to) in [(&caller, &callee), (&callee, &caller)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let count = Arc::clone(&count);
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 64 * 1024];
                    while let Ok(read @ 1..) = from.read(&mut buffer) {
                        count.fetch_add(read as u64, Ordering::Relaxed);
                        if to.write_all(&buffer[..read]).is_err() {
                            break;
                        }
                    }
                });
            }
        }
    });
    (endpoint, bytes)
}

#[test]
fn fewer_bytes_travel_between_trainer_and_middleware() {
    let through = |only_rows: bool| {
        let stack = Stack::start(plan(2));
        let (endpoint, bytes) = relay(&stack.front);
        let found = trained(Watched::new(&stack, only_rows, Some(endpoint)), &run(&stack.plan));
        (found, bytes.load(Ordering::Relaxed))
    };
    let ((pooled, less), (rows, more)) = (through(false), through(true));
    assert!(pooled == rows, "the same training");
    // Five of the twelve features, and all ids, are sent without pooling.
    assert!(less * 2 < more, "{less} bytes instead of {more}");
}
