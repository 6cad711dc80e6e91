//! The watchdog: a thread that ends the process when its event loop stands still.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::exit;

const TICK: Duration = Duration::from_secs(1);
/// Ticks without a beat of the event loop. Ticks are counted and not seconds: a process that was stopped and goes
/// on did not stand still.
const PATIENCE: u32 = 30;

/// Watch the event loop this is called on, as long as the process lives.
///
/// # Errors
/// The thread could not be started.
pub fn start() -> std::io::Result<()> {
    let beats = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&beats);
    std::thread::Builder::new().name("watchdog".into()).spawn(move || {
        watch(&seen, TICK, PATIENCE);
        tracing::error!(
            "the event loop was not polled for {PATIENCE} s: ending, exit code {}; a debugger attached before that \
             shows where it stands",
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

/// Return when `beats` stood still for `patience` ticks.
fn watch(beats: &AtomicU64, tick: Duration, patience: u32) {
    let (mut last, mut still) = (beats.load(Ordering::Relaxed), 0);
    while still < patience {
        std::thread::sleep(tick);
        let now = beats.load(Ordering::Relaxed);
        still = if now == last { still + 1 } else { 0 };
        last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_barks_when_beats_end_and_not_before() {
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
