//! [`Copies`]: how much is copied for a cut, and whoever waits until it is less.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// What is copied because it changed behind a cut and is not written yet.
pub(crate) struct Copies {
    limit: u64,
    bytes: AtomicU64,
    lock: Mutex<()>,
    less: Condvar,
}

impl Copies {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, bytes: AtomicU64::new(0), lock: Mutex::default(), less: Condvar::new() }
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        let _no_one_is_about_to_wait = self.lock.lock();
        self.less.notify_all();
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.limit
    }

    /// Return when less than the limit is copied, at the latest after `patience`: a disk that stands still may slow training
    /// down, but not hold it up.
    pub(crate) fn wait(&self, patience: Duration) {
        if !self.is_full() {
            return;
        }
        let end = Instant::now() + patience;
        let mut guard = self.lock.lock();
        while self.is_full() && !self.less.wait_until(&mut guard, end).timed_out() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn who_would_copy_more_than_is_allowed_waits_for_room_or_until_its_patience_ends() {
        let copies = Copies::new(100);
        let start = Instant::now();
        copies.add(99);
        copies.wait(LONG);
        copies.add(50);
        std::thread::scope(|threads| {
            let waiting = threads.spawn(|| copies.wait(LONG));
            copies.remove(49); // still 100
            while !waiting.is_finished() && start.elapsed() < Duration::from_millis(200) {
                std::thread::yield_now();
            }
            assert!(!waiting.is_finished());
            copies.remove(1);
        });
        assert!(start.elapsed() < LONG);
        copies.add(1);
        copies.wait(Duration::from_millis(1));
    }
}
