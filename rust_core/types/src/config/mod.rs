//! `embedding_config.yml`, `global_config.yml` and the features of `persia.yml`: parsed to a tree, then validated.
//!
//! All mistakes of a file are reported together, with their positions, the values that were found and what is allowed.
//! No I/O: the caller reads the file and passes its text and its name.
//!
//! * [`EmbeddingConfig`]: slots and the tables they share
//! * [`GlobalConfig`]: the job and its limits
//! * [`features`]: features and labels, and the embedding configuration that they imply
//! * [`ConfigErrors`]: all mistakes of one file
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
    /// The keys that are accepted without effect, one entry each.
    pub warnings: Vec<Finding>,
}
