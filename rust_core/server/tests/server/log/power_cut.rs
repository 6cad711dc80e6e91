//! Simulates power cuts: files keep what was synced, and the directory has the names of its last sync or the
//! current names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use libc::c_int;
use persia_types::ShardedIds;
use persia_types::config::LogSync;
use persia_types::id::hash_id;

use super::{Twins, counters, push_to, run, slow_disk, synced_server};
use crate::running::wait_until;
use crate::stack::token;

/// Identifies a file, because names and inode numbers are reused.
type Key = (u64, Option<SystemTime>);

/// The durable state of one directory.
struct Disk {
    dir: PathBuf,
    durable: Mutex<Durable>,
    /// The number of acknowledged requests.
    acknowledged: AtomicUsize,
}

#[derive(Default)]
struct Durable {
    contents: BTreeMap<Key, Vec<u8>>,
    names: BTreeMap<OsString, Key>,
    /// The number of requests that were acknowledged before the last sync began.
    reached: usize,
}

static DISKS: Mutex<Vec<Arc<Disk>>> = Mutex::new(Vec::new());

#[unsafe(no_mangle)]
#[allow(unsafe_code)]
extern "C" fn fdatasync(file: c_int) -> c_int {
    sync(file, libc::SYS_fdatasync)
}

#[unsafe(no_mangle)]
#[allow(unsafe_code)]
extern "C" fn fsync(file: c_int) -> c_int {
    sync(file, libc::SYS_fsync)
}

/// Sync a file. Its content at the time of the call is durable once the call succeeds.
#[allow(unsafe_code)]
fn sync(file: c_int, number: libc::c_long) -> c_int {
    let path = fs::read_link(format!("/proc/self/fd/{file}")).unwrap_or_default();
    let disk = DISKS.lock().unwrap().iter().find(|disk| path.starts_with(&disk.dir)).cloned();
    let before = disk.map(|disk| (Seen::of(&path), disk.acknowledged.load(Ordering::SeqCst), disk));
    slow_disk::pass(&path);
    // SAFETY: this is the system call of that name, with its only argument.
    let result = unsafe { libc::syscall(number, file) } as c_int;
    if let (0, Some((seen, acknowledged, disk))) = (result, before) {
        let mut durable = disk.durable.lock().unwrap();
        match seen {
            Some(Seen::File(key, content)) => drop(durable.contents.insert(key, content)),
            Some(Seen::Names(names)) => durable.names = names,
            None => {} // removed meanwhile
        }
        durable.reached = acknowledged;
    }
    result
}

enum Seen {
    File(Key, Vec<u8>),
    Names(BTreeMap<OsString, Key>),
}

fn key(path: &Path) -> Option<Key> {
    let metadata = fs::symlink_metadata(path).ok()?;
    Some((metadata.ino(), metadata.created().ok()))
}

fn names(dir: &Path) -> BTreeMap<OsString, Key> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.filter_map(|entry| Some((entry.file_name(), key(&entry.path())?))).collect()
}

impl Seen {
    fn of(path: &Path) -> Option<Self> {
        if path.is_dir() {
            return Some(Self::Names(names(path)));
        }
        Some(Self::File(key(path)?, fs::read(path).ok()?))
    }
}

/// The state of the unsynced end of a file after a power cut.
#[derive(Debug, Clone, Copy)]
enum Unsynced {
    Lost,
    Half,
    Zeros,
}

/// The kinds of power cuts: whether names are the current ones, and what happens to unsynced ends.
const WAYS: [(bool, Unsynced); 6] = [
    (false, Unsynced::Lost),
    (true, Unsynced::Lost),
    (false, Unsynced::Half),
    (true, Unsynced::Half),
    (false, Unsynced::Zeros),
    (true, Unsynced::Zeros),
];

impl Disk {
    /// Watch the log below the data directory `data`. Its current content counts as durable.
    fn watch(data: &Path) -> Arc<Self> {
        let dir = data.join("journal");
        fs::create_dir_all(&dir).unwrap();
        let names = names(&dir);
        let content = |(name, key): (&OsString, &Key)| (*key, fs::read(dir.join(name)).unwrap());
        let durable = Durable { contents: names.iter().map(content).collect(), names, reached: 0 };
        let disk = Self { dir, durable: Mutex::new(durable), acknowledged: AtomicUsize::new(0) };
        let disk = Arc::new(disk);
        DISKS.lock().unwrap().push(Arc::clone(&disk));
        disk
    }

    /// Create the data of a server after a power cut.
    fn cut(&self, (as_shown, unsynced): (bool, Unsynced)) -> tempfile::TempDir {
        let durable = self.durable.lock().unwrap();
        let left = tempfile::tempdir().unwrap();
        fs::create_dir(left.path().join("journal")).unwrap();
        let shown = names(&self.dir);
        for (name, key) in if as_shown { &shown } else { &durable.names } {
            let mut content = durable.contents.get(key).cloned().unwrap_or_default();
            if let Some((name, _)) = shown.iter().find(|(_, shown)| *shown == key) {
                let all = fs::read(self.dir.join(name)).unwrap();
                let more = all.get(content.len()..).unwrap_or_default();
                match unsynced {
                    Unsynced::Lost => {}
                    Unsynced::Half => content.extend(&more[..more.len() / 2]),
                    Unsynced::Zeros => content.resize(all.len().max(content.len()), 0),
                }
            }
            fs::write(left.path().join("journal").join(name), content).unwrap();
        }
        let generation = self.dir.with_file_name("generation");
        if generation.exists() {
            fs::copy(generation, left.path().join("generation")).unwrap();
        }
        left
    }
}

#[test]
fn with_a_sync_for_each_request_acknowledged_requests_survive_a_power_cut() {
    for seed in 0..2 {
        let mut twins = Twins::synced(LogSync::Always);
        let mut disk = Disk::watch(twins.data[0].path());
        for number in 0..60 {
            twins.random(hash_id(seed << 33 | number));
            if number % 5 == 4 {
                let way = WAYS[(seed + number / 5) as usize % WAYS.len()];
                let left = disk.cut(way);
                twins.nodes[0] = synced_server(left.path(), twins.checkpoints.path(), LogSync::Always);
                twins.data[0] = left;
                twins.check(&format!("seed {seed}, after request {number}, {way:?}"));
                disk = Disk::watch(twins.data[0].path());
            }
        }
    }
}

#[test]
fn with_a_sync_every_second_synced_requests_survive_a_power_cut() {
    let checkpoints = tempfile::tempdir().unwrap();
    let mut data = tempfile::tempdir().unwrap();
    let mut node = synced_server(data.path(), checkpoints.path(), LogSync::EverySecond);
    node.begin(1, &run(1, true), false).unwrap();
    let mut seq = 0;
    for way in WAYS {
        let disk = Disk::watch(data.path());
        let mut states = vec![counters(&node)];
        let mut train = |node: &super::Node| {
            seq += 1;
            let parts = vec![(0, ShardedIds::group(&[seq, 7]).unwrap())];
            push_to(node, token(0, seq), seq, &parts, 1.0).unwrap();
            disk.acknowledged.fetch_add(1, Ordering::SeqCst);
            states.push(counters(node));
        };
        (0..6).for_each(|_| train(&node));
        wait_until("a sync after them", || disk.durable.lock().unwrap().reached >= 6);
        (0..6).for_each(|_| train(&node));
        let left = disk.cut(way);
        node = synced_server(left.path(), checkpoints.path(), LogSync::EverySecond);
        data = left;
        let found = counters(&node);
        let place = states.iter().position(|state| *state == found);
        assert!(place.is_some_and(|place| place >= 6), "{way:?}: {place:?} of 12, a sync reached 6");
    }
}
