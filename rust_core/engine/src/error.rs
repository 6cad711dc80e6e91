//! Errors of the engine. An error that stops the engine is returned by every later call, so errors can be
//! cloned.

use std::sync::Arc;

use persia_types::TablesError;

use crate::device::DeviceError;

/// An error: the problem, its place, and the next step.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A batch without samples or id features.
    #[error("the batch is empty: {what}")]
    Empty {
        /// The part that is missing: samples or id features.
        what: &'static str,
    },
    /// Features, tensors and labels of different lengths.
    #[error("batch sizes differ: {}; each needs one entry per sample", list_sizes(.sizes))]
    UnequalBatchSizes {
        /// Every part of the batch with its number of samples.
        sizes: Vec<(String, usize)>,
    },
    /// Two parts with the same name.
    #[error("names used more than once in one batch: {}; give each {kind} its own", .names.join(", "))]
    DuplicateNames {
        /// The kind of the parts: id feature, dense tensor or label.
        kind: &'static str,
        /// The repeated names, each once.
        names: Vec<String>,
    },
    /// An id feature whose parts do not agree.
    #[error("id feature {feature:?}: {what}")]
    BadFeature {
        /// Its name.
        feature: String,
        /// The problem, and what was expected.
        what: String,
    },
    /// A tensor whose parts do not agree.
    #[error("{tensor}: {what}")]
    BadTensor {
        /// The kind of the tensor, dense tensor or label, and its name.
        tensor: String,
        /// The problem, and what was expected.
        what: String,
    },
    /// A size above a limit of `persia_types::limits`.
    #[error("{what}: {size} is above the limit of {limit}; use smaller batches")]
    TooLarge {
        /// The quantity that is too large.
        what: String,
        /// Found.
        size: usize,
        /// Allowed.
        limit: usize,
    },
    /// NaN or infinity in the input.
    #[error("{tensor}: {value} at row {row}, column {column}; clean the data or drop the sample")]
    NonFinite {
        /// The kind of the tensor, dense tensor or label, and its name.
        tensor: String,
        /// Sample.
        row: usize,
        /// The flattened position within the sample.
        column: usize,
        /// The value: NaN, inf or -inf.
        value: f64,
    },
    /// A label that is neither 0 nor 1.
    #[error("{tensor}: {value} at row {row}, column {column}; a binary label is 0 or 1")]
    LabelNotBinary {
        /// The label and its name.
        tensor: String,
        /// Sample.
        row: usize,
        /// The flattened position within the sample.
        column: usize,
        /// Found.
        value: f64,
    },
    /// Bytes that do not encode a valid batch.
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
        /// The features that are in the batch but not in the configuration.
        unknown: Vec<String>,
        /// The slots that are in the configuration but not in the batch.
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
        /// The step to which they were to be applied.
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
        /// The worker: look-up or push.
        worker: &'static str,
        /// The batch's step.
        step: u64,
        /// The cause, and the next step.
        source: DeviceError,
    },
    /// The source of batches failed.
    #[error("the source of batches failed: {0}")]
    Source(Arc<dyn std::error::Error + Send + Sync>),
    /// A bug: a worker thread panicked; the engine stops.
    #[error("the {worker} thread panicked at step {step}: {what}; this is a defect, please report it")]
    Panicked {
        /// The worker: look-up or push.
        worker: &'static str,
        /// The step.
        step: u64,
        /// The message of the panic.
        what: String,
    },
    /// A thread that could not be started.
    #[error("cannot start the {worker} thread: {source}")]
    Spawn {
        /// The worker: look-up or push.
        worker: &'static str,
        /// Why.
        source: Arc<std::io::Error>,
    },
    /// A pipeline or engine that is used after it was closed.
    #[error("{what} is closed: open a new one")]
    Closed {
        /// The closed object: pipeline or engine.
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
