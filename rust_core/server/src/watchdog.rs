//! The watchdog: a thread that ends the process if its event loop stalls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::exit;

const TICK: Duration = Duration::from_secs(1);
/// The number of ticks without progress of the event loop after which the process ends. Ticks are counted instead of
/// seconds, because a process that was suspended and resumed did not stall.
const MAX_STALLED_TICKS: u32 = 30;

/// Watch the event loop on which this is called, until the process ends.
///
/// # Errors
/// The thread cannot be started.
pub fn start() -> std::io::Result<()> {
    let beats = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&beats);
    std::thread::Builder::new().name("watchdog".into()).spawn(move || {
        watch(&seen, TICK, MAX_STALLED_TICKS);
        tracing::error!(
            "the event loop made no progress for {MAX_STALLED_TICKS} s: ending with exit code {}; if this \
             happens again, attach a debugger before the process ends, to see where it hangs",
            exit::WATCHDOG
        );
        std::process::exit(exit::WATCHDOG);
    })?;
    tokio::spawn(async move {
        let mut interval = tokio::time::interval(TICK);
        loop {
            interval.tick().await;
            beats.fetch_add(1, Ordering::Relaxed);
        }
    });
    Ok(())
}

/// Return once `beats` has not changed for `max_stalled` ticks.
fn watch(beats: &AtomicU64, tick: Duration, max_stalled: u32) {
    let (mut last, mut stalled) = (beats.load(Ordering::Relaxed), 0);
    while stalled < max_stalled {
        std::thread::sleep(tick);
        let now = beats.load(Ordering::Relaxed);
        stalled = if now == last { stalled + 1 } else { 0 };
        last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_returns_once_the_beats_end_and_not_before() {
        let beats = AtomicU64::new(0);
        let ended = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                watch(&beats, Duration::from_millis(50), 20);
                ended.store(beats.load(Ordering::Relaxed), Ordering::Relaxed);
            });
            for _ in 0..40 {
                std::thread::sleep(Duration::from_millis(5));
                beats.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert_eq!(ended.into_inner(), 40);
    }
}
