//! [`Claims`]: records which pushes were applied and which are in flight. [`SeenTokens`] refuses tokens of
//! another job or generation, or of a rank that the run does not have.

use std::collections::BTreeMap;

use parking_lot::{Condvar, Mutex};
use persia_types::token::SeenTokens;
use persia_types::{JobId, TablesError, Token};

#[derive(Default)]
struct State {
    applied: SeenTokens,
    in_flight: Vec<Token>,
}

/// The pushes of one run.
#[derive(Default)]
pub(crate) struct Claims {
    state: Mutex<State>,
    ended: Condvar,
}

impl Claims {
    /// Drop all tokens, and from now on accept only those of `job`, `generation` and ranks below `world_size`. The
    /// caller ensures that no push is in flight.
    pub(crate) fn begin(&self, job: JobId, generation: u64, world_size: u32) {
        let mut state = self.state.lock();
        debug_assert!(state.in_flight.is_empty());
        state.applied = SeenTokens::begin(job, generation, world_size);
    }

    /// Refuse a look-up of another job or generation, or of a rank that the run does not have.
    pub(crate) fn check(&self, token: Token) -> Result<(), TablesError> {
        self.state.lock().applied.contains(token).map(drop)
    }

    /// Claim the right to apply `token`; None if it was already applied, or is too old to tell. A duplicate
    /// of a request in flight waits until that request ends.
    pub(crate) fn claim(&self, token: Token) -> Result<Option<Claim<'_>>, TablesError> {
        let mut state = self.state.lock();
        loop {
            if state.applied.contains(token)? {
                return Ok(None);
            }
            if !state.in_flight.contains(&token) {
                state.in_flight.push(token);
                return Ok(Some(Claim { claims: self, token, applied: false }));
            }
            self.ended.wait(&mut state);
        }
    }

    /// The applied pushes. Call this while no push is in flight.
    pub(crate) fn applied(&self) -> SeenTokens {
        self.state.lock().applied.clone()
    }

    /// Restore the result of [`Self::applied`].
    pub(crate) fn resume(&self, applied: SeenTokens) {
        self.state.lock().applied = applied;
    }

    /// The highest applied sequence number of every rank.
    pub(crate) fn highest(&self) -> BTreeMap<u32, u64> {
        self.state.lock().applied.highest()
    }
}

/// A claim to apply one token. If it is dropped before [`Claim::applied`], the token stays unknown, and a retry
/// can claim it.
pub(crate) struct Claim<'a> {
    claims: &'a Claims,
    token: Token,
    applied: bool,
}

impl Claim<'_> {
    /// Record the token as applied.
    pub(crate) fn applied(mut self) {
        self.applied = true;
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut state = self.claims.state.lock();
        state.in_flight.retain(|claimed| *claimed != self.token);
        if self.applied {
            let inserted = state.applied.insert(self.token);
            debug_assert!(matches!(inserted, Ok(true)), "claimed tokens are of this generation and new");
        }
        drop(state);
        self.claims.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const TOKEN: Token = Token { job: JobId(1), generation: 1, rank: 0, seq: 5 };

    fn claims() -> Claims {
        let claims = Claims::default();
        claims.begin(JobId(1), 1, 1);
        claims
    }

    #[test]
    fn a_failed_claim_leaves_the_token_unknown_and_an_applied_one_does_not() {
        let claims = claims();
        drop(claims.claim(TOKEN).unwrap().unwrap());
        claims.claim(TOKEN).unwrap().unwrap().applied();
        assert!(claims.claim(TOKEN).unwrap().is_none());
        assert_eq!(claims.highest(), BTreeMap::from([(0, 5)]));
    }

    #[test]
    fn of_concurrent_duplicates_one_is_applied() {
        let claims = claims();
        let applied = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    if let Some(claim) = claims.claim(TOKEN).unwrap() {
                        applied.fetch_add(1, Ordering::Relaxed);
                        claim.applied();
                    }
                });
            }
        });
        assert_eq!(applied.into_inner(), 1);
    }
}
