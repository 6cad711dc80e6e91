//! Cancellation of transfers. A transfer writes a snapshot to files or reads files into rows.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use persia_types::TablesError;

use crate::store::Store;

/// The number of cancellations so far.
#[derive(Default)]
pub(super) struct Cancellations(AtomicU64);

/// Identifies the start of a transfer. Any later cancellation ends the transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferStart(u64);

impl Store {
    /// Start a transfer.
    pub fn start_transfer(&self) -> TransferStart {
        TransferStart(self.cancellations.0.load(Ordering::SeqCst))
    }

    /// Cancel the transfers that have started. Call this when no process needs their results any more. Each ends
    /// with an error at its next check. This call does not wait for them.
    pub fn cancel_transfers(&self) {
        self.cancellations.0.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn is_cancelled(&self, start: TransferStart) -> bool {
        self.start_transfer() != start
    }

    /// # Errors
    /// `Other` if the transfer has been cancelled.
    pub(super) fn check_transfer(&self, start: TransferStart) -> io::Result<()> {
        if self.is_cancelled(start) {
            return Err(io::Error::other(
                "the transfer was cancelled, because another run has begun or the snapshot was aborted",
            ));
        }
        Ok(())
    }

    pub(super) fn cancelled_at(dir: &Path, source: io::Error) -> TablesError {
        TablesError::Io { path: dir.to_owned(), source }
    }
}
