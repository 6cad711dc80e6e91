//! Fuzz targets: one module for each format of untrusted input, called by libFuzzer and by an ordinary test.
//!
//! `check` takes any bytes, panics if an invariant is violated, and returns whether the bytes were accepted. `seeds` are
//! accepted inputs, made by the encoders. `check` corrects checksums: otherwise no input would pass them.

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

/// A target; its corpus has its name.
pub struct Target {
    /// The name that `make fuzz T=` accepts.
    pub name: &'static str,
    /// Checks bytes, and returns whether they are accepted.
    pub check: fn(&[u8]) -> bool,
    /// Accepted bytes.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Every target.
pub const ALL: [Target; 6] = [
    Target { name: "batch", check: batch::check, seeds: batch::seeds },
    Target { name: "config", check: config::check, seeds: config::seeds },
    Target { name: "log", check: log::check, seeds: log::seeds },
    Target { name: "manifest", check: manifest::check, seeds: manifest::seeds },
    Target { name: "shard", check: shard::check, seeds: shard::seeds },
    Target { name: "wire", check: wire::check, seeds: wire::seeds },
];

/// A directory in memory, if the system has one.
fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a directory can be made")
}
