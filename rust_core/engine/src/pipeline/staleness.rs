//! [`StalenessWindow`]: the training steps that are between their look-up and the acknowledgement of their
//! push.

use std::collections::BTreeMap;

/// The stage of a training batch that is between its look-up and the acknowledgement of its push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Being looked up, in the look-up thread.
    LookingUp,
    /// Looked up, waiting to be taken.
    Ready,
    /// Taken by the caller; its ticket is neither pushed nor dropped.
    Taken,
    /// Passed to the push thread, but not acknowledged. A failed push never leaves this stage.
    Pushing,
}

/// A window of at most K steps between look-up and acknowledgement, so that a look-up misses at most K - 1 of
/// the rank's pushes.
#[derive(Debug)]
pub(crate) struct StalenessWindow {
    limit: usize,
    steps: BTreeMap<u64, Stage>,
    max_staleness: usize,
}

impl StalenessWindow {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, steps: BTreeMap::new(), max_staleness: 0 }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.steps.len() < self.limit
    }

    /// Add `step`. The caller has checked that there is space.
    pub(crate) fn enter(&mut self, step: u64) {
        debug_assert!(self.has_room());
        self.max_staleness = self.max_staleness.max(self.steps.len());
        self.steps.insert(step, Stage::LookingUp);
    }

    pub(crate) fn advance(&mut self, step: u64, stage: Stage) {
        if let Some(current) = self.steps.get_mut(&step) {
            *current = stage;
        }
    }

    pub(crate) fn leave(&mut self, step: u64) {
        self.steps.remove(&step);
    }

    /// The first step at this stage.
    pub(crate) fn oldest_at(&self, stage: Stage) -> Option<u64> {
        self.steps.iter().find(|(_, current)| **current == stage).map(|(step, _)| *step)
    }

    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// The maximum number of steps that were in the window when another step was added.
    pub(crate) fn max_staleness(&self) -> usize {
        self.max_staleness
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_limit_and_the_oldest_is_named() {
        let mut window = StalenessWindow::new(2);
        window.enter(1);
        window.enter(2);
        assert!(!window.has_room());
        assert_eq!(window.max_staleness(), 1);
        window.advance(2, Stage::Pushing);
        assert_eq!(window.oldest_at(Stage::LookingUp), Some(1));
        assert_eq!(window.oldest_at(Stage::Pushing), Some(2));
        assert_eq!(window.oldest_at(Stage::Taken), None);
        window.leave(1);
        window.leave(1);
        assert!(window.has_room());
        assert_eq!(window.len(), 1);
    }
}
