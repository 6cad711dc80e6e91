//! Mistakes of a configuration file, and their places.

use std::fmt;

/// One mistake, or one warning, and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Counted from 1.
    pub line: usize,
    /// Counted from 1.
    pub column: usize,
    /// Key path such as `slots_config.age.dim`; empty if the text is not YAML.
    pub path: String,
    /// The value found, the allowed values, and what to do next.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: ", self.line, self.column)?;
        if !self.path.is_empty() {
            // A key in quotes may hold any character.
            write!(f, "{}: ", self.path.escape_debug())?;
        }
        f.write_str(&self.message)
    }
}

/// All mistakes of one file, in the order of its lines. Never empty.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ConfigErrors {
    /// The file's name, as the caller gave it.
    pub file: String,
    /// The mistakes.
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
