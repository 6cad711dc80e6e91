//! Tests that the committed code matches the proto files.
#![allow(clippy::unwrap_used, reason = "a test: a panic is its verdict")]

use std::fs;
use std::path::{Path, PathBuf};

use prost::Message;

/// The variable that makes the test rewrite the files instead of comparing them.
const WRITE: &str = "PERSIA_WRITE_GENERATED";
const COMMAND: &str = "PERSIA_WRITE_GENERATED=1 cargo test -p persia-wire --test generated";

fn crate_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The name below `src/generated` and the content of every generated file.
fn generate() -> Vec<(&'static str, Vec<u8>)> {
    let files = ["persia/v1/tables.proto", "persia/v1/feed.proto"];
    let descriptors = protox::compile(files, [crate_path("proto")]).unwrap();
    // Without source positions, the descriptors do not change when a comment changes.
    let mut bare = descriptors.clone();
    for file in &mut bare.file {
        file.source_code_info = None;
    }
    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure().bytes(".").out_dir(out.path()).compile_fds(descriptors).unwrap();
    let code = fs::read(out.path().join("persia.v1.rs")).unwrap();
    vec![("persia.v1.rs", code), ("persia.v1.bin", bare.encode_to_vec())]
}

#[test]
fn generated_code_is_that_of_the_proto_files() {
    for (name, fresh) in generate() {
        let path = crate_path("src/generated").join(name);
        if std::env::var_os(WRITE).is_some() {
            fs::write(&path, fresh).unwrap();
            continue;
        }
        let committed = fs::read(&path).unwrap_or_default();
        assert!(
            committed == fresh,
            "src/generated/{name} differs from what proto/ compiles to; run {COMMAND}"
        );
    }
}
