//! [`Wait`]: what a call was waiting for when it timed out.

use std::fmt;

/// What a call waits for. Steps are those of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// A batch from the source.
    Batch,
    /// The look-up of a step.
    Lookup {
        /// The step that is looked up.
        step: u64,
    },
    /// The acknowledgement of a step's push.
    Push {
        /// The step whose gradients are pushed.
        step: u64,
    },
    /// The caller, which must push or drop the ticket of this step.
    Gradients {
        /// The step whose gradients are missing.
        step: u64,
    },
    /// The caller, which must call `next` for this step. Its look-up is complete.
    Taking {
        /// The step that was looked up.
        step: u64,
    },
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Batch => write!(f, "a batch from the source"),
            Self::Lookup { step } => write!(f, "the look-up of step {step}"),
            Self::Push { step } => write!(f, "the push of step {step} to be acknowledged"),
            Self::Gradients { step } => {
                write!(f, "the gradients of step {step} to be pushed, or its batch to be discarded")
            }
            Self::Taking { step } => {
                write!(f, "the data loader to take step {step}, or to be closed")
            }
        }
    }
}
