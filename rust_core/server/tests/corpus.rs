//! Runs the corpus of `rust_core/fuzz` (output of the encoders, and findings of fuzzing) through its targets without
//! libFuzzer.
//!
//! `cargo test -p persia-embedding-sharded-server --test corpus -- --ignored` rewrites the files `valid-*`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics when it fails")]

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

#[path = "../../fuzz/targets/mod.rs"]
mod targets;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

#[test]
fn every_file_of_the_corpus_passes_and_valid_ones_are_accepted() {
    for target in targets::ALL {
        let mut files: Vec<PathBuf> =
            fs::read_dir(corpus(target.name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let mut valid = 0;
        for file in files {
            let data = fs::read(&file).unwrap();
            let accepted = catch_unwind(|| (target.check)(&data));
            let accepted = accepted.unwrap_or_else(|_| panic!("{} shows a bug", file.display()));
            if file.file_name().unwrap().to_str().unwrap().starts_with("valid-") {
                assert!(accepted, "{} is refused", file.display());
                valid += 1;
            }
        }
        assert_eq!(valid, (target.seeds)().len(), "{}", target.name);
    }
}

#[test]
fn encoded_inputs_are_accepted_and_an_empty_one_is_refused() {
    for target in targets::ALL {
        for (number, seed) in (target.seeds)().into_iter().enumerate() {
            assert!((target.check)(&seed), "{} {number}", target.name);
        }
        assert!(!(target.check)(&[]), "{}", target.name);
    }
}

#[test]
#[ignore = "writes files of the corpus"]
fn seeds_are_written() {
    for target in targets::ALL {
        fs::create_dir_all(corpus(target.name)).unwrap();
        for (number, seed) in (target.seeds)().into_iter().enumerate() {
            fs::write(corpus(target.name).join(format!("valid-{number}")), seed).unwrap();
        }
    }
}
