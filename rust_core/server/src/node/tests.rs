use std::path::PathBuf;

use persia_kernels::Gradients;
use persia_types::config::LogSync;
use persia_types::tables::{FileEntry, PushRequest, TableGradients};
use persia_types::{Initializer, Optimizer, ShardedIds, Table};

use super::request_log::Rows;
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
        request_threads: 1,
        snapshot_threads: 1,
        max_copy_bytes: u64::MAX,
        checkpoints: CheckpointRoot::new(checkpoints),
        turn_timeout: Duration::from_secs(1),
        address: "here".into(),
        log: None,
    };
    Node::new(options, GenerationFile::open(Some(data)).unwrap()).unwrap()
}

fn node_with_log(dir: &std::path::Path) -> Node {
    let node = node(&dir.join("data"));
    let options = NodeOptions {
        log: Some(LogOptions { dir: dir.join("log"), sync: LogSync::Always }),
        checkpoints: CheckpointRoot::new(Some(dir.to_owned())),
        ..node.options.clone()
    };
    drop(node);
    Node::new(options, GenerationFile::open(Some(&dir.join("data"))).unwrap()).unwrap()
}

/// A run that continues to train the rows of another run.
fn continuing(node: &Node, generation: u64, continues: u64) -> Run {
    Run { fresh: false, continues, ..run(node, generation) }
}

fn train(node: &Node, generation: u64, seq: u64) {
    let ids = ShardedIds::group(&[1, 2, 3]).unwrap();
    let token = Token { job: JobId::from_name("job"), generation, rank: 0, seq };
    let tables = [TableGradients { table: 0, ids: &ids, gradients: Gradients::Rows(&[1.0; 12]) }];
    node.push(None, &PushRequest { token, step: seq, lr_factor: 1.0, tables: &tables }).unwrap();
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
        continues: 0,
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
    train(&node, 1, 1);
    std::fs::remove_dir_all(&data).unwrap();
    let error = node.begin(1, &run(&node, 2), false).unwrap_err();
    assert!(matches!(error, TablesError::Io { .. }), "{error}");
    assert!(error.to_string().starts_with("server 0 of 1 (here): "), "{error}");
    let stats = node.stats().unwrap();
    assert_eq!((stats.rows, stats.generation), (vec![3], 1));
}

#[test]
fn a_directory_that_this_server_cannot_write_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    // Not even root can create files below `/proc`.
    let node = node_with(dir.path(), Some("/proc".into()));
    node.begin(1, &run(&node, 1), false).unwrap();
    let fence = Fence { job: JobId::from_name("job"), generation: 1 };
    let error = node.check_storage(fence, "sys").unwrap_err().to_string();
    assert!(error.contains("/proc/sys: server 0: user ") && error.contains("cannot write here"), "{error}");
}

#[test]
fn a_folder_that_this_server_cannot_use_is_named_with_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let node = node_with(dir.path(), Some(dir.path().to_owned()));
    node.begin(1, &run(&node, 1), false).unwrap();
    train(&node, 1, 1);
    let named = |path: &str| format!("server 0 of 1 (here): {}", dir.path().join(path).display());
    for error in [
        node.write_snapshot(fence(1), "absent", None).unwrap_err(),
        node.commit_snapshot(fence(1), 1, "absent", &[]).unwrap_err(),
        node.restore(fence(1), "absent", &[], true).unwrap_err(),
        node.restore(fence(1), "absent", &[], false).unwrap_err(),
    ] {
        assert!(matches!(error, TablesError::Io { .. }), "{error}");
        assert!(error.to_string().starts_with(&named("absent: this folder does not exist")), "{error}");
    }
    // A file of the snapshot exists already.
    saved(&node, 1, dir.path());
    let error = node.write_snapshot(fence(1), "save", None).unwrap_err();
    assert!(matches!(error, TablesError::Io { .. }), "{error}");
    assert!(error.to_string().starts_with(&named("save/shard-")), "{error}");
}

#[test]
fn a_snapshot_that_has_to_wait_says_for_what() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(dir.path());
    node.begin(1, &run(&node, 1), false).unwrap();
    let said = || {
        let error = node.prepare_snapshot(fence(1), 1).unwrap_err();
        let busy = |source: &io::Error| source.kind() == io::ErrorKind::ResourceBusy;
        assert!(matches!(&error, TablesError::Io { source, .. } if busy(source)), "{error}");
        error.to_string()
    };
    let writing = node.writing.lock();
    let text = said();
    assert!(
        text.contains("server 0 of 1 (here): cannot begin a snapshot: files of an earlier one"),
        "{text}"
    );
    drop(writing);
    let alone = node.admin.lock();
    let text = said();
    assert!(text.contains("another administrative request is in progress; save again later"), "{text}");
    drop(alone);
    node.prepare_snapshot(fence(1), 1).unwrap();
}

#[test]
fn a_log_of_another_job_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let first = node_with_log(dir.path());
    let mut begun = run(&first, 1);
    begun.job = "other".into();
    let position = first.position();
    first.log.as_ref().unwrap().restart(|| Ok((begun, None, position))).unwrap();
    let Err(Unresumed::Unusable(why)) = first.recover(&RecoveryProgress::default()) else {
        panic!("the log of another job was used")
    };
    assert_eq!(why, r#"the log belongs to job "other", but this server serves job "job""#);
}

#[test]
fn a_log_stays_while_the_rows_of_its_base_cannot_be_read_from_their_store() {
    let dir = tempfile::tempdir().unwrap();
    let node = node_with_log(dir.path());
    let begun = run(&node, 1);
    node.begin(1, &begun, false).unwrap();
    // Opening this URL fails before a request is sent.
    let entry = FileEntry { name: "shard-000.arrow".into(), bytes: 4, blake3: "0".repeat(64) };
    let rows = Rows { directory: "gs://bucket/run/step-1".into(), files: vec![entry] };
    let (options, position) = (node.options.clone(), node.position());
    node.log.as_ref().unwrap().restart(|| Ok((begun, Some(rows), position))).unwrap();
    drop(node);
    let data = dir.path().join("data");
    for _ in 0..2 {
        let started = Node::new(options.clone(), GenerationFile::open(Some(&data)).unwrap());
        let Err(Exit::Again(why)) = started else { panic!("the log was given up") };
        assert!(why.contains("gs:// is not supported; expected s3://BUCKET/PREFIX"), "{why}");
    }
}

#[test]
fn a_run_continues_only_with_the_rows_of_its_generation() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(dir.path());
    let refused = |generation, continues| {
        let error = node.begin(1, &continuing(&node, generation, continues), false).unwrap_err();
        assert!(matches!(&error, TablesError::Lost { peer, .. } if peer.starts_with("server 0")), "{error}");
        error.to_string()
    };
    assert!(refused(4, 3).contains("it was restarted and has lost the rows of generation 3"));
    node.begin(1, &run(&node, 4), false).unwrap();
    assert!(refused(5, 3).contains("its rows belong to generation 4, but the run continues generation 3"));
    train(&node, 4, 1);
    node.begin(1, &continuing(&node, 5, 4), false).unwrap();
    // The rows have not changed since generation 4: another server may not have begun generation 5.
    node.begin(1, &continuing(&node, 7, 4), false).unwrap();
    node.begin(1, &continuing(&node, 8, 5), false).unwrap();
    train(&node, 8, 1);
    for continues in [4, 5, 7] {
        refused(9, continues);
    }
    node.begin(1, &continuing(&node, 9, 8), false).unwrap();
    node.clear(Fence { job: JobId::from_name("job"), generation: 9 }).unwrap();
    refused(10, 8);
    node.begin(1, &continuing(&node, 10, 9), false).unwrap();
    assert_eq!(node.stats().unwrap().begun, 10);
}

#[test]
fn a_restarted_server_without_a_log_does_not_continue() {
    let dir = tempfile::tempdir().unwrap();
    let first = node(dir.path());
    first.begin(1, &run(&first, 1), false).unwrap();
    train(&first, 1, 1);
    drop(first);
    let second = node(dir.path());
    let error = second.begin(1, &continuing(&second, 2, 1), true).unwrap_err();
    assert!(matches!(error, TablesError::Lost { .. }), "{error}");
    let stats = second.stats().unwrap();
    assert_eq!((stats.generation, stats.begun), (1, 0));
    second.begin(1, &run(&second, 2), false).unwrap();
}

#[test]
fn a_restarted_server_with_a_log_continues() {
    let dir = tempfile::tempdir().unwrap();
    let first = node_with_log(dir.path());
    first.begin(1, &run(&first, 1), false).unwrap();
    train(&first, 1, 1);
    first.begin(1, &continuing(&first, 2, 1), false).unwrap();
    drop(first);
    let second = node_with_log(dir.path());
    assert_eq!(second.stats().unwrap().rows, [3]);
    second.begin(1, &continuing(&second, 3, 1), false).unwrap();
}

/// A process leaves this state if it is killed after it has logged a begin and before it has written the
/// generation's file.
#[test]
fn a_begin_that_is_only_in_the_log_has_begun() {
    let dir = tempfile::tempdir().unwrap();
    let first = node_with_log(dir.path());
    first.begin(1, &run(&first, 1), false).unwrap();
    train(&first, 1, 1);
    let file = dir.path().join("data/generation");
    let before = std::fs::read(&file).unwrap();
    first.begin(1, &continuing(&first, 2, 1), false).unwrap();
    drop(first);
    std::fs::write(&file, before).unwrap();
    let second = node_with_log(dir.path());
    let stats = second.stats().unwrap();
    assert_eq!((stats.rows, stats.generation, stats.begun), (vec![3], 2, 2));
    assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), "2");
}

#[test]
fn a_log_of_an_older_generation_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let first = node_with_log(dir.path());
    first.begin(1, &run(&first, 1), false).unwrap();
    train(&first, 1, 1);
    drop(first);
    std::fs::write(dir.path().join("data/generation"), "2\n").unwrap();
    let second = node_with_log(dir.path());
    assert!(!second.log.as_ref().unwrap().has_base(), "the log describes rows that are not there");
    assert_eq!(second.stats().unwrap().rows, [0]);
    assert!(matches!(second.begin(1, &continuing(&second, 3, 1), false), Err(TablesError::Lost { .. })));
    second.begin(1, &run(&second, 3), false).unwrap();
    train(&second, 3, 1);
    drop(second);
    assert_eq!(node_with_log(dir.path()).stats().unwrap().rows, [3]);
}

/// Write the current rows below the checkpoint root. Returns the files.
fn saved(node: &Node, generation: u64, dir: &std::path::Path) -> Vec<persia_types::tables::FileEntry> {
    std::fs::create_dir_all(dir.join("save")).unwrap();
    node.write_snapshot(fence(generation), "save", None).unwrap().files
}

fn fence(generation: u64) -> Fence {
    Fence { job: JobId::from_name("job"), generation }
}

#[test]
fn a_server_whose_log_cannot_be_used_does_not_continue() {
    for damaged in ["base", "1"] {
        let dir = tempfile::tempdir().unwrap();
        let first = node_with_log(dir.path());
        first.begin(1, &run(&first, 1), false).unwrap();
        train(&first, 1, 1);
        drop(first);
        let path = dir.path().join("log").join(damaged);
        let mut content = std::fs::read(&path).unwrap();
        content[20] ^= 1;
        std::fs::write(&path, content).unwrap();
        let second = node_with_log(dir.path());
        assert!(!second.log.as_ref().unwrap().has_base(), "{damaged}");
        let error = second.begin(1, &continuing(&second, 2, 1), false).unwrap_err();
        assert!(matches!(error, TablesError::Lost { .. }), "{damaged}: {error}");
        second.begin(1, &run(&second, 2), false).unwrap();
        train(&second, 2, 1);
        drop(second);
        assert_eq!(node_with_log(dir.path()).stats().unwrap().rows, [3], "{damaged}");
    }
}

/// The server is killed between a restore and the first training loop after it.
#[test]
fn restored_rows_are_continued_only_by_a_server_that_has_them() {
    for has_log in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let start = || match has_log {
            true => node_with_log(dir.path()),
            false => node_with(&dir.path().join("data"), Some(dir.path().to_owned())),
        };
        let first = start();
        first.begin(1, &run(&first, 1), false).unwrap();
        train(&first, 1, 1);
        let files = saved(&first, 1, dir.path());
        first.begin(1, &run(&first, 2), false).unwrap();
        first.restore(fence(2), "save", &files, false).unwrap();
        drop(first);
        let second = start();
        let begun = second.begin(1, &continuing(&second, 3, 2), false);
        if has_log {
            begun.unwrap();
            assert_eq!(second.stats().unwrap().rows, [3]);
        } else {
            assert!(matches!(begun, Err(TablesError::Lost { .. })), "{begun:?}");
        }
    }
}

/// The rows were restored, but no log could be started from them.
#[test]
fn rows_without_a_log_are_not_continued_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let first = node_with_log(dir.path());
    first.begin(1, &run(&first, 1), false).unwrap();
    train(&first, 1, 1);
    let files = saved(&first, 1, dir.path());
    first.begin(1, &run(&first, 2), false).unwrap();
    std::fs::remove_dir_all(dir.path().join("log")).unwrap();
    first.restore(fence(2), "save", &files, false).unwrap_err();
    first.begin(1, &continuing(&first, 3, 2), false).unwrap();
    drop(first);
    std::fs::create_dir_all(dir.path().join("log")).unwrap();
    let second = node_with_log(dir.path());
    assert_eq!(second.stats().unwrap().rows, [0]);
    let error = second.begin(1, &continuing(&second, 4, 3), false).unwrap_err();
    assert!(matches!(error, TablesError::Lost { .. }), "{error}");
}
