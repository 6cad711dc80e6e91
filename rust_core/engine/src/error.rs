//! The errors of the engine. Every later call returns the error that stopped the engine, so errors can be
//! cloned.

use std::sync::Arc;

use persia_types::TablesError;

use crate::device::DeviceError;

/// An error of the engine. Its message states the problem and, as far as they are known, the location and
/// what to do.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A batch has no samples or no id features.
    #[error("the batch is empty: {what}")]
    Empty {
        /// What is missing: samples or id features.
        what: &'static str,
    },
    /// The parts of a batch have different numbers of samples.
    #[error("batch sizes differ: {}; each needs one entry per sample", list_sizes(.sizes))]
    UnequalBatchSizes {
        /// All parts of the batch, each with its number of samples.
        sizes: Vec<(String, usize)>,
    },
    /// Two parts of a batch have the same name.
    #[error("names used more than once in one batch: {}; use a different name for each {kind}", .names.join(", "))]
    DuplicateNames {
        /// The kind of the parts: id feature, dense tensor or label.
        kind: &'static str,
        /// The repeated names, each once.
        names: Vec<String>,
    },
    /// An id feature is invalid: its name, its offsets, its weights, or its use in its slot.
    #[error("id feature {feature:?}: {what}")]
    BadFeature {
        /// The name of the feature.
        feature: String,
        /// The problem, and what was expected.
        what: String,
    },
    /// A tensor is invalid: its name, its shape or its bytes.
    #[error("{tensor}: {what}")]
    BadTensor {
        /// The tensor, with its name if it has one.
        tensor: String,
        /// The problem, and what was expected.
        what: String,
    },
    /// A size exceeds a limit of `persia_types::limits`.
    #[error("{what}: {size} is above the limit of {limit}; put less into one batch")]
    TooLarge {
        /// What is too large.
        what: String,
        /// The size that was found.
        size: usize,
        /// The limit that the size exceeds.
        limit: usize,
    },
    /// The input contains NaN or infinity.
    #[error("{tensor}: {value} at row {row}, column {column}; clean the data or drop the sample")]
    NonFinite {
        /// The kind of the tensor (dense tensor or label), with its name or, if it has none, its index.
        tensor: String,
        /// The index of the sample.
        row: usize,
        /// The position in the flattened sample.
        column: usize,
        /// The value: NaN, inf or -inf.
        value: f64,
    },
    /// A label is neither 0 nor 1.
    #[error("{tensor}: {value} at row {row}, column {column}; a binary label is 0 or 1")]
    LabelNotBinary {
        /// The label, with its name or, if it has none, its index.
        tensor: String,
        /// The index of the sample.
        row: usize,
        /// The position in the flattened sample.
        column: usize,
        /// The value of the label.
        value: f64,
    },
    /// The bytes do not encode a valid batch.
    #[error("cannot decode the batch at byte {at}: {what}")]
    BadBytes {
        /// The position at which reading stopped.
        at: usize,
        /// What was found, and what was expected.
        what: String,
    },
    /// Features and slots do not match.
    #[error("{}", describe_mismatch(.unknown, .missing, .known))]
    FeatureMismatch {
        /// The features that are in the batch but not in the configuration.
        unknown: Vec<String>,
        /// The slots that are in the configuration but not in the batch.
        missing: Vec<String>,
        /// All slots of the configuration.
        known: Vec<String>,
    },
    /// An option is out of range.
    #[error("{option} {what}")]
    BadOption {
        /// The name of the option.
        option: &'static str,
        /// The value and the allowed values, as the text that follows the name.
        what: String,
    },
    /// Gradients do not fit the batch.
    #[error("gradients of step {step}: {what}")]
    BadGradient {
        /// The step of the gradients.
        step: u64,
        /// The feature, and what was expected.
        what: String,
    },
    /// A look-up failed. In a pipeline, this stops the engine.
    #[error("look-up of step {step} failed: {source}")]
    Lookup {
        /// The batch's step.
        step: u64,
        /// The cause.
        source: Arc<TablesError>,
    },
    /// A push failed, and the engine stops. If a reply was lost, the gradients may be applied on some or all servers.
    #[error("push of step {step} failed, and its gradients may be lost: {source}")]
    Push {
        /// The batch's step.
        step: u64,
        /// The cause.
        source: Arc<TablesError>,
    },
    /// A device could not pool a look-up or sum gradients. In a pipeline, this stops the engine.
    #[error("{worker} of step {step} failed: {source}")]
    Device {
        /// The worker: look-up or push.
        worker: &'static str,
        /// The batch's step.
        step: u64,
        /// The cause, and what to do.
        source: DeviceError,
    },
    /// The source of batches failed.
    #[error("the source of batches failed: {0}")]
    Source(Arc<dyn std::error::Error + Send + Sync>),
    /// A look-up or a push panicked, which is a bug. In a pipeline, this stops the pipeline or the engine.
    #[error("{worker} of step {step} panicked: {what}; this is a bug: please report it")]
    Panicked {
        /// The worker: look-up or push.
        worker: &'static str,
        /// The step of the look-up or push.
        step: u64,
        /// The message of the panic.
        what: String,
    },
    /// A thread could not be started.
    #[error("cannot start the {worker} thread: {source}")]
    Spawn {
        /// The worker: look-up or push.
        worker: &'static str,
        /// The cause.
        source: Arc<std::io::Error>,
    },
    /// A pipeline or engine was used after it was closed.
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
    let absent = match missing {
        [] => String::new(),
        _ => format!(" (not in the batch: {})", missing.join(", ")),
    };
    format!(
        "the batch has id features without a slot: {}; the slots are {}{absent}; rename the features, or add slots",
        unknown.join(", "),
        known.join(", ")
    )
}
