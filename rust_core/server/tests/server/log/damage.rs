//! Tests of a log whose end was not written, and of a damaged log.

use std::fs;

use persia_server::node::{Node, NodeOptions};
use persia_types::config::LogSync;
use persia_types::tables::Stats;
use persia_types::{ShardedIds, TablesError};

use super::{counters, fence, log_options, look_up, options, owned, push_to, run, server};
use crate::running::wait_until;
use crate::stack::token;

/// Write the log of a short run. Returns the length of its only segment and the state after each record.
fn short() -> (tempfile::TempDir, tempfile::TempDir, Vec<(u64, Stats)>) {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = server(data.path(), checkpoints.path());
    node.begin(1, &run(1, true), false).unwrap();
    let segment = || fs::metadata(data.path().join("journal/1")).unwrap().len();
    let now = || (segment(), counters(&node));
    let mut states = vec![now()];
    for seq in 1..=3 {
        let parts = vec![(0, ShardedIds::group(&[seq, 7]).unwrap())];
        look_up(&node, token(0, seq), seq, &parts).unwrap();
        assert_eq!(now(), states[states.len() - 1], "a look-up leaves no trace");
        push_to(&node, token(0, seq), seq, &parts, 1.0).unwrap();
        states.push(now());
    }
    drop(node);
    (data, checkpoints, states)
}

#[test]
fn a_torn_record_is_dropped() {
    let (data, checkpoints, states) = short();
    let segment = fs::read(data.path().join("journal/1")).unwrap();
    let first = states[0].0 as usize;
    for length in 0..segment.len() {
        fs::write(data.path().join("journal/1"), &segment[..length]).unwrap();
        let node = server(data.path(), checkpoints.path());
        let found = counters(&node);
        if length < first {
            // Without the record of the run, only the generation is known.
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
fn zeros_that_were_never_written_are_dropped() {
    let (data, checkpoints, states) = short();
    let path = data.path().join("journal/1");
    let segment = fs::read(&path).unwrap();
    for (bytes, expected) in &states {
        for zeros in [1, 12, 700, 100_000] {
            let mut content = segment[..*bytes as usize].to_vec();
            content.resize(content.len() + zeros, 0);
            fs::write(&path, &content).unwrap();
            assert_eq!(
                counters(&server(data.path(), checkpoints.path())),
                *expected,
                "{zeros} zeros after {bytes}"
            );
            assert_eq!(fs::metadata(&path).unwrap().len(), *bytes, "{zeros} zeros");
        }
    }
    // The end of a long record is zeros.
    let node = server(data.path(), checkpoints.path());
    let before = counters(&node);
    let ids: Vec<u64> = (1 << 40..(1 << 40) + 300).collect();
    push_to(&node, token(0, 9), 9, &vec![(0, ShardedIds::group(&ids).unwrap())], 1.0).unwrap();
    let after = counters(&node);
    assert_ne!(before, after);
    drop(node);
    let whole = fs::read(&path).unwrap();
    let begin = states.last().unwrap().0 as usize;
    for from in (begin.next_multiple_of(512)..whole.len()).step_by(512) {
        let mut content = whole.clone();
        content[from..].fill(0);
        fs::write(&path, &content).unwrap();
        assert_eq!(counters(&server(data.path(), checkpoints.path())), before, "zeros from {from}");
        // A hole in the middle does not count as a torn end.
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
    assert_eq!(counters(&server(data.path(), checkpoints.path())), after);
}

#[test]
fn zeros_that_were_written_do_not_hide_damage() {
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
fn a_segment_without_a_beginning_is_dropped() {
    let (data, checkpoints, states) = short();
    let node = server(data.path(), checkpoints.path());
    node.prepare_snapshot(fence(1), 1).unwrap();
    drop(node);
    let [first, second] = ["journal/1", "journal/2"].map(|name| fs::read(data.path().join(name)).unwrap());
    let expected = &states.last().unwrap().1;
    let mut seq = 100;
    // The name of the second segment may become durable before the end of the first segment, and before the
    // beginning of the second.
    for (lost, left) in [(0, 0), (0, 3), (1, second.len()), (12, second.len()), (20, 0), (0, second.len())] {
        fs::write(data.path().join("journal/1"), &first[..first.len() - lost]).unwrap();
        fs::write(data.path().join("journal/2"), &second[..left]).unwrap();
        let node = server(data.path(), checkpoints.path());
        assert_eq!(counters(&node), *expected, "{lost} bytes of the first lost, {left} of the second there");
        seq += 1;
        push_to(&node, token(0, seq), seq, &vec![(0, ShardedIds::group(&[seq]).unwrap())], 1.0).unwrap();
        let then = counters(&node);
        drop(node);
        assert_eq!(counters(&server(data.path(), checkpoints.path())), then, "{lost}, {left}");
    }
    // Once the log says that the first segment is durable, its missing end is damage.
    let bytes = || fs::metadata(data.path().join("journal/2")).unwrap().len();
    let before = bytes();
    let node = server(data.path(), checkpoints.path());
    wait_until("a record of that", || bytes() > before);
    drop(node);
    fs::write(data.path().join("journal/1"), &first[..first.len() - 1]).unwrap();
    assert!(fs::metadata(data.path().join("journal/2")).unwrap().len() > second.len() as u64);
    let node = server(data.path(), checkpoints.path());
    assert!(matches!(node.prepare_snapshot(fence(1), 1), Err(TablesError::NotBegun)));
}

#[test]
fn a_damaged_log_is_never_used() {
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
    assert_eq!(counters(&node), *last);
    drop(node);
    // A log of another server or job, or of an earlier generation, is not used either.
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
    // The next run starts a new log.
    late.begin(1, &run(3, true), false).unwrap();
    drop(late);
    server(data.path(), checkpoints.path()).prepare_snapshot(fence(3), 1).unwrap();
}
