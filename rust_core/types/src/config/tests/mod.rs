//! Tests of the allowed content of configuration files, and of the messages about errors.

mod embedding;
mod global;
mod properties;
mod settings;
mod syntax;

use super::{ConfigErrors, Parsed};

/// The error messages for a wrong file, one per element.
pub(super) fn said<T: std::fmt::Debug>(result: Result<Parsed<T>, ConfigErrors>) -> Vec<String> {
    result.unwrap_err().errors.iter().map(ToString::to_string).collect()
}
