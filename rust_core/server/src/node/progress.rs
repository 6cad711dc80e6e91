//! [`RecoveryProgress`]: how much of its log and checkpoint a server has read.

use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of files and of the log that a recovery has read, and all bytes that it reads.
#[derive(Debug, Default)]
pub struct RecoveryProgress {
    done: AtomicU64,
    total: AtomicU64,
}

impl RecoveryProgress {
    /// Bytes read, and bytes to read; 0 before the recovery has begun.
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Set the number of bytes that the recovery reads.
    pub fn expect(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
    }

    /// Add bytes that were read.
    pub fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}
