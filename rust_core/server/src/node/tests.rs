use std::path::PathBuf;

use persia_types::tables::{LookupRequest, TableIds};
use persia_types::{Initializer, Mode, Optimizer, ShardedIds, Table};

use super::*;

fn node(data: &std::path::Path) -> Node {
    node_with(data, None)
}

fn node_with(data: &std::path::Path, checkpoints: Option<PathBuf>) -> Node {
    let schema = Schema { slots: vec![], tables: vec![Table::new("a", 4)] };
    let options = NodeOptions {
        job: "job".into(),
        index: 0,
        servers: 1,
        schema,
        capacity: 1000,
        snapshot_threads: 1,
        max_copy_bytes: u64::MAX,
        checkpoints: CheckpointRoot::new(checkpoints),
        turn_timeout: Duration::from_secs(1),
        address: "here".into(),
        log: None,
    };
    Node::new(options, GenerationFile::open(Some(data)).unwrap()).unwrap()
}

fn run(node: &Node, generation: u64) -> Run {
    Run {
        job: "job".into(),
        generation,
        schema: node.options.schema.clone(),
        seed: 7,
        optimizer: Some(Optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0 }),
        initializer: Initializer::Zero,
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: true,
        world_size: 1,
        reproducible: false,
    }
}

#[test]
fn a_begin_whose_generation_cannot_be_written_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let node = node(&data);
    node.begin(1, &run(&node, 1), false).unwrap();
    let ids = ShardedIds::group(&[1, 2, 3]).unwrap();
    let token = Token { job: JobId::from_name("job"), generation: 1, rank: 0, seq: 1 };
    let tables = [TableIds { table: 0, ids: &ids, per_sample: None }];
    let request = LookupRequest { token, step: 1, mode: Mode::Train, tables: &tables };
    node.lookup(None, &request, &mut [&mut [0.0; 12]]).unwrap();
    std::fs::remove_dir_all(&data).unwrap();
    let error = node.begin(1, &run(&node, 2), false).unwrap_err();
    assert!(matches!(error, TablesError::Io { .. }), "{error}");
    let stats = node.stats().unwrap();
    assert_eq!((stats.rows, stats.generation), (vec![3], 1));
}

#[test]
fn a_directory_that_this_server_cannot_write_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    // Even root cannot create files below it.
    let node = node_with(dir.path(), Some("/proc".into()));
    node.begin(1, &run(&node, 1), false).unwrap();
    let fence = Fence { job: JobId::from_name("job"), generation: 1 };
    let error = node.check_storage(fence, "sys").unwrap_err().to_string();
    assert!(error.contains("/proc/sys: server 0: user ") && error.contains("cannot write here"), "{error}");
}
