//! Fuzz targets: one module for each format of untrusted input. Both libFuzzer and an ordinary test call them.
//!
//! `check` takes any bytes, panics if an invariant is violated, and returns whether the bytes were accepted. It
//! corrects checksums, because otherwise no mutated input would be accepted. `seeds` are accepted inputs, which the
//! encoders create.

#![allow(unreachable_pub, reason = "also the root of a library")]

pub mod batch;
pub mod config;
pub mod log;
pub mod manifest;
pub mod memory;
pub mod shard;
pub mod wire;

use std::path::Path;

use tempfile::TempDir;

/// A fuzz target. The folder of its corpus has the same name.
pub struct Target {
    /// The name that `make fuzz T=` accepts.
    pub name: &'static str,
    /// Checks an input. Returns whether it is accepted.
    pub check: fn(&[u8]) -> bool,
    /// Returns inputs that `check` accepts.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All fuzz targets.
pub const ALL: [Target; 6] = [
    Target { name: "batch", check: batch::check, seeds: batch::seeds },
    Target { name: "config", check: config::check, seeds: config::seeds },
    Target { name: "log", check: log::check, seeds: log::seeds },
    Target { name: "manifest", check: manifest::check, seeds: manifest::seeds },
    Target { name: "shard", check: shard::check, seeds: shard::seeds },
    Target { name: "wire", check: wire::check, seeds: wire::seeds },
];

/// A directory in a file system in memory, if there is one.
fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a directory can be made")
}
