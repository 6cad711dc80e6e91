//! [`Exit`]: why a process ends, and the code it ends with.

/// Why a process could not start, or did not go on. Its text is one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Exit {
    /// A flag, a variable or a file of the configuration.
    #[error("{0}")]
    Usage(String),
    /// A peer that does not answer.
    #[error("{0}")]
    Unreachable(String),
    /// A file that is not what it should be.
    #[error("{0}")]
    Corrupt(String),
    /// No token, or one that is not accepted.
    #[error("{0}")]
    Auth(String),
    /// Something that may be gone at the next start.
    #[error("{0}")]
    Again(String),
}

/// The code of a process whose event loop stood still.
pub const WATCHDOG: i32 = 70;

impl Exit {
    /// The exit code; the same in every process of a job.
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Unreachable(_) => 3,
            Self::Corrupt(_) => 4,
            Self::Auth(_) => 5,
            Self::Again(_) => 75,
        }
    }
}
