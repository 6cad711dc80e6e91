//! The commit protocol in one process: the files that a save leaves, replaces or refuses to replace.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod commit_sample;

use std::fs;
use std::path::Path;

use commit_sample::{dense, head, load, names, save, shards, tidy_names};
use persia_store::checkpoint::{CheckpointError, Manifest, Saver, recover, remove_object, write_shard};
use persia_types::tables::{FileEntry, Run};
use serde_json::value::RawValue;

fn staged_dense(dir: &Path) -> Saver {
    let mut saver = Saver::begin(dir).unwrap();
    fs::write(saver.staging().join("dense.pt"), dense(1)).unwrap();
    saver.add_file("dense.pt").unwrap();
    saver
}

#[test]
fn an_abandoned_save_keeps_its_files_until_the_next_one_which_stages_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let left = Saver::begin(dir.path()).unwrap();
    let old = left.staging().to_owned();
    fs::write(old.join("late"), "by a server that does not know").unwrap();
    left.abandon();
    assert!(old.join("late").exists());
    let next = Saver::begin(dir.path()).unwrap();
    assert_ne!(next.staging(), old);
    assert!(!old.exists());
}

#[test]
fn a_save_leaves_its_files_and_the_manifest_and_nothing_else() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("a/b/step-1");
    let manifest = save(&dir, 1).unwrap();
    assert_eq!(names(&dir), tidy_names(1));
    assert_eq!(load(&dir).unwrap(), 1);
    assert_eq!(manifest.bytes(), Manifest::open(&dir).unwrap().bytes());
}

#[test]
fn a_second_dump_into_the_same_place_works_and_replaces_the_first() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    for step in 1..8 {
        save(dir.path(), step).unwrap();
        assert_eq!(load(dir.path()).unwrap(), step);
        let mut expected = tidy_names(step);
        expected.push("notes.txt".into());
        expected.sort();
        assert_eq!(names(dir.path()), expected);
    }
    assert_eq!(fs::read(dir.path().join("notes.txt")).unwrap(), b"mine");
}

#[test]
fn the_done_marker_comes_last() {
    let dir = tempfile::tempdir().unwrap();
    let mut saver = Saver::begin(dir.path()).unwrap();
    let refused = |dir: &Path| {
        let error = Manifest::open(dir).unwrap_err();
        assert!(matches!(error, CheckpointError::Missing { .. }), "{error}");
        assert!(error.to_string().contains("not finished"), "{error}");
    };
    refused(dir.path());
    for rows in shards(1) {
        let entry = write_shard(saver.staging(), &rows).unwrap();
        refused(dir.path());
        saver.add(entry).unwrap();
        refused(dir.path());
    }
    fs::write(saver.staging().join("dense.pt"), dense(1)).unwrap();
    saver.add_file("dense.pt").unwrap();
    refused(dir.path());
    saver.commit(head(1)).unwrap();
    assert_eq!(load(dir.path()).unwrap(), 1);
}

#[test]
fn a_dropped_save_leaves_the_old_checkpoint_and_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    drop(staged_dense(dir.path()));
    assert_eq!(names(dir.path()), tidy_names(1));
    assert_eq!(load(dir.path()).unwrap(), 1);
}

#[test]
fn only_staging_directories_with_our_marker_are_swept() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    let (ours, foreign, empty) =
        (dir.path().join(".saving-4"), dir.path().join(".saving-9"), dir.path().join(".saving-5"));
    for staging in [&ours, &foreign, &empty] {
        fs::create_dir(staging).unwrap();
    }
    fs::write(ours.join(".persia-save"), "").unwrap();
    fs::write(ours.join("shard-003.arrow"), "half").unwrap();
    fs::write(foreign.join("shard-003.arrow"), "someone's").unwrap();
    let found = recover(dir.path()).unwrap().unwrap();
    assert_eq!(found.head.step, 1);
    assert!(!ours.exists() && !empty.exists());
    assert_eq!(fs::read(foreign.join("shard-003.arrow")).unwrap(), b"someone's");
    assert_eq!(save(dir.path(), 2).unwrap().revision, 10);
    assert_eq!(load(dir.path()).unwrap(), 2);
    assert!(foreign.exists());
}

#[test]
fn two_savers_cannot_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let first = staged_dense(dir.path());
    let error = Saver::begin(dir.path()).err().unwrap();
    assert!(matches!(error, CheckpointError::Busy { .. }), "{error}");
    assert!(matches!(recover(dir.path()), Err(CheckpointError::Busy { .. })));
    first.commit(head(1)).unwrap();
    save(dir.path(), 2).unwrap();
}

#[test]
fn a_foreign_file_of_the_same_name_is_refused_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("dense.pt"), "someone's").unwrap();
    let error = save(dir.path(), 1).unwrap_err();
    assert!(matches!(&error, CheckpointError::Occupied { path } if path.ends_with("dense.pt")), "{error}");
    assert_eq!(names(dir.path()), ["dense.pt"]);
    assert_eq!(fs::read(dir.path().join("dense.pt")).unwrap(), b"someone's");
}

#[test]
fn an_added_file_needs_a_valid_new_name_and_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let mut saver = staged_dense(dir.path());
    let refused = |result: Result<(), CheckpointError>, what: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(saver.add_file("dense.pt"), "added before");
    for name in ["../dense.pt", "MANIFEST.json", "LATEST", ".hidden", "", "a/b"] {
        refused(saver.add_file(name), "cannot be the name of a checkpoint file");
    }
    refused(saver.add_file("absent.pt"), "absent.pt");
    refused(remove_object(dir.path()), "cannot delete the checkpoint ");
    fs::write(saver.staging().join("opt.pt"), "1234").unwrap();
    let entry = |bytes, blake3: &str| FileEntry { name: "opt.pt".into(), bytes, blake3: blake3.into() };
    let hash = blake3::hash(b"1234").to_hex().to_string();
    refused(saver.add(entry(5, &hash)), "it has 4 bytes, but its writer reported 5");
    refused(saver.add(entry(4, "abc")), "is not a BLAKE3 hash");
    let error = saver.commit(head(1)).unwrap_err().to_string();
    assert!(error.contains("opt.pt") && error.contains("never added"), "{error}");
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_staged_file_that_is_a_link_is_refused_with_the_next_step_of_a_save() {
    let dir = tempfile::tempdir().unwrap();
    let mut saver = Saver::begin(dir.path()).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", saver.staging().join("dense.pt")).unwrap();
    let entry =
        FileEntry { name: "dense.pt".into(), bytes: 4, blake3: blake3::hash(b"1234").to_hex().to_string() };
    for error in [saver.add_file("dense.pt").unwrap_err(), saver.add(entry).unwrap_err()] {
        let expected = format!(
            "{}: is a symbolic link; save to a different folder",
            dir.path().join("dense.pt").display()
        );
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_head_that_cannot_be_read_back_is_refused_before_anything_is_published() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    let mut bad = head(2);
    bad.run.weight_bound = f32::INFINITY;
    let error = staged_dense(dir.path()).commit(bad).unwrap_err();
    assert!(matches!(error, CheckpointError::BadSave { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("MANIFEST.json: no reader would accept it: it is not a manifest: "), "{text}");
    assert!(!text.contains("use another checkpoint"), "{text}");
    assert_eq!(load(dir.path()).unwrap(), 1);
    assert_eq!(names(dir.path()), tidy_names(1));
}

#[test]
fn cursors_are_read_back_to_the_last_digit() {
    let dir = tempfile::tempdir().unwrap();
    let text =
        r#"{"state": 340282366920938463463374607431768211455, "x": 0.10000000000000000555, "n": [1e400]}"#;
    let mut head = head(1);
    head.cursors.insert("train".into(), RawValue::from_string(text.into()).unwrap());
    staged_dense(dir.path()).commit(head).unwrap();
    assert_eq!(Manifest::open(dir.path()).unwrap().head.cursors["train"].get(), text);
}

#[test]
fn the_error_for_a_missing_checkpoint_describes_the_directory() {
    let parent = tempfile::tempdir().unwrap();
    let missing = |dir: &Path, what: &str| {
        let error = Manifest::open(dir).unwrap_err();
        assert!(matches!(error, CheckpointError::Missing { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    };
    missing(&parent.path().join("absent"), "No such file");
    missing(parent.path(), "the folder is empty");
    fs::write(parent.path().join("x"), "").unwrap();
    missing(&parent.path().join("x"), "Not a directory");
    missing(parent.path(), "the folder has no MANIFEST.json, only other files or folders");
    save(&parent.path().join("step-1"), 1).unwrap();
    missing(parent.path(), "use one of the checkpoints in this folder: step-1");
}

#[test]
fn every_version_reads_the_generation_of_a_run() {
    let run = head(1).run;
    let text = serde_json::to_string(&run).unwrap();
    assert!(text.contains(r#""epoch":1,"#), "the key of the first version: {text}");
    let other = text.replace(r#""epoch":"#, r#""generation":"#);
    for text in [text, other] {
        assert_eq!(serde_json::from_str::<Run>(&text).unwrap(), run);
    }
}
