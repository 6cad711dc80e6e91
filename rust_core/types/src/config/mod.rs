//! `embedding_config.yml`, `global_config.yml` and the features of `persia.yml`: parsed to a tree, then validated.
//!
//! All errors in a file are reported together, each with its position, the value that was found and the allowed values.
//! This module does no I/O: the caller reads the file and passes its text and name.
//!
//! * [`EmbeddingConfig`]: slots and their tables
//! * [`GlobalConfig`]: the job and its limits
//! * [`features`]: features, labels, and the embedding configuration that the features imply
//! * [`ConfigErrors`]: all errors in one file
//!
//! `later.rs` lists the settings of PersiaML's files that this version does not support yet.

mod embedding;
mod error;
pub mod features;
mod global;
mod groups;
mod later;
mod number;
mod reader;
mod settings;
mod tree;

#[cfg(test)]
mod tests;

pub use embedding::EmbeddingConfig;
pub use error::{ConfigErrors, Finding};
pub use global::{GlobalConfig, InferConfig, LogSync};
pub use reader::nearest;
pub use tree::{MAX_CONFIG_BYTES, MAX_CONFIG_DEPTH, MAX_CONFIG_NODES};

/// A valid configuration, with warnings.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed<T> {
    /// The configuration.
    pub config: T,
    /// One entry for each key that is accepted but has no effect.
    pub warnings: Vec<Finding>,
}
