//! Tests that a process that ends at any point of a save leaves either the complete old checkpoint or the
//! complete new one.
//!
//! The tests run themselves as a child process, which saves one step after another into the same directory and prints
//! the committed steps.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod commit_sample;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use commit_sample::{load, names, save, tidy_names};
use fail::FailScenario;
use persia_store::checkpoint::{CRASH_EXIT, latest, publish_latest, recover};

const DIR: &str = "PERSIA_TEST_CRASH_DIR";
const FIRST: &str = "PERSIA_TEST_CRASH_FIRST";
const COMMITTED: &str = "committed ";

/// This is not a test, but the child process that the tests start.
#[test]
#[ignore = "the child process of the tests here"]
fn child() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let first: u64 = std::env::var(FIRST).unwrap().parse().unwrap();
    let _scenario = FailScenario::setup();
    for step in first.. {
        save(Path::new(&dir), step).unwrap();
        println!("{COMMITTED}{step}");
        publish_latest(Path::new(&dir)).unwrap();
    }
}

fn spawn(dir: &Path, first: u64, failpoints: &str) -> (Child, BufReader<ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env(DIR, dir)
        .env(FIRST, first.to_string())
        .env("FAILPOINTS", failpoints)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

/// The last step that the ended child printed.
fn last_committed(output: BufReader<ChildStdout>) -> Option<u64> {
    let lines = output.lines().map(Result::unwrap);
    lines.filter_map(|line| Some(line.split_once(COMMITTED)?.1.parse().unwrap())).last()
}

/// Check that `dir` contains a checkpoint of one of these steps, and that more checkpoints can be saved
/// there.
fn check(dir: &Path, steps: std::ops::RangeInclusive<u64>) -> u64 {
    let found = load(dir).unwrap();
    assert!(steps.contains(&found), "step {found}, expected {steps:?}");
    assert_eq!(recover(dir).unwrap().unwrap().head.step, found);
    assert_eq!(names(dir), tidy_names(found));
    assert_eq!(load(dir).unwrap(), found);
    found
}

#[test]
fn ended_at_each_point_of_the_commit_order() {
    // Each entry: the crash point, how often it is passed before the process ends there, and the step that must be
    // found. Step 10 has been saved, and step 11 is being saved.
    let points: [(&str, &[usize], u64); 7] = [
        ("ckpt.mid_shard", &[0, 2, 5], 10),
        ("ckpt.mid_dense", &[0], 10),
        ("ckpt.after_sync", &[0], 10),
        ("ckpt.before_manifest", &[0], 10),
        ("ckpt.after_manifest", &[0], 11),
        ("ckpt.mid_tidy", &[0, 1, 3], 11),
        ("ckpt.before_replace", &[0], 11),
    ];
    for (point, passes, expected) in points {
        for pass in passes {
            let parent = tempfile::tempdir().unwrap();
            let dir = parent.path().join("step");
            save(&dir, 10).unwrap();
            publish_latest(&dir).unwrap();
            let (mut child, output) = spawn(&dir, 11, &format!("{point}={pass}*off->return"));
            last_committed(output);
            assert_eq!(child.wait().unwrap().code(), Some(CRASH_EXIT), "{point} was not reached");
            assert_eq!(latest(parent.path()).unwrap().1.head.step, expected, "{point}");
            check(&dir, expected..=expected);
            save(&dir, 12).unwrap();
            publish_latest(&dir).unwrap();
            assert_eq!(check(&dir, 12..=12), 12);
        }
    }
}

#[test]
fn killed_at_random_moments() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("step");
    save(&dir, 1).unwrap();
    let mut found = 1;
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    for round in 0..60 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (mut child, mut output) = spawn(&dir, found + 1, "");
        // Let the child commit once, so that it is killed during a save and not while it starts.
        let mut line = String::new();
        while !line.contains(COMMITTED) {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "round {round}: the child ended by itself");
        }
        let first = found + 1;
        std::thread::sleep(Duration::from_micros(seed >> 40 & 0xffff));
        child.kill().unwrap();
        child.wait().unwrap();
        let committed = last_committed(output).unwrap_or(first);
        found = check(&dir, committed..=committed + 1);
    }
}
