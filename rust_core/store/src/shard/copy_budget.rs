//! [`CopyBudget`]: limits the memory for copies of rows, and makes training wait at the limit.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Counts the bytes of rows and admission counts that were copied for a snapshot, because they were about to
/// change before the snapshot was written.
pub(crate) struct CopyBudget {
    limit: u64,
    bytes: AtomicU64,
    lock: Mutex<()>,
    released: Condvar,
}

impl CopyBudget {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, bytes: AtomicU64::new(0), lock: Mutex::default(), released: Condvar::new() }
    }

    pub(super) fn charge(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn release(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        // Take the lock, so that a waiter between its check and its wait does not miss the notification.
        let _waiters_wait = self.lock.lock();
        self.released.notify_all();
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.limit
    }

    /// Wait until the budget has space, but no longer than `timeout`, so that a stalled disk slows training down but
    /// does not stop it.
    pub(crate) fn wait(&self, timeout: Duration) {
        if !self.is_full() {
            return;
        }
        let end = Instant::now() + timeout;
        let mut guard = self.lock.lock();
        while self.is_full() && !self.released.wait_until(&mut guard, end).timed_out() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn wait_ends_when_there_is_room_or_at_its_timeout() {
        let budget = CopyBudget::new(100);
        let start = Instant::now();
        budget.charge(99);
        budget.wait(LONG);
        budget.charge(50);
        std::thread::scope(|threads| {
            let waiting = threads.spawn(|| budget.wait(LONG));
            budget.release(49); // 100 bytes are still in use
            while !waiting.is_finished() && start.elapsed() < Duration::from_millis(200) {
                std::thread::yield_now();
            }
            assert!(!waiting.is_finished());
            budget.release(1);
        });
        assert!(start.elapsed() < LONG);
        budget.charge(1);
        budget.wait(Duration::from_millis(1));
    }
}
