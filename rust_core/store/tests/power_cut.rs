//! Simulates a power cut at every file system call. The content of files that were not synced is missing, cut in
//! half or zeroed. The names are those at the last sync of each directory, or those after all changes. Either
//! the complete old checkpoint or the complete new one must remain.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod commit_sample;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use commit_sample::{load, names, save, scratch, tidy_names};
use fail::FailScenario;
use persia_store::checkpoint::{CheckpointError, latest, prune, publish_latest, recover};

/// Identifies a file, even if another file takes its name or, later, its inode.
type Key = (u64, Option<SystemTime>);

#[derive(Debug, Clone, PartialEq)]
enum Node {
    File(Vec<u8>),
    Folder(BTreeMap<OsString, Key>),
}

type Nodes = BTreeMap<Key, Node>;

fn key(path: &Path) -> Key {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.ino(), metadata.created().ok())
}

fn node(path: &Path) -> Node {
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
        Node::Folder(entries.map(|entry| (entry.file_name(), key(&entry.path()))).collect())
    } else {
        Node::File(fs::read(path).unwrap())
    }
}

/// Collect the content of the directory `path`, recursively.
fn tree(path: &Path, into: &mut Nodes) {
    into.insert(key(path), node(path));
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| tree(&entry.unwrap().path(), into));
    }
}

/// The path that was just synced. It is still open. The lock of a save keeps its directory open, so a
/// directory that is open twice is the path that was synced. Otherwise it is the deepest open path.
fn synced(root: &Path) -> PathBuf {
    let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    let mut open: Vec<PathBuf> = links.filter(|path| path.starts_with(root)).collect();
    open.sort();
    let twice = open.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0].clone());
    twice.unwrap_or_else(|| open.into_iter().max_by_key(|path| path.components().count()).unwrap())
}

/// The disk at each call: its durable state, and the state that the operating system shows.
struct Film {
    root: Key,
    pictures: Vec<(Nodes, Nodes)>,
}

/// Record how `run` changes the files below `root`. All files are durable before it runs.
fn film(root: &Path, run: impl FnOnce(&Path)) -> Film {
    let mut durable = Nodes::new();
    tree(root, &mut durable);
    let (durable, pictures) = (Arc::new(Mutex::new(durable)), Arc::new(Mutex::new(Vec::new())));
    let picture = {
        let (durable, pictures, root) = (durable.clone(), pictures.clone(), root.to_owned());
        move || {
            let mut shown = Nodes::new();
            tree(&root, &mut shown);
            pictures.lock().unwrap().push((durable.lock().unwrap().clone(), shown));
        }
    };
    fail::cfg_callback("ckpt.io", picture.clone()).unwrap();
    let path = root.to_owned();
    let sync = move || {
        let path = synced(&path);
        durable.lock().unwrap().insert(key(&path), node(&path));
    };
    fail::cfg_callback("ckpt.synced", sync).unwrap();
    run(root);
    fail::remove("ckpt.io");
    fail::remove("ckpt.synced");
    picture();
    let pictures = std::mem::take(&mut *pictures.lock().unwrap());
    Film { root: key(root), pictures }
}

/// The content of a file that was never synced.
#[derive(Debug, Clone, Copy)]
enum Unsynced {
    Empty,
    Half,
    Zeros,
}

/// Create a directory with the content of the disk after a power cut. `names` are the entries of directories, and
/// `durable` is the content of files.
fn develop(
    to: &Path,
    what: Key,
    names: &impl Fn(Key) -> Node,
    durable: &Nodes,
    shown: &Nodes,
    lost: Unsynced,
) {
    let Node::Folder(entries) = names(what) else { panic!("a folder") };
    fs::create_dir_all(to).unwrap();
    for (name, key) in entries {
        let to = to.join(name);
        match (durable.get(&key), shown.get(&key)) {
            (_, Some(Node::Folder(_))) | (Some(Node::Folder(_)), _) => {
                develop(&to, key, names, durable, shown, lost);
            }
            (Some(Node::File(content)), _) => fs::write(to, content).unwrap(),
            (None, Some(Node::File(content))) => {
                let half = content.len() / 2;
                let left = match lost {
                    Unsynced::Empty => Vec::new(),
                    Unsynced::Half => content[..half].to_vec(),
                    Unsynced::Zeros => vec![0; content.len()],
                };
                fs::write(to, left).unwrap();
            }
            (None, None) => {} // created and removed before it became durable
        }
    }
}

/// Call `check` for every state that the disk may have after a power cut, with the number of calls before it
/// and whether it is the state after the last call.
fn cuts(film: &Film, check: impl Fn(&Path, usize, bool)) {
    let last = film.pictures.len() - 1;
    for (at, (durable, shown)) in film.pictures.iter().enumerate() {
        for lost in [Unsynced::Empty, Unsynced::Half, Unsynced::Zeros] {
            // The names are either those at the last sync of each directory, or those after all changes in
            // order.
            let as_synced = |key: Key| durable.get(&key).cloned().unwrap_or(Node::Folder(BTreeMap::new()));
            let as_shown = |key: Key| shown[&key].clone();
            let dir = scratch();
            develop(dir.path(), film.root, &as_synced, durable, shown, lost);
            check(dir.path(), at, at == last);
            let dir = scratch();
            develop(dir.path(), film.root, &as_shown, durable, shown, lost);
            check(dir.path(), at, at == last);
        }
    }
}

#[test]
fn a_save_over_an_old_checkpoint() {
    let _scenario = FailScenario::setup();
    let dir = scratch();
    save(dir.path(), 1).unwrap();
    let film = film(dir.path(), |dir| drop(save(dir, 2).unwrap()));
    assert!(film.pictures.len() > 20);
    fail::remove("ckpt.io");
    cuts(&film, |dir, at, last| {
        recover(dir).unwrap();
        let found = load(dir).unwrap();
        assert!(found == 2 || found == 1 && !last, "step {found} after call {at}");
        assert_eq!(names(dir), tidy_names(found), "after call {at}");
        save(dir, 3).unwrap();
        assert_eq!((load(dir).unwrap(), names(dir)), (3, tidy_names(3)));
    });
}

#[test]
fn a_first_save_into_folders_that_are_not_there() {
    let _scenario = FailScenario::setup();
    let dir = scratch();
    let film = film(dir.path(), |dir| drop(save(&dir.join("a/step"), 2).unwrap()));
    cuts(&film, |dir, at, last| {
        let dir = dir.join("a/step");
        match load(&dir) {
            Ok(found) => assert_eq!(found, 2),
            Err(error) => {
                let none = matches!(error, CheckpointError::Missing { .. } | CheckpointError::Io { .. });
                assert!(none && !last, "after call {at}: {error}");
            }
        }
        save(&dir, 3).unwrap();
        assert_eq!((load(&dir).unwrap(), names(&dir)), (3, tidy_names(3)));
    });
}

#[test]
fn the_hint_and_pruning() {
    let _scenario = FailScenario::setup();
    let dir = scratch();
    (1..3).for_each(|step| drop(save(&dir.path().join(format!("step-{step}")), step).unwrap()));
    publish_latest(&dir.path().join("step-2")).unwrap();
    let film = film(dir.path(), |dir| {
        save(&dir.join("step-3"), 3).unwrap();
        publish_latest(&dir.join("step-3")).unwrap();
        prune(dir, NonZeroUsize::MIN).unwrap();
    });
    cuts(&film, |dir, at, last| {
        let (path, manifest) = latest(dir).unwrap();
        let step = manifest.head.step;
        assert!(step == 3 || step == 2 && !last, "step {step} after call {at}");
        assert_eq!(load(&path).unwrap(), step);
        prune(dir, NonZeroUsize::MIN).unwrap();
        assert_eq!(load(&latest(dir).unwrap().0).unwrap(), step, "after call {at}");
    });
}
