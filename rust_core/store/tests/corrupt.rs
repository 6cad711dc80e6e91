//! Tests that a checkpoint with any change is refused, and that the error names the file.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod commit_sample;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use commit_sample::{load, save, scratch, shards, tidy_names};
use persia_store::checkpoint::{CheckpointError, FORMAT, Manifest, Saver, read_shard};
use persia_types::TablesError;

const MANIFEST: &str = "MANIFEST.json";

fn saved() -> tempfile::TempDir {
    let dir = scratch();
    save(dir.path(), 1).unwrap();
    dir
}

fn files(dir: &Path) -> Vec<PathBuf> {
    tidy_names(1).iter().map(|name| dir.join(name)).collect()
}

/// Check that every way to read the checkpoint fails because of this file only. Returns the message.
fn refused(dir: &Path, file: &Path) -> String {
    let names_it = |path: &Path| path.file_name() == file.file_name();
    if file.ends_with(MANIFEST) {
        let error = Manifest::open(dir).unwrap_err();
        let (CheckpointError::Corrupt { path, .. } | CheckpointError::Future { path, .. }) = &error else {
            panic!("{error:?}")
        };
        assert!(names_it(path), "{error}");
        return error.to_string();
    }
    let manifest = Manifest::open(dir).unwrap();
    let problems = manifest.verify(dir).unwrap_err();
    let [CheckpointError::Corrupt { path, .. }] = &problems[..] else { panic!("{problems:?}") };
    assert!(names_it(path), "{problems:?}");
    for entry in manifest.shards() {
        match read_shard(dir, &entry) {
            Ok(rows) => assert!(shards(1).contains(&rows) && !entry.name.ends_with(&file_name(file))),
            Err(TablesError::Corrupt { path, .. }) => assert!(names_it(&path), "{path:?}"),
            Err(other) => panic!("{other:?}"),
        }
    }
    problems[0].to_string()
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().into()
}

#[test]
fn every_flipped_byte() {
    let dir = saved();
    let mut flips = 0;
    for file in files(dir.path()) {
        let good = fs::read(&file).unwrap();
        let mut bad = good.clone();
        for at in 0..good.len() {
            for pattern in [1 << (at % 8), 0xff] {
                bad[at] ^= pattern;
                fs::write(&file, &bad).unwrap();
                refused(dir.path(), &file);
                bad[at] = good[at];
                flips += 1;
            }
        }
        fs::write(&file, &good).unwrap();
    }
    assert!(flips > 20_000, "only {flips}");
    assert_eq!(load(dir.path()).unwrap(), 1);
}

#[test]
fn every_shorter_length_and_some_longer_ones() {
    let dir = saved();
    for file in files(dir.path()) {
        let good = fs::read(&file).unwrap();
        for length in 0..good.len() {
            fs::write(&file, &good[..length]).unwrap();
            refused(dir.path(), &file);
        }
        for more in [&b"\0"[..], b"\n", &good] {
            fs::write(&file, [&good, more].concat()).unwrap();
            refused(dir.path(), &file);
        }
        fs::write(&file, vec![0; good.len()]).unwrap();
        refused(dir.path(), &file);
        fs::write(&file, &good).unwrap();
    }
    assert_eq!(load(dir.path()).unwrap(), 1);
}

#[test]
fn a_missing_file_and_its_replacements() {
    let dir = saved();
    for file in files(dir.path()).into_iter().filter(|file| !file.ends_with(MANIFEST)) {
        let aside = dir.path().join("aside");
        fs::rename(&file, &aside).unwrap();
        assert!(refused(dir.path(), &file).contains("is missing"));
        symlink(&aside, &file).unwrap();
        assert!(refused(dir.path(), &file).contains("symbolic link"));
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert!(refused(dir.path(), &file).contains("not a regular file"));
        fs::remove_dir(&file).unwrap();
        // Reading a pipe would block.
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        assert!(refused(dir.path(), &file).contains("not a regular file"));
        fs::remove_file(&file).unwrap();
        fs::rename(&aside, &file).unwrap();
    }
    assert_eq!(load(dir.path()).unwrap(), 1);
}

#[test]
fn a_linked_manifest() {
    let dir = saved();
    let manifest = dir.path().join(MANIFEST);
    fs::rename(&manifest, dir.path().join("aside")).unwrap();
    symlink("aside", &manifest).unwrap();
    assert!(refused(dir.path(), &manifest).contains("symbolic link"));
}

#[test]
fn two_files_swapped() {
    let dir = saved();
    let (one, two, aside) =
        (dir.path().join("shard-003.arrow"), dir.path().join("shard-200.arrow"), dir.path().join("aside"));
    for (from, to) in [(&one, &aside), (&two, &one), (&aside, &two)] {
        fs::rename(from, to).unwrap();
    }
    let problems = Manifest::open(dir.path()).unwrap().verify(dir.path()).unwrap_err();
    let named: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert!(
        named.len() == 2 && named[0].contains("shard-003") && named[1].contains("shard-200"),
        "{named:?}"
    );
}

#[test]
fn an_extra_file_is_ignored_and_left_alone() {
    let dir = saved();
    let extra = dir.path().join("shard-077.arrow");
    fs::write(&extra, "someone's").unwrap();
    assert_eq!(load(dir.path()).unwrap(), 1);
    save(dir.path(), 1).unwrap();
    assert_eq!(fs::read(&extra).unwrap(), b"someone's");
}

/// Replace `from` by `to` in the manifest, and update its hash.
fn rewrite(dir: &Path, from: &str, to: &str) {
    let path = dir.join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    let (body, tail) = text.rsplit_once(",\n  \"blake3\": \"").unwrap();
    assert!(body.contains(from), "{from}");
    let body = body.replacen(from, to, 1);
    let tail = tail.replacen(&tail[..64], blake3::hash(body.as_bytes()).to_hex().as_str(), 1);
    fs::write(path, format!("{body},\n  \"blake3\": \"{tail}")).unwrap();
}

#[test]
fn a_manifest_of_a_later_format_and_no_save_over_it() {
    let dir = saved();
    rewrite(dir.path(), "\"format\": 1", "\"format\": 2");
    let error = Manifest::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Future { found: 2, known: FORMAT, .. }), "{error:?}");
    assert!(error.to_string().contains("install a newer Persia"), "{error}");
    assert!(matches!(Saver::begin(dir.path()), Err(CheckpointError::Future { .. })));
    rewrite(dir.path(), "\"format\": 2", "\"format\": 1");
    assert_eq!(load(dir.path()).unwrap(), 1);
}

#[test]
fn a_manifest_with_an_invalid_name() {
    let names = ["../x", "/etc/passwd", "a/b", ".hidden", "", "MANIFEST.json", "dense.pt"];
    for name in names {
        let dir = saved();
        rewrite(dir.path(), "\"shard-200.arrow\"", &format!("{name:?}"));
        refused(dir.path(), &dir.path().join(MANIFEST));
        let error = Saver::begin(dir.path()).err().unwrap();
        assert!(matches!(error, CheckpointError::Corrupt { .. }), "{error}");
        assert!(error.to_string().ends_with("; save to a different folder"), "{error}");
    }
    for (from, to) in [("\"generation\": 1", "\"generation\": 0"), ("\"blake3\": \"", "\"blake3\": \"X")] {
        let dir = saved();
        rewrite(dir.path(), from, to);
        refused(dir.path(), &dir.path().join(MANIFEST));
    }
}

#[test]
fn numbers_out_of_range() {
    let dir = saved();
    rewrite(dir.path(), "\"weight_bound\": 10.0", "\"weight_bound\": 1e39");
    refused(dir.path(), &dir.path().join(MANIFEST));
    let dir = saved();
    for name in ["shard-003.arrow", "shard-011.arrow"] {
        let size = format!("\"name\": {name:?},\n      \"bytes\": ");
        rewrite(dir.path(), &size, &format!("{size}999999999999999"));
    }
    assert_eq!(Manifest::open(dir.path()).unwrap().bytes(), u64::MAX);
}

#[test]
fn a_staging_directory_that_is_a_link_is_not_followed() {
    let (dir, elsewhere) = (saved(), scratch());
    fs::write(elsewhere.path().join("dense.pt"), "someone's").unwrap();
    fs::write(elsewhere.path().join(".persia-save"), "").unwrap();
    symlink(elsewhere.path(), dir.path().join(".saving-1")).unwrap();
    assert_eq!(load(dir.path()).unwrap(), 1);
    save(dir.path(), 2).unwrap();
    assert_eq!(fs::read(elsewhere.path().join("dense.pt")).unwrap(), b"someone's");
    assert_eq!(load(dir.path()).unwrap(), 2);
}
