//! [`Exit`]: the reason why a process ends, and its exit code.

/// The reason why a process could not start, or ended. The text includes the next step for the user, if it is
/// known.
#[derive(Debug, thiserror::Error)]
pub enum Exit {
    /// A flag, variable, configuration file, folder, address or certificate that cannot be used.
    #[error("{0}")]
    Usage(String),
    /// A peer does not respond.
    #[error("{0}")]
    Unreachable(String),
    /// A damaged file, or a checkpoint that is missing or damaged.
    #[error("{0}")]
    Corrupt(String),
    /// A token that is missing, cannot be read, or is refused.
    #[error("{0}")]
    Auth(String),
    /// A failure that a restart may resolve.
    #[error("{0}")]
    Again(String),
}

/// The exit code of a process whose event loop stalled.
pub const WATCHDOG: i32 = 70;

impl Exit {
    /// The exit code. All processes of a job use the same codes.
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
