//! Tests of `durability: log`: a killed server recovers its last state.

mod damage;
mod power_cut;
mod processes;
mod slow_disk;
mod speed;
mod twins;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use persia_kernels::Gradients;
use persia_server::node::{CheckpointRoot, Fence, GenerationFile, LogOptions, Node, NodeOptions, Phase};
use persia_types::config::LogSync;
use persia_types::id::hash_id;
use persia_types::tables::{
    LookupReport, LookupRequest, PushReport, PushRequest, Run, Stats, TableGradients, TableIds,
};
use persia_types::{Dtype, Initializer, JobId, Mode, Optimizer, Rounding, ShardedIds, TablesError, Token};

use self::twins::Twins;
use crate::running::wait_until;
use crate::stack::{JOB, Plan, run_of, schema, token};

const DIMS: [usize; 2] = [3, 8];

/// A run whose state depends on all requests: eviction, expiry, admission by count, stochastic rounding.
fn run(generation: u64, fresh: bool) -> Run {
    let mut run = Run {
        generation,
        fresh,
        continues: generation.saturating_sub(1),
        schema: schema(&DIMS),
        optimizer: Some(Optimizer::Adagrad {
            lr: 0.1,
            initial_accumulator_value: 0.01,
            g_square_momentum: 1.0,
            weight_decay: 0.0,
            eps: 1e-8,
            vectorwise_shared: false,
        }),
        initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
        admit_probability: 0.9,
        admit_min_count: 2,
        ..run_of(&Plan::new(1))
    };
    run.schema.tables[1].settings.dtype = Dtype::F16;
    run.schema.tables[1].settings.rounding = Rounding::Stochastic;
    run.schema.tables[1].settings.ttl = Some(12);
    run
}

fn options(checkpoints: &Path, log: Option<LogOptions>) -> NodeOptions {
    NodeOptions {
        job: JOB.into(),
        index: 0,
        servers: 1,
        schema: run(1, true).schema,
        capacity: 512,
        request_threads: 1,
        snapshot_threads: 1,
        max_copy_bytes: u64::MAX,
        checkpoints: CheckpointRoot::new(Some(checkpoints.into())),
        turn_timeout: Duration::from_millis(50),
        address: "here".into(),
        log,
    }
}

fn log_options(dir: &Path, sync: LogSync) -> LogOptions {
    LogOptions { dir: dir.join("journal"), sync }
}

/// A server with the data directory `dir`.
fn server(dir: &Path, checkpoints: &Path) -> Node {
    synced_server(dir, checkpoints, LogSync::EverySecond)
}

fn synced_server(dir: &Path, checkpoints: &Path, sync: LogSync) -> Node {
    Node::new(options(checkpoints, Some(log_options(dir, sync))), owned(dir)).unwrap()
}

/// Open the directory, and wait until its lock is free. A child process that another test starts holds the
/// lock between fork and exec.
fn owned(dir: &Path) -> GenerationFile {
    let mut file = None;
    wait_until("the directory's lock", || {
        file = GenerationFile::open(Some(dir)).ok();
        file.is_some()
    });
    file.unwrap()
}

/// Copy the data, as a process that is killed now would leave it.
fn left_behind(dir: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    fs::create_dir(copy.path().join("journal")).unwrap();
    for name in fs::read_dir(dir.join("journal")).unwrap().map(|entry| entry.unwrap().file_name()) {
        fs::copy(dir.join("journal").join(&name), copy.path().join("journal").join(&name)).unwrap();
    }
    fs::copy(dir.join("generation"), copy.path().join("generation")).unwrap();
    copy
}

/// The rows with their state, as hashes of their files, and the counters.
fn state(node: &Node, generation: u64, checkpoints: &Path) -> (BTreeMap<String, String>, Stats) {
    let dir = tempfile::tempdir_in(checkpoints).unwrap();
    let name = dir.path().file_name().unwrap().to_str().unwrap().to_owned();
    let files = node.write_snapshot(fence(generation), &name, None).unwrap().files;
    (files.into_iter().map(|file| (file.name, file.blake3)).collect(), counters(node))
}

/// The counters that a log restores.
fn counters(node: &Node) -> Stats {
    let (lookups, tables) = (LookupReport::default(), Vec::new());
    Stats { memory_bytes: 0, lookups, tables, ..node.stats().unwrap() }
}

fn fence(generation: u64) -> Fence {
    Fence { job: JobId::from_name(JOB), generation }
}

type Parts = Vec<(usize, ShardedIds)>;

fn look_up(
    node: &Node,
    token: Token,
    step: u64,
    parts: &Parts,
) -> Result<(LookupReport, Vec<Vec<f32>>), TablesError> {
    let tables: Vec<TableIds<'_>> =
        parts.iter().map(|(table, ids)| TableIds { table: *table, ids, per_sample: None }).collect();
    let mut rows: Vec<Vec<f32>> =
        parts.iter().map(|(table, ids)| vec![0.0; ids.len() * DIMS[*table]]).collect();
    let mut buffers: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
    let request = LookupRequest { token, step, mode: Mode::Train, tables: &tables };
    let report = node.lookup(None, &request, &mut buffers)?;
    Ok((report, rows))
}

fn push_to(
    node: &Node,
    token: Token,
    step: u64,
    parts: &Parts,
    value: f32,
) -> Result<PushReport, TablesError> {
    let gradients: Vec<Vec<f32>> =
        parts.iter().map(|(table, ids)| vec![value; ids.len() * DIMS[*table]]).collect();
    let tables: Vec<TableGradients<'_>> = parts
        .iter()
        .zip(&gradients)
        .map(|((table, ids), rows)| TableGradients { table: *table, ids, gradients: Gradients::Rows(rows) })
        .collect();
    node.push(None, &PushRequest { token, step, lr_factor: 0.5, tables: &tables })
}

#[test]
fn a_killed_server_resumes_where_it_was() {
    for seed in 0..3 {
        let mut twins = Twins::new();
        for number in 0..60 {
            twins.random(hash_id(seed << 32 | number));
            if hash_id(number ^ seed << 40).is_multiple_of(16) {
                twins.kill();
                if number % 3 == 0 {
                    twins.check(&format!("seed {seed}, after request {number}"));
                }
            }
        }
        twins.kill();
        twins.check(&format!("seed {seed}"));
        // Acknowledged requests are recognized, so that none counts twice.
        let (token, parts) = (token(0, twins.seq), vec![(0, ShardedIds::group(&[1, 2]).unwrap())]);
        let token = Token { generation: twins.generation, ..token };
        twins.both("push", |node| push_to(node, token, twins.seq, &parts, 1.0));
        twins.both("the same push", |node| push_to(node, token, twins.seq, &parts, 1.0));
        twins.check(&format!("seed {seed}, at its end"));
    }
}

#[test]
fn a_cut_survives_a_restart() {
    let mut twins = Twins::new();
    (0..20).for_each(|_| twins.train());
    twins.both("prepare_snapshot", |node| node.prepare_snapshot(fence(1), 9));
    (0..5).for_each(|_| twins.train());
    twins.kill();
    (0..5).for_each(|_| twins.train());
    let files = [0, 1].map(|at| {
        let name = format!("cut-{at}");
        fs::create_dir(twins.checkpoints.path().join(&name)).unwrap();
        twins.nodes[at].write_snapshot(fence(1), &name, Some(9)).unwrap().files
    });
    assert_eq!(files[0], files[1]);
    let before = twins.nodes[0].log_bytes().unwrap();
    // If an earlier cut is committed after a later one, its checkpoint does not become the base. Otherwise,
    // the requests between the cuts would be lost.
    twins.both("prepare_snapshot", |node| node.prepare_snapshot(fence(1), 10));
    (0..5).for_each(|_| twins.train());
    twins.nodes[0].commit_snapshot(fence(1), 9, "cut-0", &files[0]).unwrap();
    assert!(twins.nodes[0].log_bytes().unwrap() > before);
    twins.kill();
    twins.check("after a late commit");
    // `check` wrote the current rows and so ended the cut.
    twins.cut = 10;
    twins.save(true);
    assert!(twins.nodes[0].log_bytes().unwrap() < before);
    twins.kill();
    twins.check("after the checkpoint");
}

#[test]
fn copies_for_a_cut_do_not_block_a_replay() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let start = || {
        let log = Some(log_options(data.path(), LogSync::EverySecond));
        let options = NodeOptions { max_copy_bytes: 1, ..options(checkpoints.path(), log) };
        Node::new(options, owned(data.path())).unwrap()
    };
    let node = start();
    node.begin(1, &run(1, true), false).unwrap();
    let parts = vec![(0, ShardedIds::group(&(1..40).collect::<Vec<_>>()).unwrap())];
    let train = |node: &Node, seq| {
        look_up(node, token(0, seq), seq, &parts).unwrap();
        push_to(node, token(0, seq), seq, &parts, 1.0).unwrap();
    };
    train(&node, 1);
    node.prepare_snapshot(fence(1), 1).unwrap();
    let began = std::time::Instant::now();
    (2..100).for_each(|seq| train(&node, seq));
    assert!(node.is_full());
    drop(node);
    let node = start();
    assert!(node.is_full(), "the cut is held");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?} for requests that do not wait", began.elapsed());
    node.abort_snapshot(fence(1), 1).unwrap();
    train(&node, 100);
    assert!(!node.is_full());
    drop(node);
    let node = start();
    train(&node, 101);
    assert!(!node.is_full(), "an aborted snapshot is not held again");
}

#[tokio::test]
async fn the_order_of_a_reproducible_run_is_resumed() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = server(data.path(), checkpoints.path());
    let run = Run { world_size: 2, reproducible: true, ..run(1, true) };
    node.begin(1, &run, false).unwrap();
    let parts = vec![(0, ShardedIds::group(&[1, 2, 3]).unwrap())];
    for rank in 0..2 {
        let turn = node.admit(token(rank, 1), Phase::Lookup).await.unwrap();
        let tables = [TableIds { table: 0, ids: &parts[0].1, per_sample: None }];
        let request = LookupRequest { token: token(rank, 1), step: 1, mode: Mode::Train, tables: &tables };
        node.lookup(turn, &request, &mut [&mut [0.0; 9]]).unwrap();
    }
    drop(node.admit(token(0, 1), Phase::Push).await.unwrap());
    push_to(&node, token(0, 1), 1, &parts, 1.0).unwrap();
    drop(node);
    let node = server(data.path(), checkpoints.path());
    // The push of rank 0 was served. The push of rank 1 is next, and the next look-up of rank 0 comes after
    // that.
    assert!(node.admit(token(0, 1), Phase::Push).await.unwrap().is_none());
    let early = node.admit(token(1, 2), Phase::Lookup).await.unwrap_err();
    assert!(early.to_string().contains("push of rank 1 for step 1"), "{early}");
    assert!(node.admit(token(1, 1), Phase::Push).await.unwrap().is_some());
}

#[test]
fn rows_that_no_log_describes_are_not_trained_before_a_restore() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = server(data.path(), checkpoints.path());
    node.begin(1, &run(1, true), false).unwrap();
    let parts = vec![(0, ShardedIds::group(&[1, 2, 3]).unwrap())];
    let train = |generation, seq| push_to(&node, Token { generation, ..token(0, seq) }, seq, &parts, 1.0);
    (1..=4).for_each(|seq| assert_eq!(train(1, seq).unwrap().rows_duplicate, 0));
    fs::create_dir(checkpoints.path().join("save")).unwrap();
    let files = node.write_snapshot(fence(1), "save", None).unwrap().files;
    // The rows are restored, but a new log cannot be started.
    fs::remove_dir_all(data.path().join("journal")).unwrap();
    assert!(node.restore(fence(1), "save", &files, false).is_err());
    fs::create_dir(data.path().join("journal")).unwrap();
    node.begin(1, &run(2, false), false).unwrap();
    let rows = node.stats().unwrap().rows;
    assert!(rows[0] > 0);
    let error = train(2, 1).unwrap_err();
    assert!(error.to_string().contains("cannot write its log"), "{error}");
    node.restore(fence(2), "save", &files, false).unwrap();
    train(2, 1).unwrap();
    let expected = node.stats().unwrap().rows;
    drop(node);
    assert_eq!(server(data.path(), checkpoints.path()).stats().unwrap().rows, expected);
}
