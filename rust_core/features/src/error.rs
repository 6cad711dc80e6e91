//! The errors of data: all mistakes of a batch together.

use std::fmt;

/// One mistake in the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The name of the feature or label.
    pub feature: String,
    /// Its line in the file that declares it; 0 if it was not read from a file.
    pub line: usize,
    /// The row, counted from 0; None if it is about the column.
    pub row: Option<u64>,
    /// The column, the value that was found, what is allowed, and the next step.
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
    /// The mistakes, in the order of the features, then of the labels.
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

/// A transform that cannot be created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransformError {
    /// Values or types are not fitted.
    #[error("the features are not fitted: {}. Fit them over the training data, or give these in the file", .missing.join("; "))]
    Unfitted {
        /// Each feature with the values that it lacks.
        missing: Vec<String>,
    },
    /// The training data has no values to fit.
    #[error("nothing to fit: {}", .features.join("; "))]
    NothingToFit {
        /// Each feature with the reason.
        features: Vec<String>,
    },
    /// The features contradict each other, or need something that this build lacks.
    #[error("{what}")]
    Contradiction {
        /// The reason, and the next step.
        what: String,
    },
    /// The JSON is not a transform.
    #[error("not a transform: {what}")]
    Invalid {
        /// Why.
        what: String,
    },
    /// The transform was fitted for other features.
    #[error("the transform was fitted for other features: {}. Fit again in a new run, or restore the file", .differences.join("; "))]
    OtherFeatures {
        /// Each difference.
        differences: Vec<String>,
    },
}
