//! Tests with a disk on which nothing becomes durable for a while, or which refuses to truncate a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use libc::{c_int, off64_t};
use persia_server::node::Node;
use persia_types::config::LogSync;
use persia_types::{ShardedIds, TablesError, Token};

use super::{counters, fence, left_behind, look_up, push_to, run, server, state, synced_server};
use crate::running::wait_until;
use crate::stack::token;

/// A time limit longer than a call without disk access takes on a busy machine.
const PROMPT: Duration = Duration::from_secs(20);

/// The directories whose syncs are stalled, and the number of calls that wait.
static STALLED: Mutex<Vec<(PathBuf, usize)>> = Mutex::new(Vec::new());
static RESUMED: Condvar = Condvar::new();
/// The directories whose files cannot be truncated.
static UNSHORTENED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Wait while the disk of `path` is stalled.
pub(super) fn pass(path: &Path) {
    let mut stalled = STALLED.lock().unwrap();
    while let Some(at) = stalled.iter().position(|(dir, _)| path.starts_with(dir)) {
        stalled[at].1 += 1;
        stalled = RESUMED.wait(stalled).unwrap();
    }
}

/// Stalls every sync below a directory until it is dropped.
struct Stall(PathBuf);

impl Stall {
    fn of(dir: PathBuf) -> Self {
        STALLED.lock().unwrap().push((dir.clone(), 0));
        Self(dir)
    }

    /// Whether a sync waits.
    fn is_met(&self) -> bool {
        STALLED.lock().unwrap().iter().any(|(dir, waiting)| *dir == self.0 && *waiting > 0)
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        STALLED.lock().unwrap().retain(|(dir, _)| *dir != self.0);
        RESUMED.notify_all();
    }
}

#[unsafe(no_mangle)]
#[allow(unsafe_code)]
extern "C" fn ftruncate64(file: c_int, length: off64_t) -> c_int {
    let path = fs::read_link(format!("/proc/self/fd/{file}")).unwrap_or_default();
    if UNSHORTENED.lock().unwrap().iter().any(|dir| path.starts_with(dir)) {
        // SAFETY: the pointer is to a variable of this thread.
        unsafe { *libc::__errno_location() = libc::EIO };
        return -1;
    }
    // SAFETY: this is the system call of that name, with its arguments.
    unsafe { libc::syscall(libc::SYS_ftruncate, file, length) as c_int }
}

fn train(node: &Node, generation: u64, seq: u64) -> Result<(), TablesError> {
    let token = Token { generation, ..token(0, seq) };
    let parts = vec![(0, ShardedIds::group(&[seq, seq + 1000, 7]).unwrap())];
    look_up(node, token, seq, &parts)?;
    push_to(node, token, seq, &parts, 1.0).map(drop)
}

/// Run `call` on another thread and return its result. If there is no result soon, let the disk continue, and
/// fail the test.
fn promptly<T: Send>(what: &str, stall: Stall, call: impl FnOnce() -> T + Send) -> (T, Stall) {
    let (done, answered) = channel();
    thread::scope(|threads| {
        threads.spawn(|| done.send(call()).unwrap());
        let answer = answered.recv_timeout(PROMPT);
        let stall = if answer.is_err() {
            drop(stall);
            None
        } else {
            Some(stall)
        };
        (answer.unwrap_or_else(|_| panic!("{what} waits for the disk")), stall.unwrap())
    })
}

/// A rank died while its snapshot was written.
#[test]
fn a_new_run_cancels_the_snapshot_of_the_one_before() {
    for fresh in [false, true] {
        let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let node = server(data.path(), checkpoints.path());
        node.begin(1, &run(1, true), false).unwrap();
        (1..=4).for_each(|seq| train(&node, 1, seq).unwrap());
        node.prepare_snapshot(fence(1), 1).unwrap();
        (5..=8).for_each(|seq| train(&node, 1, seq).unwrap());
        let orphan = checkpoints.path().join("orphan");
        fs::create_dir(&orphan).unwrap();
        let stall = Stall::of(orphan.clone());
        thread::scope(|threads| {
            let writes = threads.spawn(|| node.write_snapshot(fence(1), "orphan", Some(1)));
            wait_until("a file to be synced", || stall.is_met());
            let (begun, stall) = promptly("begin", stall, || {
                node.begin(1, &run(2, fresh), true)?;
                node.begin(1, &run(2, fresh), false)
            });
            begun.unwrap();
            train(&node, 2, 9).unwrap();
            // The files of the first snapshot could mix with those of the next one.
            let early = node.prepare_snapshot(fence(2), 1).unwrap_err();
            assert!(early.to_string().contains("still being written"), "{early}");
            drop(stall);
            let error = writes.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("cancelled"), "{error}");
        });
        assert_eq!(fs::read_dir(&orphan).unwrap().count(), 0, "files that no checkpoint names");
        let copy = left_behind(data.path());
        let expected = state(&node, 2, checkpoints.path());
        node.prepare_snapshot(fence(2), 1).unwrap();
        train(&node, 2, 10).unwrap();
        fs::create_dir(checkpoints.path().join("next")).unwrap();
        let files = node.write_snapshot(fence(2), "next", Some(1)).unwrap().files;
        let files: std::collections::BTreeMap<_, _> =
            files.into_iter().map(|file| (file.name, file.blake3)).collect();
        assert_eq!(files, expected.0);
        assert_eq!(state(&server(copy.path(), checkpoints.path()), 2, checkpoints.path()), expected);
    }
}

#[test]
fn an_aborted_snapshot_is_not_written_to_its_end() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = server(data.path(), checkpoints.path());
    node.begin(1, &run(1, true), false).unwrap();
    (1..=8).for_each(|seq| train(&node, 1, seq).unwrap());
    node.prepare_snapshot(fence(1), 1).unwrap();
    let dir = checkpoints.path().join("aborted");
    fs::create_dir(&dir).unwrap();
    let stall = Stall::of(dir.clone());
    thread::scope(|threads| {
        let writes = threads.spawn(|| node.write_snapshot(fence(1), "aborted", Some(1)));
        wait_until("a file to be synced", || stall.is_met());
        let (aborted, stall) = promptly("abort", stall, || node.abort_snapshot(fence(1), 1));
        aborted.unwrap();
        drop(stall);
        let error = writes.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("cancelled"), "{error}");
    });
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    node.prepare_snapshot(fence(1), 2).unwrap();
}

/// A power cut loses the acknowledged requests of at most 2 s, however slow the disk is.
#[test]
fn requests_wait_while_the_log_is_not_durable() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = synced_server(data.path(), checkpoints.path(), LogSync::EverySecond);
    node.begin(1, &run(1, true), false).unwrap();
    train(&node, 1, 1).unwrap();
    let stall = Stall::of(data.path().join("journal"));
    let start = Instant::now();
    let (ended, acknowledged) = (AtomicBool::new(false), AtomicU64::new(0));
    let refused = Mutex::new(None);
    thread::scope(|threads| {
        threads.spawn(|| {
            let mut seq = 2;
            while !ended.load(Ordering::Relaxed) {
                match train(&node, 1, seq) {
                    Ok(()) => {
                        acknowledged.store(start.elapsed().as_millis() as u64, Ordering::Relaxed);
                        seq += 1;
                    }
                    // The caller retries.
                    Err(error @ TablesError::Unable { .. }) => *refused.lock().unwrap() = Some(error),
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let last = || Duration::from_millis(acknowledged.load(Ordering::Relaxed));
        let (bound, enough) = (Duration::from_secs(4), Duration::from_secs(6));
        wait_until("acknowledgments to end", || start.elapsed() > enough);
        let (last_while_stalled, why) = (last(), refused.lock().unwrap().take());
        drop(stall);
        let resumed = start.elapsed();
        wait_until("acknowledgments again", || last() > resumed);
        ended.store(true, Ordering::Relaxed);
        assert!(last_while_stalled < bound, "acknowledged {last_while_stalled:?} after the disk stalled");
        let why = why.unwrap().to_string();
        assert!(why.contains("journal") && why.contains("not durable"), "{why}");
    });
}

#[test]
fn a_cut_does_not_wait_for_the_disk_of_the_log() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = synced_server(data.path(), checkpoints.path(), LogSync::EverySecond);
    node.begin(1, &run(1, true), false).unwrap();
    train(&node, 1, 1).unwrap();
    let stall = Stall::of(data.path().join("journal"));
    let (cut, stall) = promptly("a cut", stall, || node.prepare_snapshot(fence(1), 1));
    cut.unwrap();
    // The request may succeed or fail, but it must not wait longer than the time limit for a turn.
    let (_, stall) = promptly("a request after it", stall, || train(&node, 1, 2));
    drop(stall);
    wait_until("the next request", || train(&node, 1, 3).is_ok());
    let expected = counters(&node);
    drop(node);
    assert_eq!(counters(&server(data.path(), checkpoints.path())), expected);
}

/// The power failed before the end of a segment was durable. The records of the next segment therefore cannot be
/// applied.
#[test]
fn records_behind_a_lost_end_are_dropped() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = server(data.path(), checkpoints.path());
    node.begin(1, &run(1, true), false).unwrap();
    let journal = data.path().join("journal");
    let bytes = || fs::metadata(journal.join("1")).unwrap().len() as usize;
    let stall = Stall::of(journal.clone());
    let mut states = vec![(bytes(), counters(&node))];
    for seq in 1..=3 {
        train(&node, 1, seq).unwrap();
        states.push((bytes(), counters(&node)));
    }
    node.prepare_snapshot(fence(1), 1).unwrap();
    train(&node, 1, 4).unwrap();
    let (whole, complete) = (bytes(), counters(&node));
    let [first, second] = ["1", "2"].map(|name| fs::read(journal.join(name)).unwrap());
    drop(stall);
    drop(node);
    let cut_at = |bytes: usize| {
        fs::write(journal.join("1"), &first[..bytes]).unwrap();
        fs::write(journal.join("2"), &second).unwrap();
        let node = server(data.path(), checkpoints.path());
        let found = counters(&node);
        train(&node, 1, 9).unwrap();
        let then = counters(&node);
        drop(node);
        assert_eq!(counters(&server(data.path(), checkpoints.path())), then, "{bytes} bytes");
        found
    };
    assert_eq!(cut_at(whole), complete);
    // Cut at the boundaries of records and within records.
    let cuts = states.iter().flat_map(|(bytes, _)| [*bytes, bytes + 1, bytes + 20]);
    for bytes in cuts.filter(|bytes| *bytes < whole) {
        let (_, expected) = states.iter().rev().find(|(whole, _)| *whole <= bytes).unwrap();
        assert_eq!(cut_at(bytes), *expected, "{bytes} bytes");
    }
}

#[test]
fn a_refused_record_that_cannot_be_removed_is_dropped_later() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let node = server(data.path(), checkpoints.path());
    node.begin(1, &run(1, true), false).unwrap();
    (1..=3).for_each(|seq| train(&node, 1, seq).unwrap());
    let expected = counters(&node);
    let journal = data.path().join("journal");
    let bytes = || fs::metadata(journal.join("1")).unwrap().len();
    let before = bytes();
    UNSHORTENED.lock().unwrap().push(journal.clone());
    let parts = vec![(0, ShardedIds::group(&[1, 2]).unwrap())];
    push_to(&node, token(0, 4), 0, &parts, 1.0).unwrap_err(); // steps begin at 1
    assert!(bytes() > before, "the record is still there");
    // A process that is killed now recovers without the refused record.
    let left = left_behind(data.path());
    let resumed = server(left.path(), checkpoints.path());
    assert_eq!(counters(&resumed), expected);
    train(&resumed, 1, 4).unwrap();
    drop(resumed);
    // While the record is in the file, nothing is appended after it.
    train(&node, 1, 4).unwrap_err();
    UNSHORTENED.lock().unwrap().retain(|dir| *dir != journal);
    train(&node, 1, 4).unwrap();
    let expected = counters(&node);
    drop(node);
    assert_eq!(counters(&server(data.path(), checkpoints.path())), expected);
}
