use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::*;

const BASE: &[u8] = b"the base";

fn open(dir: &Path) -> Wal {
    Wal::open(dir.to_owned(), LogSync::Always, Duration::from_secs(20)).unwrap()
}

fn started(dir: &Path) -> Wal {
    let wal = open(dir);
    wal.reset(|_| Ok(BASE.to_vec())).unwrap();
    wal
}

/// A new log that is never synced.
fn without_syncs(dir: &Path) -> Wal {
    let shared = Shared {
        files: Files::open(dir.to_owned()).unwrap(),
        sync: LogSync::EverySecond,
        timeout: Duration::from_secs(20),
        writer: Mutex::default(),
        synced: SyncState::default(),
    };
    let wal = Wal { shared: Arc::new(shared), _sync_every_second: Ticker::start(|| {}).unwrap() };
    wal.reset(|_| Ok(BASE.to_vec())).unwrap();
    wal
}

fn append(wal: &Wal, number: u64) -> Result<(), TablesError> {
    wal.append(&WalRecord::abort_snapshot(number), || Ok(()))
}

/// Append a record and start a new segment. Returns the number of the segment.
fn rotate(wal: &Wal, number: u64) -> u64 {
    wal.append_and_rotate(&WalRecord::prepare_snapshot(number), || Ok(())).unwrap().1
}

/// The numbers of the records from the segment `first` on.
fn replay(wal: &Wal, first: u64) -> Result<Vec<u64>, String> {
    let mut numbers = Vec::new();
    wal.replay(first, |op, _, _| {
        if let ReplayOp::PrepareSnapshot(number) | ReplayOp::AbortSnapshot(number) = op {
            numbers.push(number);
        }
        Ok(())
    })?;
    Ok(numbers)
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

fn names(dir: &Path) -> Vec<String> {
    files(dir).into_keys().collect()
}

#[test]
fn a_closed_log_refuses_records_and_keeps_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let wal = started(dir.path());
    append(&wal, 1).unwrap();
    assert!(wal.has_base() && wal.bytes() > 0);
    let before = files(dir.path());
    wal.close();
    assert!(!wal.has_base());
    assert_eq!((wal.bytes(), wal.unsynced()), (0, Duration::ZERO));
    let not_applied = || -> Result<(), TablesError> { panic!("a record that is not in the log was applied") };
    let record = WalRecord::prepare_snapshot(2);
    let refused = [wal.append(&record, not_applied), wal.append_and_rotate(&record, not_applied).map(drop)];
    for error in refused.map(Result::unwrap_err) {
        let next = "loading a checkpoint, or a run that begins with empty tables, starts a new log";
        assert!(error.to_string().contains(next), "{error}");
    }
    wal.truncate(2, b"another base").unwrap();
    assert_eq!(files(dir.path()), before);
    // Another process can still replay the closed log.
    let other = open(dir.path());
    assert_eq!(other.base().unwrap().unwrap(), BASE);
    assert_eq!(replay(&other, FIRST_SEGMENT).unwrap(), [1]);
    drop(other);
    wal.reset(|_| Ok(BASE.to_vec())).unwrap();
    append(&wal, 3).unwrap();
    drop(wal);
    assert_eq!(replay(&open(dir.path()), FIRST_SEGMENT).unwrap(), [3]);
}

#[test]
fn a_record_that_is_not_durable_does_not_outlive_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let wal = without_syncs(dir.path());
    append(&wal, 1).unwrap();
    assert!(wal.unsynced() > Duration::ZERO);
    wal.close();
    assert_eq!(wal.unsynced(), Duration::ZERO);
    // The thread that syncs every second also makes this call. There is nothing to sync, and the disk has not
    // failed.
    wal.shared.sync_to(1).unwrap();
    wal.wait_for_sync().unwrap();
}

/// The process was killed after it had replaced the base and before it had removed the segments before the
/// base.
#[test]
fn segments_before_the_base_are_removed_by_the_next_process() {
    let dir = tempfile::tempdir().unwrap();
    let wal = started(dir.path());
    append(&wal, 1).unwrap();
    assert_eq!(rotate(&wal, 2), 2);
    append(&wal, 3).unwrap();
    let first = fs::read(dir.path().join("1")).unwrap();
    wal.truncate(2, BASE).unwrap();
    assert_eq!(names(dir.path()), ["2", "base"]);
    drop(wal);
    fs::write(dir.path().join("1"), first).unwrap();
    let wal = open(dir.path());
    assert_eq!(replay(&wal, 2).unwrap(), [3]);
    assert_eq!(names(dir.path()), ["2", "base"]);
}

#[test]
fn segments_that_could_not_be_removed_are_removed_with_the_next_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let wal = started(dir.path());
    append(&wal, 1).unwrap();
    assert_eq!(rotate(&wal, 2), 2);
    let path = dir.path().join("1");
    let first = fs::read(&path).unwrap();
    // Replace the segment by a directory, which cannot be removed as a file.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    wal.truncate(2, BASE).unwrap_err();
    fs::remove_dir(&path).unwrap();
    fs::write(&path, first).unwrap();
    append(&wal, 3).unwrap();
    assert_eq!(rotate(&wal, 4), 3);
    wal.truncate(3, BASE).unwrap();
    assert_eq!(names(dir.path()), ["3", "base"]);
}

/// The power failed while segments that cannot be applied were removed.
#[test]
fn segments_after_a_gap_that_nothing_durable_needs_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let wal = without_syncs(dir.path());
    append(&wal, 1).unwrap();
    rotate(&wal, 2);
    append(&wal, 3).unwrap();
    rotate(&wal, 4);
    let mut stale = files(dir.path());
    drop(wal);
    stale.remove("2");
    let gap = tempfile::tempdir().unwrap();
    for (name, content) in stale {
        fs::write(gap.path().join(name), content).unwrap();
    }
    let wal = open(gap.path());
    assert_eq!(replay(&wal, FIRST_SEGMENT).unwrap(), [1, 2]);
    assert_eq!(names(gap.path()), ["1", "base"]);
    append(&wal, 5).unwrap();
    rotate(&wal, 6);
    drop(wal);
    assert_eq!(replay(&open(gap.path()), FIRST_SEGMENT).unwrap(), [1, 2, 5, 6]);
}

#[test]
fn a_first_segment_without_a_whole_header_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let wal = started(dir.path());
    append(&wal, 1).unwrap();
    drop(wal);
    let path = dir.path().join("1");
    for length in [3, 0] {
        fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        let why = replay(&open(dir.path()), FIRST_SEGMENT).unwrap_err();
        let expected = format!("{}: the segment has {length} bytes, but its header has 16", path.display());
        assert!(why.starts_with(&expected), "{why}");
        assert_eq!(names(dir.path()), ["1", "base"], "nothing of a damaged log is removed");
    }
}

#[test]
fn a_missing_segment_that_was_durable_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let wal = started(dir.path());
    append(&wal, 1).unwrap();
    rotate(&wal, 2);
    append(&wal, 3).unwrap();
    rotate(&wal, 4);
    append(&wal, 5).unwrap();
    drop(wal);
    fs::remove_file(dir.path().join("2")).unwrap();
    let why = replay(&open(dir.path()), FIRST_SEGMENT).unwrap_err();
    assert!(why.contains("is missing, although a later segment states that this one is durable"), "{why}");
    assert_eq!(names(dir.path()), ["1", "3", "base"], "nothing of a damaged log is removed");
}
