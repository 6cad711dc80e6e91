//! Errors of the engine. An error that stops the engine is returned by every later call, so errors can be
//! cloned.

use std::sync::Arc;

use persia_types::TablesError;

use crate::device::DeviceError;

/// What failed, where, and what to do next.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A batch without samples or id features.
    #[error("the batch is empty: {what}")]
    Empty {
        /// No samples, or no id features.
        what: &'static str,
    },
    /// Features, tensors and labels of different lengths.
    #[error("batch sizes differ: {}; each needs one entry per sample", list_sizes(.sizes))]
    UnequalBatchSizes {
        /// Every part of the batch and its number of samples.
        sizes: Vec<(String, usize)>,
    },
    /// Two parts of one name.
    #[error("names used more than once in one batch: {}; give each {kind} its own", .names.join(", "))]
    DuplicateNames {
        /// Id feature, dense tensor or label.
        kind: &'static str,
        /// Each name once.
        names: Vec<String>,
    },
    /// An id feature that contradicts itself.
    #[error("id feature {feature:?}: {what}")]
    BadFeature {
        /// Its name.
        feature: String,
        /// The problem, and what was expected.
        what: String,
    },
    /// A tensor that contradicts itself.
    #[error("{tensor}: {what}")]
    BadTensor {
        /// Dense tensor or label, and its name.
        tensor: String,
        /// The problem, and what was expected.
        what: String,
    },
    /// Beyond a limit of `persia_types::limits`.
    #[error("{what}: {size} is above the limit of {limit}; use smaller batches")]
    TooLarge {
        /// The name of the number.
        what: String,
        /// Found.
        size: usize,
        /// Allowed.
        limit: usize,
    },
    /// NaN or infinity in the input.
    #[error("{tensor}: {value} at row {row}, column {column}; clean the data or drop the sample")]
    NonFinite {
        /// Dense tensor or label, and its name.
        tensor: String,
        /// Sample.
        row: usize,
        /// Place inside the sample, flattened.
        column: usize,
        /// NaN, inf or -inf.
        value: f64,
    },
    /// A label that is neither 0 nor 1.
    #[error("{tensor}: {value} at row {row}, column {column}; a binary label is 0 or 1")]
    LabelNotBinary {
        /// The label and its name.
        tensor: String,
        /// Sample.
        row: usize,
        /// Place inside the sample, flattened.
        column: usize,
        /// Found.
        value: f64,
    },
    /// Bytes that are not a batch.
    #[error("not a valid batch at byte {at}: {what}; send it again")]
    BadBytes {
        /// The position at which reading stopped.
        at: usize,
        /// The content that was found, and what was expected.
        what: String,
    },
    /// Features and slots that do not match.
    #[error("{}", describe_mismatch(.unknown, .missing, .known))]
    FeatureMismatch {
        /// In the batch, not in the configuration.
        unknown: Vec<String>,
        /// In the configuration, not in the batch.
        missing: Vec<String>,
        /// Every slot of the configuration.
        known: Vec<String>,
    },
    /// An option out of its range.
    #[error("{option}: {what}")]
    BadOption {
        /// Its name.
        option: &'static str,
        /// The value, and what is allowed.
        what: String,
    },
    /// Gradients that do not fit the batch.
    #[error("gradients of step {step}: {what}")]
    BadGradient {
        /// The step they were meant for.
        step: u64,
        /// The feature, and what was expected.
        what: String,
    },
    /// A look-up that failed; the engine stops.
    #[error("look-up of step {step} failed: {source}")]
    Lookup {
        /// The batch's step.
        step: u64,
        /// Why.
        source: Arc<TablesError>,
    },
    /// A push that failed; its gradients are not applied and the engine stops.
    #[error("push of step {step} failed, its gradients are not applied: {source}")]
    Push {
        /// The batch's step.
        step: u64,
        /// Why.
        source: Arc<TablesError>,
    },
    /// A device that could not pool a look-up, or sum gradients; the engine stops.
    #[error("{worker} of step {step} failed: {source}")]
    Device {
        /// Look-up or push.
        worker: &'static str,
        /// The batch's step.
        step: u64,
        /// Why, and what to do.
        source: DeviceError,
    },
    /// The source of batches failed.
    #[error("the source of batches failed: {0}")]
    Source(Arc<dyn std::error::Error + Send + Sync>),
    /// A bug: a worker thread panicked; the engine stops.
    #[error("the {worker} thread panicked at step {step}: {what}; this is a defect, please report it")]
    Panicked {
        /// Look-up or push.
        worker: &'static str,
        /// The step.
        step: u64,
        /// The panic's message.
        what: String,
    },
    /// A thread that could not be started.
    #[error("cannot start the {worker} thread: {source}")]
    Spawn {
        /// Look-up or push.
        worker: &'static str,
        /// Why.
        source: Arc<std::io::Error>,
    },
    /// Used after it was closed.
    #[error("{what} is closed: open a new one")]
    Closed {
        /// Pipeline or engine.
        what: &'static str,
    },
}

fn list_sizes(sizes: &[(String, usize)]) -> String {
    sizes.iter().map(|(name, size)| format!("{name} has {size}")).collect::<Vec<_>>().join(", ")
}

fn describe_mismatch(unknown: &[String], missing: &[String], known: &[String]) -> String {
    let mut parts = Vec::new();
    if !unknown.is_empty() {
        parts.push(format!("id features without a slot: {}", unknown.join(", ")));
    }
    if !missing.is_empty() {
        parts.push(format!("slots without an id feature: {}", missing.join(", ")));
    }
    format!(
        "the batch does not fit embedding_config.yml: {}; the slots are {}",
        parts.join("; "),
        known.join(", ")
    )
}
