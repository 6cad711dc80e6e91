//! [`WriteThrottle`]: leaves processors and memory bandwidth to training while a snapshot is written.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// While training makes progress, each writing thread pauses after its work for a multiple of the processor
/// time that the work took. The multiple is chosen such that all writing threads together use about half a
/// processor for every four processors. A snapshot takes memory bandwidth from training in proportion to the
/// processor time that it uses, not to the time that it waits for a disk.
pub(super) struct WriteThrottle<T> {
    trained: T,
    pauses_per_work: u32,
    state: Mutex<State>,
    lifted: Condvar,
}

struct State {
    trained: Option<u64>,
    /// The time at which progress was last observed.
    progress: Option<Instant>,
    is_lifted: bool,
}

impl<T: Fn() -> Option<u64>> WriteThrottle<T> {
    /// Create a throttle. `trained` returns a number that grows with training. While it returns None, there
    /// are no pauses.
    pub(super) fn new(threads: usize, trained: T) -> Self {
        let state = State { trained: trained(), progress: None, is_lifted: false };
        Self {
            trained,
            pauses_per_work: pauses_per_work(threads),
            state: Mutex::new(state),
            lifted: Condvar::new(),
        }
    }

    /// End the current pauses and prevent later ones.
    pub(super) fn lift(&self) {
        self.state.lock().is_lifted = true;
        self.lifted.notify_all();
    }

    /// Run `work`, and pause afterwards.
    pub(super) fn run<R>(&self, work: impl FnOnce() -> R) -> R {
        let before = processor_time();
        let result = work();
        self.pause(processor_time().saturating_sub(before) * self.pauses_per_work);
        result
    }

    /// Wait until `longest` has passed, training makes no progress, `trained` returns None, or the throttle
    /// is lifted.
    fn pause(&self, longest: Duration) {
        /// The time without progress after which training counts as idle. It is longer than a request takes.
        const IDLE: Duration = Duration::from_millis(100);
        let began = Instant::now();
        let mut state = self.state.lock();
        while !state.is_lifted {
            let trained = (self.trained)();
            if trained.is_none() {
                return;
            }
            if trained != state.trained {
                (state.trained, state.progress) = (trained, Some(Instant::now()));
            }
            let until_idle = state.progress.and_then(|progress| IDLE.checked_sub(progress.elapsed()));
            let Some((until_idle, left)) = until_idle.zip(longest.checked_sub(began.elapsed())) else {
                return;
            };
            self.lifted.wait_for(&mut state, until_idle.min(left));
        }
    }
}

/// The pause of each of `threads` threads, as a multiple of its processor time.
fn pauses_per_work(threads: usize) -> u32 {
    const PROCESSORS_PER_HALF: usize = 4;
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let part = 2 * threads / processors.div_ceil(PROCESSORS_PER_HALF);
    u32::try_from(part.saturating_sub(1)).unwrap_or(u32::MAX)
}

/// The processor time that this thread has used.
#[allow(unsafe_code)]
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local variable. If the clock cannot be read, it stays 0 and nothing is throttled.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Give training threads priority on the processors that they share with this thread.
#[allow(unsafe_code)]
pub(super) fn yield_to_training() {
    const NICE: libc::c_int = 10;
    // SAFETY: the call only sets the scheduling priority of the calling thread. If it fails, writing competes with
    // training on equal terms.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn a_pause_ends_when_nothing_is_trained_and_when_the_throttle_is_lifted() {
        let trained = AtomicU64::new(0);
        let idle = WriteThrottle::new(1, || Some(7));
        let busy = WriteThrottle::new(1, || Some(trained.fetch_add(1, Ordering::Relaxed)));
        let exempt = WriteThrottle::new(1, || {
            Some(trained.fetch_add(1, Ordering::Relaxed)).filter(|trained| *trained < 7)
        });
        idle.pause(Duration::MAX);
        std::thread::scope(|threads| {
            let pausing = threads.spawn(|| busy.pause(Duration::MAX));
            while trained.load(Ordering::Relaxed) < 4 {
                assert!(!pausing.is_finished());
                std::thread::yield_now();
            }
            busy.lift();
        });
        busy.pause(Duration::MAX);
        exempt.pause(Duration::MAX);
        assert!(trained.into_inner() > 7);
    }
}
