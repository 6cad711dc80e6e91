//! The pauses between attempts.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// The pause after `failures` failed attempts: none after 0 failures, 0.1 s after one, and twice as long after each
/// further failure, up to 5 s. Each pause is shortened at random by up to half, so that many clients do not reconnect
/// at the same time.
pub fn pause(failures: u32) -> Duration {
    let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
    let full = FIRST.saturating_mul(1 << doublings.min(16)).min(LONGEST);
    // `RandomState` has random keys, so its hash serves as a random number.
    let random = RandomState::new().hash_one(failures) as u32;
    full / 2 + (full / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_five_seconds() {
        assert_eq!(pause(0), Duration::ZERO);
        for failures in [1, 2, 5, 7, 40, u32::MAX] {
            let full = Duration::from_millis(100 << failures.min(7).saturating_sub(1)).min(LONGEST);
            let pause = pause(failures);
            assert!(pause >= full / 2 && pause <= full, "{failures}: {pause:?}");
        }
    }
}
