//! Mistakes of data, all together.

use std::fmt;

/// One mistake of the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The feature or label.
    pub feature: String,
    /// Its line in the file that declares it; 0 if it was not read from one.
    pub line: usize,
    /// The row, counted from 0; None if it is about the column.
    pub row: Option<u64>,
    /// Column, what was found, what is allowed, and what to do.
    pub message: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.feature)?;
        if self.line > 0 {
            write!(f, " (line {})", self.line)?;
        }
        if let Some(row) = self.row {
            write!(f, ", row {row}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// All mistakes of one batch of data. Never empty.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct DataErrors {
    /// In the order of the features, then of the labels.
    pub mistakes: Vec<Mistake>,
}

impl fmt::Display for DataErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.mistakes.len();
        let noun = if count == 1 { "mistake" } else { "mistakes" };
        write!(f, "the data does not fit the features: {count} {noun}")?;
        for mistake in &self.mistakes {
            write!(f, "\n  {mistake}")?;
        }
        Ok(())
    }
}

/// A transform that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransformError {
    /// Numbers or types are not fitted.
    #[error("the features are not fitted: {}. Fit them over the training data, or give these in the file", .missing.join("; "))]
    Unfitted {
        /// Feature and what it lacks, each.
        missing: Vec<String>,
    },
    /// The training data has no number to fit.
    #[error("nothing to fit: {}", .features.join("; "))]
    NothingToFit {
        /// Feature and why, each.
        features: Vec<String>,
    },
    /// The features contradict each other, or this build.
    #[error("{what}")]
    Contradiction {
        /// Why, and what to do.
        what: String,
    },
    /// The text is not a transform.
    #[error("not a transform: {what}")]
    Invalid {
        /// Why.
        what: String,
    },
    /// The numbers were fitted for other features.
    #[error("the transform was fitted for other features: {}. Fit again in a new run, or restore the file", .differences.join("; "))]
    OtherFeatures {
        /// Each difference.
        differences: Vec<String>,
    },
}
