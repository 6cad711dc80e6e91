//! The allowed content of configuration files, and the messages about mistakes.

mod embedding;
mod global;
mod properties;
mod settings;
mod syntax;

use super::{ConfigErrors, Parsed};

/// The messages about a wrong file, one per line.
pub(super) fn said<T: std::fmt::Debug>(result: Result<Parsed<T>, ConfigErrors>) -> Vec<String> {
    result.unwrap_err().errors.iter().map(ToString::to_string).collect()
}
