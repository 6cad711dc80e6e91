//! The errors in data, which are reported together for a batch, and those of transforms.

use std::fmt;

/// One error in the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The name of the feature or label.
    pub feature: String,
    /// The line of the feature or label in the file that declares it; 0 if it was not read from a file.
    pub line: usize,
    /// The row, counted from 0; None if the error concerns the whole column.
    pub row: Option<u64>,
    /// The problem. As far as they apply, it includes the column, the value that was found, the allowed
    /// values, and what to do.
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

/// All errors in one batch of data. The list is never empty.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct DataErrors {
    /// The errors, in the order of the features, followed by those of the labels.
    pub mistakes: Vec<Mistake>,
}

impl fmt::Display for DataErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.mistakes.len();
        let noun = if count == 1 { "error" } else { "errors" };
        write!(f, "the data does not fit the features: {count} {noun}")?;
        for mistake in &self.mistakes {
            write!(f, "\n  {mistake}")?;
        }
        Ok(())
    }
}

/// A transform cannot be created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransformError {
    /// Values or types are not fitted.
    #[error("the features are not fitted: {}. Fit them on the training data, or set the values in the file", .missing.join("; "))]
    Unfitted {
        /// The features, each with the values that it lacks.
        missing: Vec<String>,
    },
    /// The training data has no values to fit.
    #[error("nothing to fit: {}", .features.join("; "))]
    NothingToFit {
        /// The features, each with the reason.
        features: Vec<String>,
    },
    /// The features contradict each other, or need something that this build lacks.
    #[error("{what}")]
    Contradiction {
        /// The reason, and what to do.
        what: String,
    },
    /// The JSON is not a valid transform.
    #[error("cannot read the transform: {what}")]
    Invalid {
        /// The reason.
        what: String,
    },
    /// The transform was fitted for other features.
    #[error("the transform was fitted for other features: {}. Restore the features of the transform in the configuration, or fit again in a new run", .differences.join("; "))]
    OtherFeatures {
        /// The differences between the two sets of features.
        differences: Vec<String>,
    },
}
