//! [`RecoveryProgress`]: how much of its checkpoint and its log a server has read.

use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of files and of the log that a recovery has read, and the total that it will read.
#[derive(Debug, Default)]
pub struct RecoveryProgress {
    done: AtomicU64,
    total: AtomicU64,
}

impl RecoveryProgress {
    /// The number of bytes read, and the total number of bytes to read. Both are 0 before the recovery has
    /// begun.
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Set the total number of bytes that the recovery will read.
    pub fn expect(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
    }

    /// Add bytes that were read.
    pub fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}
