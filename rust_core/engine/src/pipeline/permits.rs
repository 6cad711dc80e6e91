//! Staleness permits: who holds one, and what for.

use std::collections::BTreeMap;

/// Where a training batch is between its look-up and the acknowledgement of its push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// In the look-up thread.
    LookingUp,
    /// PooledBatch up, waiting to be taken.
    Ready,
    /// Taken; its ticket is neither pushed nor dropped.
    Taken,
    /// Handed to the push thread and not acknowledged. A failed push stays here for ever.
    Pushing,
}

/// At most K batches between look-up and acknowledgement, so that at most K - 1 of the own pushes are
/// unacknowledged when a look-up is served.
#[derive(Debug)]
pub(crate) struct Permits {
    limit: usize,
    held: BTreeMap<u64, Stage>,
    most_before: usize,
}

impl Permits {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, held: BTreeMap::new(), most_before: 0 }
    }

    pub(crate) fn available(&self) -> bool {
        self.held.len() < self.limit
    }

    /// Take a permit for `step`; the caller has seen that one is available.
    pub(crate) fn acquire(&mut self, step: u64) {
        debug_assert!(self.available());
        self.most_before = self.most_before.max(self.held.len());
        self.held.insert(step, Stage::LookingUp);
    }

    pub(crate) fn advance(&mut self, step: u64, stage: Stage) {
        if let Some(held) = self.held.get_mut(&step) {
            *held = stage;
        }
    }

    pub(crate) fn release(&mut self, step: u64) {
        self.held.remove(&step);
    }

    /// The first holder at this stage.
    pub(crate) fn oldest_at(&self, stage: Stage) -> Option<u64> {
        self.held.iter().find(|(_, held)| **held == stage).map(|(step, _)| *step)
    }

    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    /// The most batches that were on their way when another was looked up.
    pub(crate) fn most_before(&self) -> usize {
        self.most_before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_limit_and_the_oldest_is_named() {
        let mut permits = Permits::new(2);
        permits.acquire(1);
        permits.acquire(2);
        assert!(!permits.available());
        assert_eq!(permits.most_before(), 1);
        permits.advance(2, Stage::Pushing);
        assert_eq!(permits.oldest_at(Stage::LookingUp), Some(1));
        assert_eq!(permits.oldest_at(Stage::Pushing), Some(2));
        assert_eq!(permits.oldest_at(Stage::Taken), None);
        permits.release(1);
        permits.release(1);
        assert!(permits.available());
        assert_eq!(permits.held(), 1);
    }
}
