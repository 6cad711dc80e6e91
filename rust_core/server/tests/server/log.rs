//! `durability: log`: a server that is killed goes on where it was.

mod power_cut;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use persia_kernels::Gradients;
use persia_server::node::{CheckpointRoot, Fence, GenerationFile, LogOptions, Node, NodeOptions, Phase};
use persia_types::config::LogSync;
use persia_types::id::hash_id;
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Stats, TableGradients, TableIds,
};
use persia_types::{
    Dtype, Id, Initializer, JobId, Mode, Optimizer, Rounding, ShardedIds, Tables, TablesError, Token,
};
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::discovery::Service;

use crate::running::{PATIENCE, Process, SERVER, Setting, client_of, plan, wait_until};
use crate::stack::{JOB, Plan, lookup, push, run_of, schema, token};

const DIMS: [usize; 2] = [3, 8];

/// Everything that depends on more than the last request: eviction, expiry, admission by count, rounding by chance.
fn run(generation: u64, fresh: bool) -> Run {
    let mut run = Run {
        generation,
        fresh,
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

/// A server whose data are in `dir`.
fn server(dir: &Path, checkpoints: &Path) -> Node {
    synced_server(dir, checkpoints, LogSync::EverySecond)
}

fn synced_server(dir: &Path, checkpoints: &Path, sync: LogSync) -> Node {
    Node::new(options(checkpoints, Some(log_options(dir, sync))), owned(dir)).unwrap()
}

/// Another test that starts a process has our locks for a moment, too: between its fork and its exec.
fn owned(dir: &Path) -> GenerationFile {
    let mut file = None;
    wait_until("the directory's lock", || {
        file = GenerationFile::open(Some(dir)).ok();
        file.is_some()
    });
    file.unwrap()
}

/// What a process that is killed now leaves behind.
fn left_behind(dir: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    fs::create_dir(copy.path().join("journal")).unwrap();
    for name in fs::read_dir(dir.join("journal")).unwrap().map(|entry| entry.unwrap().file_name()) {
        fs::copy(dir.join("journal").join(&name), copy.path().join("journal").join(&name)).unwrap();
    }
    fs::copy(dir.join("generation"), copy.path().join("generation")).unwrap();
    copy
}

/// Rows with everything that belongs to them, by the hashes of their files, and the counters.
fn state(node: &Node, generation: u64, checkpoints: &Path) -> (BTreeMap<String, String>, Stats) {
    let dir = tempfile::tempdir_in(checkpoints).unwrap();
    let name = dir.path().file_name().unwrap().to_str().unwrap().to_owned();
    let files = node.write_snapshot(fence(generation), &name, None).unwrap().files;
    let stats = Stats { memory_bytes: 0, ..node.stats().unwrap() };
    (files.into_iter().map(|file| (file.name, file.blake3)).collect(), stats)
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

/// The same requests to a server with a journal and to one without.
struct Twins {
    nodes: [Node; 2],
    data: [tempfile::TempDir; 2],
    checkpoints: tempfile::TempDir,
    generation: u64,
    seq: u64,
    cut: u64,
    sent: Vec<(Token, Parts)>,
    saved: Option<(String, Vec<FileEntry>)>,
}

impl Twins {
    fn new() -> Self {
        Self::synced(LogSync::EverySecond)
    }

    fn synced(sync: LogSync) -> Self {
        let checkpoints = tempfile::tempdir().unwrap();
        let data = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let with = synced_server(data[0].path(), checkpoints.path(), sync);
        let without = Node::new(options(checkpoints.path(), None), owned(data[1].path())).unwrap();
        let mut twins = Self {
            nodes: [with, without],
            data,
            checkpoints,
            generation: 0,
            seq: 0,
            cut: 0,
            sent: Vec::new(),
            saved: None,
        };
        twins.begin(true);
        twins
    }

    fn begin(&mut self, fresh: bool) {
        self.generation += 1;
        self.nodes.iter().for_each(|node| node.begin(1, &run(self.generation, fresh), false).unwrap());
        self.sent.clear();
    }

    fn both<T: PartialEq + std::fmt::Debug>(
        &self,
        what: &str,
        call: impl Fn(&Node) -> Result<T, TablesError>,
    ) -> T {
        let [with, without] = self.nodes.each_ref().map(|node| call(node).map_err(|error| error.to_string()));
        assert_eq!(with, without, "{what}");
        with.unwrap()
    }

    /// Write the rows of a cut and say so, as a trainer does.
    fn save(&mut self, told: bool) {
        self.cut += 1;
        let name = format!("save-{}", self.cut);
        let cut = self.cut;
        self.both("prepare_snapshot", |node| node.prepare_snapshot(fence(self.generation), cut));
        (0..3).for_each(|_| self.train());
        let dirs = ["with", "without"].map(|of| format!("{name}-{of}"));
        let files = [0, 1].map(|at| {
            fs::create_dir(self.checkpoints.path().join(&dirs[at])).unwrap();
            self.nodes[at].write_snapshot(fence(self.generation), &dirs[at], Some(cut)).unwrap().files
        });
        assert_eq!(files[0], files[1]);
        let [files, _] = files;
        if told {
            self.nodes[0].commit_snapshot(fence(self.generation), cut, &dirs[0], &files).unwrap();
        }
        self.saved = Some((dirs[0].clone(), files));
    }

    fn train(&mut self) {
        self.seq += 1;
        let (seq, random) = (self.seq, |of: u64| hash_id(of ^ self.seq << 32) as usize);
        let parts: Parts = (0..DIMS.len())
            .map(|table| {
                let ids: std::collections::BTreeSet<Id> =
                    (0..40).map(|at| (random(at + 100 * table as u64) % 900) as Id).collect();
                (table, ShardedIds::group(&ids.into_iter().collect::<Vec<_>>()).unwrap())
            })
            .collect();
        let token = Token { job: JobId::from_name(JOB), generation: self.generation, rank: 0, seq };
        self.both("look-up", |node| look_up(node, token, seq, &parts));
        self.sent.push((token, parts));
        // Pushes come up to two steps later.
        if self.sent.len() > 2 {
            self.push();
        }
    }

    fn push(&mut self) {
        if self.sent.is_empty() {
            return;
        }
        let (token, parts) = self.sent.remove(0);
        self.both("push", |node| push_to(node, token, token.seq, &parts, token.seq as f32 * 0.1));
    }

    fn random(&mut self, random: u64) {
        match random % 40 {
            0..24 => self.train(),
            24..30 => self.push(),
            30 => {
                // Refused: a step of 0 is none.
                let [with, without] =
                    self.nodes.each_ref().map(|node| look_up(node, token(0, 0), 0, &vec![]).is_err());
                assert!(with && without);
            }
            31 => {
                let Some((token, parts)) = self.sent.last().cloned() else { return };
                self.both("repeated look-up", |node| look_up(node, token, token.seq, &parts));
            }
            32 => self.save(true),
            33 => self.save(false),
            34 => {
                self.cut += 1;
                let cut = self.cut;
                self.both("prepare_snapshot", |node| node.prepare_snapshot(fence(self.generation), cut));
            }
            35 => {
                let Some((dir, files)) = &self.saved else { return };
                self.both("restore", |node| node.restore(fence(self.generation), dir, files, false));
                self.sent.clear();
            }
            36 => {
                self.both("clear", |node| node.clear(fence(self.generation)));
                self.sent.clear();
            }
            37 => self.begin(false),
            38 => self.begin(true),
            _ => {
                let cut = self.cut;
                self.both("abort_snapshot", |node| node.abort_snapshot(fence(self.generation), cut));
            }
        }
    }

    /// Kill the one with the journal, and start it again.
    fn kill(&mut self) {
        let copy = left_behind(self.data[0].path());
        self.nodes[0] = server(copy.path(), self.checkpoints.path());
        self.data[0] = copy;
    }

    fn check(&self, what: &str) {
        let [with, without] =
            self.nodes.each_ref().map(|node| state(node, self.generation, self.checkpoints.path()));
        assert_eq!(with, without, "{what}");
    }
}

#[test]
fn a_server_that_is_killed_goes_on_where_it_was() {
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
        // What was acknowledged is known: nothing counts twice.
        let (token, parts) = (token(0, twins.seq), vec![(0, ShardedIds::group(&[1, 2]).unwrap())]);
        let token = Token { generation: twins.generation, ..token };
        twins.both("push", |node| push_to(node, token, twins.seq, &parts, 1.0));
        twins.both("the same push", |node| push_to(node, token, twins.seq, &parts, 1.0));
        twins.check(&format!("seed {seed}, at its end"));
    }
}

#[test]
fn a_cut_outlives_its_server() {
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
    // Told late, of a cut that is not the last one, it is no base: what came between would be lost.
    twins.both("prepare_snapshot", |node| node.prepare_snapshot(fence(1), 10));
    (0..5).for_each(|_| twins.train());
    twins.nodes[0].commit_snapshot(fence(1), 9, "cut-0", &files[0]).unwrap();
    assert!(twins.nodes[0].log_bytes().unwrap() > before);
    twins.kill();
    twins.check("behind a checkpoint that was told of late");
    // `check` wrote the rows of now, which ends the cut.
    twins.cut = 10;
    twins.save(true);
    assert!(twins.nodes[0].log_bytes().unwrap() < before);
    twins.kill();
    twins.check("behind the checkpoint");
}

/// The journal of a short run: its only segment, and what the state is after each of its records.
fn short() -> (tempfile::TempDir, tempfile::TempDir, Vec<(u64, Stats)>) {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = server(data.path(), checkpoints.path());
    node.begin(1, &run(1, true), false).unwrap();
    let segment = || fs::metadata(data.path().join("journal/1")).unwrap().len();
    let now = || (segment(), Stats { memory_bytes: 0, ..node.stats().unwrap() });
    let mut states = vec![now()];
    for seq in 1..=3 {
        let parts = vec![(0, ShardedIds::group(&[seq, 7]).unwrap())];
        look_up(&node, token(0, seq), seq, &parts).unwrap();
        states.push(now());
        push_to(&node, token(0, seq), seq, &parts, 1.0).unwrap();
        states.push(now());
    }
    drop(node);
    (data, checkpoints, states)
}

#[test]
fn a_record_that_was_not_written_whole_is_as_if_it_had_not_come() {
    let (data, checkpoints, states) = short();
    let segment = fs::read(data.path().join("journal/1")).unwrap();
    let first = states[0].0 as usize;
    for length in 0..segment.len() {
        fs::write(data.path().join("journal/1"), &segment[..length]).unwrap();
        let node = server(data.path(), checkpoints.path());
        let found = Stats { memory_bytes: 0, ..node.stats().unwrap() };
        if length < first {
            // Not even its beginning was: the generation is all that is known.
            assert_eq!(
                found,
                Stats { generation: 1, rows: vec![0, 0], ..Stats::default() },
                "{length} bytes"
            );
            continue;
        }
        let (whole, expected) = states.iter().rev().find(|(bytes, _)| *bytes as usize <= length).unwrap();
        assert_eq!(found, *expected, "{length} bytes");
        drop(node);
        assert_eq!(fs::metadata(data.path().join("journal/1")).unwrap().len(), *whole, "{length} bytes");
    }
}

#[test]
fn what_the_disk_never_got_of_the_end_reads_as_zeros_and_had_not_come() {
    let (data, checkpoints, states) = short();
    let path = data.path().join("journal/1");
    let now = |node: &Node| Stats { memory_bytes: 0, ..node.stats().unwrap() };
    let segment = fs::read(&path).unwrap();
    for (bytes, expected) in &states {
        for zeros in [1, 12, 700, 100_000] {
            let mut content = segment[..*bytes as usize].to_vec();
            content.resize(content.len() + zeros, 0);
            fs::write(&path, &content).unwrap();
            assert_eq!(
                now(&server(data.path(), checkpoints.path())),
                *expected,
                "{zeros} zeros behind {bytes}"
            );
            assert_eq!(fs::metadata(&path).unwrap().len(), *bytes, "{zeros} zeros");
        }
    }
    // The end of a long record.
    let node = server(data.path(), checkpoints.path());
    let before = now(&node);
    let ids: Vec<u64> = (1 << 40..(1 << 40) + 300).collect();
    look_up(&node, token(0, 9), 9, &vec![(0, ShardedIds::group(&ids).unwrap())]).unwrap();
    let after = now(&node);
    assert_ne!(before, after);
    drop(node);
    let whole = fs::read(&path).unwrap();
    let begin = states.last().unwrap().0 as usize;
    for from in (begin.next_multiple_of(512)..whole.len()).step_by(512) {
        let mut content = whole.clone();
        content[from..].fill(0);
        fs::write(&path, &content).unwrap();
        assert_eq!(now(&server(data.path(), checkpoints.path())), before, "zeros from {from}");
        // A hole is no end.
        *content.last_mut().unwrap() = 1;
        fs::write(&path, &content).unwrap();
        let node = server(data.path(), checkpoints.path());
        assert!(
            matches!(node.prepare_snapshot(fence(1), 1), Err(TablesError::NotBegun)),
            "a hole from {from}"
        );
    }
    assert!(whole.len() > begin + 1024);
    fs::write(&path, &whole).unwrap();
    assert_eq!(now(&server(data.path(), checkpoints.path())), after);
}

#[test]
fn zeros_that_were_written_are_no_excuse_for_damage() {
    let (data, checkpoints, states) = short();
    let path = data.path().join("journal/1");
    let begin = states.last().unwrap().0 as usize;
    let node = server(data.path(), checkpoints.path());
    let ids: Vec<u64> = (1 << 40..(1 << 40) + 300).collect();
    let parts = vec![(0, ShardedIds::group(&ids).unwrap())];
    push_to(&node, token(0, 9), 9, &parts, 0.0).unwrap();
    drop(node);
    let whole = fs::read(&path).unwrap();
    assert!(whole[begin..].iter().rev().skip(1).take(2048).all(|byte| *byte == 0), "gradients of 0");
    for at in (begin..whole.len()).step_by(97) {
        let mut content = whole.clone();
        content[at] ^= 1;
        fs::write(&path, &content).unwrap();
        let node = server(data.path(), checkpoints.path());
        assert!(matches!(node.prepare_snapshot(fence(1), 1), Err(TablesError::NotBegun)), "byte {at}");
    }
}

#[test]
fn a_segment_that_was_only_begun_is_as_if_it_had_not() {
    let (data, checkpoints, states) = short();
    let node = server(data.path(), checkpoints.path());
    node.prepare_snapshot(fence(1), 1).unwrap();
    drop(node);
    let [first, second] = ["journal/1", "journal/2"].map(|name| fs::read(data.path().join(name)).unwrap());
    let now = |node: &Node| Stats { memory_bytes: 0, ..node.stats().unwrap() };
    let expected = &states.last().unwrap().1;
    let mut seq = 100;
    // The name of the second may be there before the end of the first is, and before its own beginning is.
    for (lost, left) in [(0, 0), (0, 3), (1, second.len()), (12, second.len()), (20, 0), (0, second.len())] {
        fs::write(data.path().join("journal/1"), &first[..first.len() - lost]).unwrap();
        fs::write(data.path().join("journal/2"), &second[..left]).unwrap();
        let node = server(data.path(), checkpoints.path());
        assert_eq!(now(&node), *expected, "{lost} bytes of the first lost, {left} of the second there");
        seq += 1;
        look_up(&node, token(0, seq), seq, &vec![(0, ShardedIds::group(&[seq]).unwrap())]).unwrap();
        let then = now(&node);
        drop(node);
        assert_eq!(now(&server(data.path(), checkpoints.path())), then, "{lost}, {left}");
    }
    // With a request behind it the end of the first is missed.
    let node = server(data.path(), checkpoints.path());
    drop(node);
    fs::write(data.path().join("journal/1"), &first[..first.len() - 1]).unwrap();
    assert!(fs::metadata(data.path().join("journal/2")).unwrap().len() > second.len() as u64);
    let node = server(data.path(), checkpoints.path());
    assert!(matches!(node.prepare_snapshot(fence(1), 1), Err(TablesError::NotBegun)));
}

#[test]
fn copies_for_a_cut_hold_up_nobody_who_goes_on_where_a_log_ends() {
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
    assert!(began.elapsed() < Duration::from_secs(20), "{:?} for what waits for nobody", began.elapsed());
    node.abort_snapshot(fence(1), 1).unwrap();
    train(&node, 100);
    assert!(!node.is_full());
    drop(node);
    let node = start();
    train(&node, 101);
    assert!(!node.is_full(), "what was given up is not held again");
}

#[test]
fn a_damaged_journal_is_never_used() {
    let (data, checkpoints, states) = short();
    let last = &states.last().unwrap().1;
    let mut found = 0;
    for name in ["journal/1", "journal/base"] {
        let path = data.path().join(name);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(&path, &damaged).unwrap();
            let node = server(data.path(), checkpoints.path());
            let error = node.prepare_snapshot(fence(1), 1).unwrap_err();
            assert!(matches!(error, TablesError::NotBegun), "byte {at} of {name}: {error}");
            found += 1;
        }
        fs::write(&path, &whole).unwrap();
    }
    assert!(found > 500, "{found}");
    let node = server(data.path(), checkpoints.path());
    assert_eq!(Stats { memory_bytes: 0, ..node.stats().unwrap() }, *last);
    drop(node);
    // Nor is one of another server or job, or from before the generation that began last.
    let log = Some(log_options(data.path(), LogSync::EverySecond));
    let of = |capacity| NodeOptions { capacity, ..options(checkpoints.path(), log.clone()) };
    let other = Node::new(of(1024), owned(data.path())).unwrap();
    assert!(matches!(other.prepare_snapshot(fence(1), 1), Err(TablesError::NotBegun)));
    drop(other);
    let other = Node::new(NodeOptions { job: "other".into(), ..of(512) }, owned(data.path())).unwrap();
    assert!(matches!(other.prepare_snapshot(fence(1), 1), Err(TablesError::NotBegun)));
    assert_eq!(other.stats().unwrap().rows, [0, 0]);
    drop(other);
    fs::write(data.path().join("generation"), "2\n").unwrap();
    let late = server(data.path(), checkpoints.path());
    assert!(matches!(late.prepare_snapshot(fence(1), 1), Err(TablesError::NotBegun)));
    // The next run begins another journal.
    late.begin(1, &run(3, true), false).unwrap();
    drop(late);
    server(data.path(), checkpoints.path()).prepare_snapshot(fence(3), 1).unwrap();
}

#[tokio::test]
async fn the_order_of_a_reproducible_run_goes_on_as_well() {
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
    // Of rank 0 it was served: rank 1 is next, and its look-up of the next step comes behind that.
    assert!(node.admit(token(0, 1), Phase::Push).await.unwrap().is_none());
    let early = node.admit(token(1, 2), Phase::Lookup).await.unwrap_err();
    assert!(early.to_string().contains("push 1 of rank 1"), "{early}");
    assert!(node.admit(token(1, 1), Phase::Push).await.unwrap().is_some());
}

#[test]
fn a_killed_process_comes_back_and_every_update_counts_once() {
    let setting = Setting::new();
    let config = setting.path("global_config.yml");
    let text = "embedding_parameter_server_config: {durability: log, log_sync: always}";
    fs::write(&config, text).unwrap();
    let flags = |index: usize| {
        let (listen, data) =
            (format!("unix:{}", setting.path(&format!("s{index}"))), setting.path(&format!("d{index}")));
        ["--global-config".to_owned(), config.clone(), "--listen".into(), listen, "--data-dir".into(), data]
    };
    let start = |index: usize| {
        let flags = flags(index);
        setting.server(index as u32, 2, &flags.each_ref().map(String::as_str))
    };
    let mut servers = [0, 1].map(start);
    let addresses = format!("{},{}", servers[0].endpoint(), servers[1].endpoint());
    let middleware = setting.middleware(&["--servers", &addresses]);
    let client = client_of(middleware.endpoint());
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&Run { fresh: true, ..run_of(&plan()) }).unwrap();
    let ids = vec![(0..300).collect::<Vec<Id>>()];
    let steps = 120;
    std::thread::scope(|threads| {
        let trains = threads.spawn(|| {
            for seq in 1..=steps {
                lookup(&client, token(0, seq), Mode::Train, &[4], &ids).unwrap();
                let grouped = ShardedIds::group(&ids[0]).unwrap();
                let gradients = vec![1.0; 300 * 4];
                let part = TableGradients { table: 0, ids: &grouped, gradients: Gradients::Rows(&gradients) };
                let request =
                    PushRequest { token: token(0, seq), step: seq, lr_factor: 1.0, tables: &[part] };
                client.push(&request).unwrap();
            }
        });
        for round in 0..6 {
            let begun = client.stats_by_server().map_or(0, |all| all[0].tokens.get(&0).copied().unwrap_or(0));
            let victim = round % 2;
            servers[victim].kill();
            servers[victim] = start(victim);
            servers[victim].logged("run resumed from the log");
            wait_until("further steps", || {
                trains.is_finished()
                    || client.stats_by_server().is_ok_and(|all| {
                        all.iter().all(|stats| stats.tokens.get(&0).copied().unwrap_or(0) > begun + 3)
                    })
            });
        }
        trains.join().unwrap();
    });
    let (_, rows) = lookup(&client, token(0, 1), Mode::Eval, &[4], &ids).unwrap();
    assert!(rows[0].iter().all(|weight| *weight == -(steps as f32)), "{:?}", &rows[0][..8]);
    let stats = client.stats().unwrap();
    assert_eq!(stats.pushes.rows_applied, 300 * steps);
    // Without a directory there is no log.
    let (code, line) = setting.server(0, 1, &["--global-config", &config]).fails();
    assert!(code == 2 && line.contains("PERSIA_DATA_DIR"), "{code} {line}");
}

#[test]
fn a_full_disk_refuses_requests_until_there_is_room() {
    let setting = Setting::new();
    let (config, data) = (setting.path("global_config.yml"), setting.path("data"));
    fs::write(&config, "embedding_parameter_server_config: {durability: log}").unwrap();
    let listen = format!("unix:{}", setting.path("server"));
    let flags = ["--global-config", &config, "--data-dir", &data, "--listen", &listen];
    // Files end at 32 KiB, as on a full disk: writing behind that is an error.
    let limited = ["-c", "trap '' XFSZ; ulimit -S -f 64; exec \"$0\" \"$@\"", SERVER];
    let embedding = setting.path("embedding_config.yml");
    let usual = ["--embedding-config", &embedding, "--job", JOB, "--metrics-listen", "off"];
    let mut server = Process::start("sh", &[&limited, &usual[..], &flags].concat());
    let mut options = ClientOptions::new(Targets::Fixed(vec![server.endpoint()]));
    options.service = Service::Server;
    options.rpc_timeout = Duration::from_secs(10);
    let client = WireTables::connect(options).unwrap();
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&Run { fresh: true, ..run_of(&Plan { servers: 1, ..plan() }) }).unwrap();
    let ids = vec![(0..300).collect::<Vec<Id>>()];
    let train = |seq| {
        lookup(&client, token(0, seq), Mode::Train, &[4], &ids)?;
        push(&client, token(0, seq), &[4], &ids)
    };
    let (seq, error) = (1..).find_map(|seq| train(seq).err().map(|error| (seq, error))).unwrap();
    assert!(seq > 2 && error.to_string().contains("cannot write its log"), "{seq}: {error}");
    let rows = |client: &WireTables| lookup(client, token(0, 1), Mode::Eval, &[4], &ids).unwrap().1;
    let before = rows(&client);
    assert!(train(seq).is_err());
    assert_eq!(rows(&client), before);
    let pid = server.id().to_string();
    let room = Command::new("prlimit").args(["--pid", &pid, "--fsize=unlimited"]).status();
    assert!(room.unwrap().success());
    for seq in seq..seq + 3 {
        assert_eq!(train(seq).unwrap().rows_applied, 300);
    }
    let after = rows(&client);
    server.kill();
    let server = setting.server(0, 1, &flags);
    server.logged("run resumed from the log");
    assert_eq!(rows(&client), after);
}
