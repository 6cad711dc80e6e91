//! Makes each file system call fail, either once or from then on. Each test checks that an error is returned, and
//! that the disk has either the complete old checkpoint or the complete new one.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod commit_sample;

use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use commit_sample::{load, names, save, scratch, tidy_names};
use fail::FailScenario;
use persia_store::checkpoint::{latest, list, prune, publish_latest, recover, replace_file};

type Attempt = Result<(), Box<dyn std::error::Error>>;

/// The number of file system calls that `run` makes.
fn calls(run: impl FnOnce() -> Attempt) -> usize {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    fail::cfg_callback("ckpt.io", move || {
        counter.fetch_add(1, Ordering::SeqCst);
    })
    .unwrap();
    run().unwrap();
    fail::remove("ckpt.io");
    count.load(Ordering::SeqCst)
}

/// For every n, run an attempt in a fresh directory in which the n-th call fails, once or from then on, and
/// check the result.
fn at_every_call(prepare: impl Fn(&Path), attempt: impl Fn(&Path) -> Attempt, check: impl Fn(&Path)) {
    let _scenario = FailScenario::setup();
    let fresh = || {
        let dir = scratch();
        prepare(dir.path());
        dir
    };
    let dir = fresh();
    let total = calls(|| attempt(dir.path()));
    assert!(total > 5, "only {total} calls");
    for n in 0..total {
        for how in ["1*return", "return"] {
            let dir = fresh();
            fail::cfg("ckpt.io", &format!("{n}*off->{how}")).unwrap();
            let result = attempt(dir.path());
            fail::remove("ckpt.io");
            let error =
                result.err().unwrap_or_else(|| panic!("call {n} of {total} failed ({how}), silently"));
            assert!(error.to_string().contains(&*dir.path().to_string_lossy()), "no path in: {error}");
            check(dir.path());
        }
    }
}

fn save_over(dir: &Path) -> Attempt {
    save(dir, 2)?;
    Ok(())
}

#[test]
fn a_save_over_an_old_checkpoint() {
    let old = |dir: &Path| drop(save(dir, 1).unwrap());
    at_every_call(old, save_over, |dir| {
        let found = load(dir).unwrap();
        assert!(found == 1 || found == 2, "step {found}");
        assert_eq!(recover(dir).unwrap().unwrap().head.step, found);
        assert_eq!(names(dir), tidy_names(found));
        save(dir, 3).unwrap();
        assert_eq!(load(dir).unwrap(), 3);
        assert_eq!(names(dir), tidy_names(3));
    });
}

#[test]
fn a_first_save_into_a_directory_that_is_not_there() {
    let attempt = |dir: &Path| save_over(&dir.join("a/step"));
    at_every_call(
        |_| (),
        attempt,
        |dir| {
            let dir = dir.join("a/step");
            if let Ok(found) = load(&dir) {
                assert_eq!(found, 2);
            }
            save(&dir, 3).unwrap();
            assert_eq!(load(&dir).unwrap(), 3);
            assert_eq!(names(&dir), tidy_names(3));
        },
    );
}

#[test]
fn finishing_an_interrupted_save() {
    // Allow all calls of the save except the last few, so that it fails while the new files are moved.
    let probe = scratch();
    let scenario = FailScenario::setup();
    save(probe.path(), 1).unwrap();
    let passes = calls(|| save_over(probe.path())) - 12;
    scenario.teardown();
    let interrupted = |dir: &Path| {
        save(dir, 1).unwrap();
        fail::cfg("ckpt.io", &format!("{passes}*off->return")).unwrap();
        save_over(dir).unwrap_err();
        fail::remove("ckpt.io");
        assert!(names(dir).contains(&".saving-2".into()));
        assert_eq!(load(dir).unwrap(), 2);
    };
    let finish = |dir: &Path| recover(dir).map(drop).map_err(Into::into);
    at_every_call(interrupted, finish, |dir| {
        assert_eq!(load(dir).unwrap(), 2);
        recover(dir).unwrap();
        assert_eq!(names(dir), tidy_names(2));
        assert_eq!(load(dir).unwrap(), 2);
    });
}

#[test]
fn pruning_and_publishing_the_hint() {
    let three = |dir: &Path| {
        for step in 1..4 {
            save(&dir.join(format!("step-{step}")), step).unwrap();
        }
    };
    let attempt = |dir: &Path| {
        publish_latest(&dir.join("step-3"))?;
        prune(dir, NonZeroUsize::MIN)?;
        Ok(())
    };
    at_every_call(three, attempt, |dir| {
        assert_eq!(latest(dir).unwrap().1.head.step, 3);
        assert_eq!(load(&dir.join("step-3")).unwrap(), 3);
        for one in list(dir).unwrap() {
            load(&one.path).unwrap();
        }
        attempt(dir).unwrap();
        // An empty directory may remain.
        for step in 1..3 {
            assert!(
                !dir.join(format!("step-{step}")).exists()
                    || names(&dir.join(format!("step-{step}"))).is_empty()
            );
        }
        assert!(!dir.join(".LATEST.tmp").exists());
    });
}

#[test]
fn replacing_a_file() {
    let old = |dir: &Path| {
        fs::write(dir.join("state"), "old").unwrap();
        // If the temporary file is a symbolic link, it must not be followed.
        fs::write(dir.join("target"), "another's").unwrap();
        symlink(dir.join("target"), dir.join(".state.tmp")).unwrap();
    };
    let attempt = |dir: &Path| Ok(replace_file(&dir.join("state"), b"new")?);
    at_every_call(old, attempt, |dir| {
        let found = fs::read(dir.join("state")).unwrap();
        assert!(found == b"old" || found == b"new", "{found:?}");
        attempt(dir).unwrap();
        assert_eq!(fs::read(dir.join("state")).unwrap(), b"new");
        assert_eq!(fs::read(dir.join("target")).unwrap(), b"another's");
        assert_eq!(names(dir), ["state", "target"]);
    });
    assert!(replace_file(Path::new("/"), b"").is_err());
}

#[test]
fn files_are_durable_before_the_manifest_and_the_manifest_before_old_files_are_removed() {
    let _scenario = FailScenario::setup();
    let dir = scratch();
    save(dir.path(), 1).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for point in ["synced", "before_manifest", "after_manifest", "mid_tidy"] {
        let seen = seen.clone();
        fail::cfg_callback(format!("ckpt.{point}"), move || seen.lock().unwrap().push(point)).unwrap();
    }
    save(dir.path(), 2).unwrap();
    let seen = seen.lock().unwrap();
    let parts: Vec<&[&str]> = seen.split(|point| *point != "synced").collect();
    // These are the syncs of the marker, the staging directory, three shards, the dense file and the
    // manifest, followed by those of both directories.
    assert_eq!(parts[0].len(), 9, "{seen:?}");
    // The directory with the manifest is synced when the manifest is published, and again before files are
    // moved.
    assert_eq!((parts[1].len(), parts[2].len()), (1, 1), "{seen:?}");
    // These are the syncs of the directory after the moves, of the staging directory after the removal of its
    // files, and of the directory without the staging directory.
    assert_eq!(parts.last().unwrap().len(), 3, "{seen:?}");
}

#[test]
fn short_reads_and_writes_are_continued() {
    let _scenario = FailScenario::setup();
    let dir = scratch();
    fail::cfg("ckpt.short", "return").unwrap();
    save(dir.path(), 1).unwrap();
    assert_eq!(load(dir.path()).unwrap(), 1);
    fail::remove("ckpt.short");
    assert_eq!(load(dir.path()).unwrap(), 1);
}
