//! Tests of listing, choosing and pruning the checkpoints of a run.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod commit_sample;

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use commit_sample::{load, names, save};
use persia_store::checkpoint::{CheckpointError, Saver, latest, list, prune, publish_latest};

fn series(parent: &Path, steps: &[u64]) {
    for step in steps {
        save(&parent.join(format!("step-{step}")), *step).unwrap();
    }
}

fn keep(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

fn flip_last_byte(path: PathBuf) {
    let mut content = fs::read(&path).unwrap();
    *content.last_mut().unwrap() ^= 1;
    fs::write(path, content).unwrap();
}

#[test]
fn the_list_is_newest_first_and_explains_unusable_ones() {
    let parent = tempfile::tempdir().unwrap();
    series(parent.path(), &[9, 100, 20]);
    flip_last_byte(parent.path().join("step-20/MANIFEST.json"));
    fs::create_dir_all(parent.path().join("new/.saving-1")).unwrap();
    fs::create_dir_all(parent.path().join("pictures/2026")).unwrap();
    let listed = list(parent.path()).unwrap();
    let steps: Vec<Option<u64>> =
        listed.iter().map(|one| one.manifest.as_ref().ok().map(|manifest| manifest.head.step)).collect();
    assert_eq!(steps, [Some(100), Some(9), None, None]);
    let why: Vec<String> =
        listed[2..].iter().map(|one| one.manifest.as_ref().unwrap_err().to_string()).collect();
    assert!(why[0].contains("new: no checkpoint here: a save into this folder has not finished"), "{why:?}");
    assert!(why[1].contains("step-20/MANIFEST.json: has changed since"), "{why:?}");
}

#[test]
fn latest_is_the_newest_and_never_falls_back_to_an_older_one() {
    let parent = tempfile::tempdir().unwrap();
    assert!(matches!(latest(parent.path()), Err(CheckpointError::Missing { .. })));
    series(parent.path(), &[1, 2]);
    publish_latest(&parent.path().join("step-1")).unwrap();
    assert_eq!(latest(parent.path()).unwrap().1.head.step, 2, "the hint may be stale");
    publish_latest(&parent.path().join("step-2")).unwrap();
    assert_eq!(fs::read_to_string(parent.path().join("LATEST")).unwrap(), "step-2\n");
    flip_last_byte(parent.path().join("step-2/MANIFEST.json"));
    let error = latest(parent.path()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Corrupt { path, .. } if path.ends_with("step-2/MANIFEST.json"))
    );
    fs::remove_dir_all(parent.path().join("step-2")).unwrap();
    assert_eq!(latest(parent.path()).unwrap().0, parent.path().join("step-1"));
}

/// `LATEST` names an older checkpoint if the process is killed between writing the manifest and `LATEST`.
#[test]
fn a_damaged_manifest_that_may_be_the_newest_is_not_passed_over() {
    let parent = tempfile::tempdir().unwrap();
    series(parent.path(), &[9, 10, 20]);
    publish_latest(&parent.path().join("step-10")).unwrap();
    flip_last_byte(parent.path().join("step-9/MANIFEST.json"));
    assert_eq!(latest(parent.path()).unwrap().1.head.step, 20, "an older one does not matter");
    flip_last_byte(parent.path().join("step-20/MANIFEST.json"));
    let error = latest(parent.path()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Corrupt { path, .. } if path.ends_with("step-20/MANIFEST.json")),
        "{error}"
    );
    fs::rename(parent.path().join("step-20"), parent.path().join("by-hand")).unwrap();
    assert!(matches!(latest(parent.path()), Err(CheckpointError::Corrupt { .. })), "its age is unknown");
    fs::remove_dir_all(parent.path().join("by-hand")).unwrap();
    assert_eq!(latest(parent.path()).unwrap().1.head.step, 10);
}

#[test]
fn a_damaged_hint_is_only_a_hint_and_a_foreign_one_is_not_replaced() {
    let parent = tempfile::tempdir().unwrap();
    series(parent.path(), &[1]);
    for text in ["../step-1\n", "", "step-1", "..\n", "\n", "a\nb\n"] {
        fs::write(parent.path().join("LATEST"), text).unwrap();
        assert_eq!(latest(parent.path()).unwrap().1.head.step, 1);
        let error = publish_latest(&parent.path().join("step-1")).unwrap_err();
        assert!(matches!(error, CheckpointError::Occupied { .. }), "{error}");
        assert_eq!(fs::read_to_string(parent.path().join("LATEST")).unwrap(), text);
    }
}

#[test]
fn pruning_keeps_the_newest_and_every_file_that_is_not_ours() {
    let parent = tempfile::tempdir().unwrap();
    series(parent.path(), &[1, 2, 3, 4, 5]);
    fs::write(parent.path().join("step-2/notes.txt"), "mine").unwrap();
    let removed = prune(parent.path(), keep(2)).unwrap();
    assert_eq!(removed, ["step-3", "step-2", "step-1"].map(|name| parent.path().join(name)));
    assert_eq!(names(parent.path()), ["step-2", "step-4", "step-5"]);
    assert_eq!(names(&parent.path().join("step-2")), ["notes.txt"]);
    assert_eq!(load(&parent.path().join("step-4")).unwrap(), 4);
    assert_eq!(prune(parent.path(), keep(2)).unwrap(), [] as [PathBuf; 0]);
}

#[test]
fn pruning_removes_abandoned_saves() {
    let parent = tempfile::tempdir().unwrap();
    series(parent.path(), &[1, 2]);
    let abandoned = parent.path().join("step-3");
    let saver = Saver::begin(&abandoned).unwrap();
    fs::write(saver.staging().join("shard-000.arrow"), "by a server that does not know").unwrap();
    prune(parent.path(), keep(5)).unwrap();
    assert!(saver.staging().join("shard-000.arrow").exists(), "a save under way");
    saver.abandon();
    prune(parent.path(), keep(5)).unwrap();
    assert_eq!(names(parent.path()), ["step-1", "step-2"]);
    drop(Saver::begin(&abandoned).unwrap());
    assert!(!abandoned.exists(), "created for a save that failed");
}

#[test]
fn pruning_never_deletes_the_newest_whole_checkpoint() {
    let parent = tempfile::tempdir().unwrap();
    series(parent.path(), &[1, 2, 3, 4]);
    for step in [3, 4] {
        flip_last_byte(parent.path().join(format!("step-{step}/shard-200.arrow")));
    }
    prune(parent.path(), keep(1)).unwrap();
    assert_eq!(names(parent.path()), ["step-2", "step-4"]);
    assert_eq!(load(&parent.path().join("step-2")).unwrap(), 2);
    flip_last_byte(parent.path().join("step-2/dense.pt"));
    assert!(prune(parent.path(), keep(1)).unwrap().is_empty(), "all are damaged: none is deleted");
}

#[test]
fn an_interrupted_removal_is_finished_by_the_next_one_or_by_a_save() {
    let parent = tempfile::tempdir().unwrap();
    series(parent.path(), &[1, 2, 3]);
    for step in [1, 2] {
        let dir = parent.path().join(format!("step-{step}"));
        fs::rename(dir.join("MANIFEST.json"), dir.join(".REMOVED.json")).unwrap();
        fs::remove_file(dir.join("shard-003.arrow")).unwrap();
    }
    save(&parent.path().join("step-2"), 9).unwrap();
    assert_eq!(load(&parent.path().join("step-2")).unwrap(), 9);
    prune(parent.path(), keep(5)).unwrap();
    assert_eq!(names(parent.path()), ["step-2", "step-3"]);
}

#[test]
fn a_checkpoint_put_back_after_an_interrupted_removal_keeps_its_files() {
    let parent = tempfile::tempdir().unwrap();
    series(parent.path(), &[1]);
    let dir = parent.path().join("step-1");
    fs::copy(dir.join("MANIFEST.json"), dir.join(".REMOVED.json")).unwrap();
    prune(parent.path(), keep(1)).unwrap();
    assert_eq!(load(&dir).unwrap(), 1);
    assert!(!dir.join(".REMOVED.json").exists());
}
