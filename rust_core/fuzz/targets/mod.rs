//! What comes from outside and is parsed: a function for each, which libFuzzer and an ordinary test call alike.
//!
//! `check` of a module takes any bytes, panics where something does not hold that must, and says whether they were
//! accepted. `seeds` of it are made by the encoders of today, and are accepted. Where a format has checksums, `check` puts
//! the right ones in: nothing would come behind them otherwise.

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

/// A module's functions by its name, which is its corpus' too.
pub struct Target {
    /// As `make fuzz T=` takes it.
    pub name: &'static str,
    /// Whether these bytes are accepted.
    pub check: fn(&[u8]) -> bool,
    /// Bytes that are.
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

/// A directory in memory where there is one.
fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a directory can be made")
}
