//! What a person can write into a configuration file, and what is said about it.

mod embedding;
mod global;
mod properties;
mod settings;
mod syntax;

use super::{ConfigErrors, Parsed};

/// What is said about a wrong file, a line each.
fn said<T: std::fmt::Debug>(result: Result<Parsed<T>, ConfigErrors>) -> Vec<String> {
    result.unwrap_err().errors.iter().map(ToString::to_string).collect()
}
