//! The log from which a server recovers: its base, and segments of records.
//!
//! An input is the JSON of the base, followed by the payloads of records, each preceded by its length in 16 bits. A
//! length of 65535 begins another segment. Trailing bytes that are not a record are the torn end of the last segment.

use std::fs;
use std::path::Path;
use std::time::Duration;

use persia_kernels::Gradients;
use persia_server::node::{CheckpointRoot, Fence, GenerationFile, LogOptions, Node, NodeOptions};
use persia_types::config::LogSync;
use persia_types::tables::{FileEntry, LookupRequest, PushRequest, Run, Stats, TableGradients, TableIds};
use persia_types::{
    Dtype, Id, Initializer, JobId, Mode, Optimizer, Rounding, Schema, ShardedIds, Table, Token,
};

use super::scratch;

const JOB: &str = "fuzz";
const GENERATION: u64 = 3;
/// The kind of the record that states the length of the previous segment.
const FOLLOWS: u8 = 6;
const MAGIC: &[u8] = b"persia journal 3";
const FRAME_BYTES: usize = 12;
/// The last byte of a record, which inputs omit.
const END: u8 = 0xE5;
const NEXT_SEGMENT: usize = u16::MAX as usize;

/// Check that a server starts with any log. If it recovers from the log, it must recover to the same state after a
/// restart. Otherwise it must have no rows.
pub fn check(data: &[u8]) -> bool {
    let dir = scratch();
    lay(data, dir.path());
    let first = state(dir.path());
    assert_eq!(state(dir.path()), first, "restarted");
    let (stats, files) = first;
    assert!(files.is_some() || stats.rows.iter().all(|rows| *rows == 0));
    files.is_some()
}

/// The counters and, if a run is in progress, the files of all rows.
fn state(dir: &Path) -> (Stats, Option<Vec<FileEntry>>) {
    let node = node(dir);
    let stats = Stats { memory_bytes: 0, tables: vec![], ..node.stats().expect("a server has counters") };
    let saved = dir.join("checkpoints/save");
    fs::create_dir_all(&saved).expect("a directory");
    let files = node.write_snapshot(fence(), "save", None).ok().map(|snapshot| snapshot.files);
    fs::remove_dir_all(&saved).expect("it was there");
    (stats, files)
}

fn fence() -> Fence {
    Fence { job: JobId::from_name(JOB), generation: GENERATION }
}

fn node(dir: &Path) -> Node {
    let generation = GenerationFile::open(None).expect("in memory");
    generation.set(GENERATION).expect("in memory");
    started(dir, generation)
}

fn started(dir: &Path, generation: GenerationFile) -> Node {
    let options = NodeOptions {
        job: JOB.into(),
        index: 0,
        servers: 1,
        schema: run().schema,
        capacity: 512,
        request_threads: 1,
        snapshot_threads: 1,
        max_copy_bytes: u64::MAX,
        checkpoints: CheckpointRoot::new(Some(dir.join("checkpoints"))),
        turn_timeout: Duration::from_millis(50),
        address: "here".into(),
        log: Some(LogOptions { dir: dir.join("journal"), sync: LogSync::EverySecond }),
    };
    Node::new(options, generation).expect("a server starts with any log")
}

fn run() -> Run {
    let mut half = Table::new("half", 4);
    half.settings.dtype = Dtype::F16;
    half.settings.rounding = Rounding::Stochastic;
    half.settings.ttl = Some(2);
    Run {
        job: JOB.into(),
        generation: GENERATION,
        schema: Schema { slots: vec![], tables: vec![Table::new("user", 2), half] },
        seed: 7,
        optimizer: Some(Optimizer::Sgd { lr: 0.5, momentum: 0.9, weight_decay: 0.0 }),
        initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: true,
        continues: 0,
        world_size: 1,
        reproducible: false,
    }
}

/// Write the files that an input describes.
fn lay(data: &[u8], dir: &Path) {
    let log = dir.join("journal");
    fs::create_dir_all(&log).expect("a directory");
    let Some((base, mut rest)) = prefixed(data) else { return };
    fs::write(log.join("base"), [&crc32c::crc32c(base).to_le_bytes(), base].concat()).expect("written");
    let described: serde_json::Value = serde_json::from_slice(base).unwrap_or_default();
    let mut number = described["segment"].as_u64().unwrap_or(1);
    let mut segment = MAGIC.to_vec();
    let mut before = 0;
    loop {
        let new_segment = rest.starts_with(&(NEXT_SEGMENT as u16).to_le_bytes());
        match prefixed(rest) {
            _ if new_segment => {
                fs::write(log.join(number.to_string()), &segment).expect("written");
                before = segment.len() as u64;
                segment.truncate(MAGIC.len());
                number = number.saturating_add(1);
                rest = &rest[2..];
            }
            Some((payload, next)) => {
                let mut payload = [payload, &[END]].concat();
                // Correct the stated length of the previous segment, because mutations would not find the
                // correct length.
                if segment.len() == MAGIC.len()
                    && payload[0] == FOLLOWS
                    && payload.len() == 10
                    && payload[8] == 0
                {
                    payload[1..9].copy_from_slice(&before.to_le_bytes());
                }
                segment.extend(frame(&payload));
                segment.extend(payload);
                rest = next;
            }
            None => break,
        }
    }
    fs::write(log.join(number.to_string()), [&segment, rest].concat()).expect("written");
}

/// Read a length of 16 bits. Returns that many bytes, and the remaining input.
fn prefixed(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_first_chunk()?;
    rest.split_at_checked(u16::from_le_bytes(*length).into())
}

/// The frame of a payload: its length, the checksum of the length, and the checksum of the payload.
fn frame(payload: &[u8]) -> [u8; FRAME_BYTES] {
    let length = (payload.len() as u32).to_le_bytes();
    let words = [length, crc32c::crc32c(&length).to_le_bytes(), crc32c::crc32c(payload).to_le_bytes()];
    words.as_flattened().try_into().expect("three words")
}

/// The input that describes the files of a log.
fn input_of(dir: &Path) -> Vec<u8> {
    let file = |name: &str| fs::read(dir.join("journal").join(name)).ok();
    let sized = |bytes: &[u8]| [&(bytes.len() as u16).to_le_bytes(), bytes].concat();
    let mut input = sized(&file("base").expect("a base")[4..]);
    for number in 1.. {
        let Some(segment) = file(&number.to_string()) else { break };
        if number > 1 {
            input.extend((NEXT_SEGMENT as u16).to_le_bytes());
        }
        let mut rest = &segment[MAGIC.len()..];
        while let Some((frame, next)) = rest.split_first_chunk::<FRAME_BYTES>() {
            let length = u32::from_le_bytes(*frame.first_chunk().expect("a word")) as usize;
            input.extend(sized(&next[..length - 1]));
            rest = &next[length..];
        }
    }
    input
}

/// Logs that a server wrote.
pub fn seeds() -> Vec<Vec<u8>> {
    let grouped = |ids: &[Id]| ShardedIds::group(ids).expect("some ids");
    let train = |node: &Node, seq: u64, table: usize, ids: &[Id]| {
        let (token, ids) =
            (Token { job: JobId::from_name(JOB), generation: GENERATION, rank: 0, seq }, grouped(ids));
        let mut rows = vec![0.0; ids.len() * run().schema.tables[table].dim];
        let tables = [TableIds { table, ids: &ids, per_sample: None }];
        let request = LookupRequest { token, step: seq, mode: Mode::Train, tables: &tables };
        node.lookup(None, &request, &mut [&mut rows]).expect("looked up");
        let tables = [TableGradients { table, ids: &ids, gradients: Gradients::Rows(&rows) }];
        node.push(None, &PushRequest { token, step: seq, lr_factor: 0.5, tables: &tables }).expect("pushed");
    };
    let left_by = |work: &dyn Fn(&Node)| {
        let dir = scratch();
        let node = started(dir.path(), GenerationFile::open(None).expect("in memory"));
        node.begin(1, &run(), false).expect("a run");
        work(&node);
        drop(node);
        input_of(dir.path())
    };
    vec![
        left_by(&|_| ()),
        left_by(&|node| train(node, 1, 0, &[5, 900, 6])),
        left_by(&|node| {
            train(node, 1, 1, &[1, 2]);
            node.prepare_snapshot(fence(), 1).expect("a cut");
            train(node, 2, 0, &[2, u64::MAX]);
            train(node, 3, 1, &[3]);
        }),
    ]
}
