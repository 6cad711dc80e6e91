//! Tests of begin, statistics, snapshot, restore and clear.

use std::time::Duration;

use persia_types::schema::{Initializer, Schema};
use persia_types::tables::Run;
use persia_types::{Tables, TablesError};
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::{PROTOCOL, VERSION};

use crate::mock::{Fault, GENERATION, JOB, SERVERS, start};

fn run(generation: u64) -> Run {
    Run {
        job: JOB.into(),
        generation,
        schema: Schema::default(),
        seed: 7,
        optimizer: None,
        initializer: Initializer::Zero,
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.1,
        fresh: true,
        continues: 0,
        world_size: 2,
        reproducible: true,
    }
}

#[test]
fn statistics_of_all_servers_are_summed() {
    let running = start(&[]);
    let client = running.client();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    assert_eq!(client.servers().unwrap(), SERVERS as usize);
    let stats = client.stats().unwrap();
    assert_eq!((stats.rows, stats.payload_bytes), (vec![12, 4], 200));
    assert_eq!(stats.tokens, [(0, 9), (1, 9)].into());
    let rows: Vec<_> = client.stats_by_server().unwrap().into_iter().map(|stats| stats.rows).collect();
    assert_eq!(rows, [[1, 2], [11, 2]]);
}

#[test]
fn what_is_missing_at_the_start_is_named() {
    let running = start(&[]);
    running.mock.seen.lock().silent = vec![1];
    let error = running.client().wait_ready(Duration::from_secs(1)).unwrap_err();
    assert!(matches!(&error, TablesError::Unreachable { peer, .. } if peer == "server 1 of 2"), "{error}");

    let unused = Targets::Fixed(vec!["127.0.0.1:1".parse().unwrap()]);
    let client = WireTables::connect(ClientOptions::new(unused)).unwrap();
    let error = client.wait_ready(Duration::from_secs(1)).unwrap_err().to_string();
    assert!(error.contains("middleware at 127.0.0.1:1") && error.contains("refused"), "{error}");
}

#[test]
fn a_run_begins_with_everything_it_is() {
    let running = start(&[]);
    let client = running.client();
    assert_eq!(client.highest_generation().unwrap(), 0);
    client.begin(&run(GENERATION)).unwrap();
    let begun = running.mock.seen.lock().begun.pop().unwrap();
    assert_eq!((begun.protocol, begun.version.as_str(), begun.servers), (PROTOCOL, VERSION, SERVERS));
    assert_eq!(serde_json::from_str::<Run>(&begun.run).unwrap(), run(GENERATION));
    assert_eq!(client.highest_generation().unwrap(), GENERATION);
    let error = client.begin(&run(GENERATION)).unwrap_err();
    assert!(matches!(error, TablesError::BadRun { .. }), "{error}");
    client.clear().unwrap();
}

#[test]
fn a_begin_whose_reply_was_lost_has_begun() {
    let running = start(&[Fault::LoseReply]);
    running.client().begin(&run(GENERATION)).unwrap();
    assert_eq!(running.mock.seen.lock().begun.len(), 1);
}

/// A repeated request could arrive after later pushes and drop their rows.
#[test]
fn a_clear_or_a_restore_whose_reply_was_lost_is_not_repeated() {
    let lost = || TablesError::Unreachable { peer: "server 0".into(), what: "reset".into() };
    let running = start(&[Fault::Nothing, Fault::Fail(lost), Fault::Fail(lost)]);
    let root = tempfile::tempdir().unwrap();
    let options = ClientOptions { checkpoint_root: Some(root.path().to_owned()), ..running.options() };
    let client = WireTables::connect(options).unwrap();
    client.begin(&run(GENERATION)).unwrap();
    for error in [client.clear().unwrap_err(), client.restore(root.path(), &[]).unwrap_err()] {
        assert!(matches!(error, TablesError::Lost { .. }), "{error}");
    }
    assert_eq!(running.calls(), ["begin", "clear", "restore"]);
}

/// The server may have restarted just before the only attempt, and may make progress.
#[test]
fn one_attempt_does_not_show_that_a_server_makes_no_progress() {
    let reads = || TablesError::Recovering { peer: "server 0 of 2".into(), done: 43, total: 100 };
    let running = start(&[Fault::Nothing, Fault::Fail(reads)]);
    let client = running.client();
    client.begin(&run(GENERATION)).unwrap();
    let error = client.clear().unwrap_err();
    assert!(matches!(error, TablesError::Lost { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("it is still reading its rows (43 of 100 bytes)"), "{text}");
}

#[test]
fn a_begin_that_reached_some_servers_only_is_lost() {
    let running = start(&[Fault::BeginOnly(0)]);
    let error = running.client().begin(&run(GENERATION)).unwrap_err();
    assert!(matches!(&error, TablesError::Lost { peer, .. } if peer == "server 1 of 2"), "{error}");
}

#[test]
fn checkpoints_lie_below_the_shared_root() {
    let running = start(&[]);
    let root = tempfile::tempdir().unwrap();
    let options = ClientOptions { checkpoint_root: Some(root.path().to_owned()), ..running.options() };
    let client = WireTables::connect(options).unwrap();
    let dir = root.path().join("run/.saving-1");
    std::fs::create_dir_all(&dir).unwrap();
    let snapshot = client.write_snapshot(&dir, None).unwrap();
    assert_eq!((snapshot.rows, snapshot.files.len()), (vec![1, 2], 1));
    client.restore(&root.path().join("run/not-there-yet"), &snapshot.files).unwrap();
    client.write_snapshot(root.path(), None).unwrap();
    client.check_storage(&dir).unwrap();
    let seen = ["run/.saving-1", "run/not-there-yet", "", "run/.saving-1"];
    assert_eq!(running.mock.seen.lock().directories, seen);

    let outside = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(outside.path(), root.path().join("link")).unwrap();
    let bad = [outside.path().to_owned(), root.path().join("link"), root.path().join("../x")];
    for dir in bad {
        let error = client.write_snapshot(&dir, None).unwrap_err();
        assert!(matches!(error, TablesError::Io { .. }), "{error}");
        assert!(error.to_string().contains("PERSIA_CKPT_DIR"), "{error}");
    }
    let error = running.client().write_snapshot(root.path(), None).unwrap_err().to_string();
    assert!(error.contains("PERSIA_CKPT_DIR"), "{error}");
}

#[test]
fn a_snapshot_is_not_made_twice_at_the_same_time() {
    let running =
        start(&[Fault::Fail(|| TablesError::Unreachable { peer: "server 0".into(), what: "x".into() })]);
    let root = tempfile::tempdir().unwrap();
    let options = ClientOptions { checkpoint_root: Some(root.path().to_owned()), ..running.options() };
    let error = WireTables::connect(options).unwrap().write_snapshot(root.path(), None).unwrap_err();
    assert!(matches!(error, TablesError::Unreachable { .. }), "{error}");
    assert_eq!(running.calls(), ["write_snapshot"]);
}
