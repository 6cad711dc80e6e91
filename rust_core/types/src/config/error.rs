//! Errors in a configuration file, and their positions.

use std::fmt;

/// One error, or one warning, and its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The line, counted from 1.
    pub line: usize,
    /// The column, counted from 1.
    pub column: usize,
    /// The path of the key, such as `slots_config.age.dim`; empty for an error of the whole file or
    /// of its syntax.
    pub path: String,
    /// The problem. As far as they apply, it includes the value that was found, the allowed values, and what
    /// to do next.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: ", self.line, self.column)?;
        if !self.path.is_empty() {
            // A quoted key may contain any character.
            write!(f, "{}: ", self.path.escape_debug())?;
        }
        f.write_str(&self.message)
    }
}

/// All errors of one file, in the order of its lines, or the first syntax error. The list is never empty.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ConfigErrors {
    /// The file's name, as the caller gave it.
    pub file: String,
    /// The errors.
    pub errors: Vec<Finding>,
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.errors.len();
        write!(f, "{}: {count} {}", self.file, if count == 1 { "error" } else { "errors" })?;
        for error in &self.errors {
            write!(f, "\n  {error}")?;
        }
        Ok(())
    }
}
