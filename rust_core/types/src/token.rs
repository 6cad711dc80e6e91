//! The identifier of one look-up and its push, and the record of pushes that ensures that each is applied
//! once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::tables::TablesError;

/// A job's name, hashed with 64-bit FNV-1a so that tokens are small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub u64);

impl JobId {
    /// The id of the job called `name`.
    pub fn from_name(name: &str) -> Self {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self(hash)
    }
}

/// Identifies one look-up and the push that follows it: `(job, generation, rank, seq)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token {
    /// The job. Two jobs never share rows.
    pub job: JobId,
    /// The run's generation. Requests of other generations are refused.
    pub generation: u64,
    /// The rank that sends the request.
    pub rank: u32,
    /// The rank's step, from 1.
    pub seq: u64,
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}/{}/{}/{}", self.job.0, self.generation, self.rank, self.seq)
    }
}

/// The highest sequence number of one rank, and a bitmap of the last 128 numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Window {
    highest: u64,
    /// Bit `i` represents `highest - i`.
    seen: u128,
}

/// The tokens of one generation that have been applied. A token older than the window counts as applied.
///
/// Memory is bounded, because tokens of ranks that the run does not have are refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenTokens {
    job: Option<JobId>,
    #[serde(rename = "epoch", alias = "generation")]
    generation: u64,
    world_size: u32,
    ranks: BTreeMap<u32, Window>,
}

impl SeenTokens {
    /// Create an empty set, which accepts only tokens of `job`, `generation` and ranks below `world_size`.
    pub fn begin(job: JobId, generation: u64, world_size: u32) -> Self {
        Self { job: Some(job), generation, world_size, ranks: BTreeMap::new() }
    }

    /// The generation that is accepted.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether `token` has been inserted, or is older than the window and therefore counts as inserted.
    ///
    /// # Errors
    /// [`TablesError::StaleGeneration`] for a job or generation that is not the current one, [`TablesError::BadShape`]
    /// for a rank that the run does not have.
    pub fn contains(&self, token: Token) -> Result<bool, TablesError> {
        if self.job != Some(token.job) || self.generation != token.generation {
            return Err(TablesError::StaleGeneration { token, current: self.generation });
        }
        let (rank, ranks) = (token.rank, self.world_size);
        if rank >= ranks {
            let highest = ranks.saturating_sub(1);
            let what = format!(
                "request {token} comes from rank {rank}, but the highest rank of the run is {highest}"
            );
            return Err(TablesError::BadShape { what });
        }
        let Some(window) = self.ranks.get(&token.rank) else { return Ok(false) };
        if token.seq > window.highest {
            return Ok(false);
        }
        let age = window.highest - token.seq;
        Ok(age >= 128 || window.seen >> age & 1 == 1)
    }

    /// Whether no token of the current generation has been inserted yet.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Insert `token`. Returns true if it was new.
    ///
    /// # Errors
    /// Those of [`Self::contains`].
    pub fn insert(&mut self, token: Token) -> Result<bool, TablesError> {
        if self.contains(token)? {
            return Ok(false);
        }
        let window = self.ranks.entry(token.rank).or_default();
        if token.seq > window.highest {
            let ahead = token.seq - window.highest;
            window.seen = if ahead >= 128 { 0 } else { window.seen << ahead };
            window.seen |= 1;
            window.highest = token.seq;
        } else {
            window.seen |= 1 << (window.highest - token.seq);
        }
        Ok(true)
    }

    /// The highest sequence number inserted for each rank, for a checkpoint's token table.
    pub fn highest(&self) -> BTreeMap<u32, u64> {
        self.ranks.iter().map(|(rank, window)| (*rank, window.highest)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn token(rank: u32, seq: u64) -> Token {
        Token { job: JobId(7), generation: 3, rank, seq }
    }

    #[test]
    fn another_generation_or_job_is_refused() {
        let mut seen = SeenTokens::begin(JobId(7), 3, 1);
        assert!(matches!(
            seen.insert(Token { generation: 2, ..token(0, 1) }),
            Err(TablesError::StaleGeneration { .. })
        ));
        assert!(matches!(
            seen.insert(Token { job: JobId(8), ..token(0, 1) }),
            Err(TablesError::StaleGeneration { .. })
        ));
        assert!(seen.insert(token(0, 1)).unwrap());
    }

    #[test]
    fn ranks_that_the_run_does_not_have_are_refused_and_take_no_memory() {
        let mut seen = SeenTokens::begin(JobId(7), 3, 2);
        assert!(seen.insert(token(1, 1)).unwrap());
        for rank in (2..1_000).chain([u32::MAX]) {
            let error = seen.insert(token(rank, 1)).unwrap_err();
            let named = format!("from rank {rank}, but the highest rank of the run is 1");
            assert!(error.to_string().contains(&named), "{error}");
        }
        assert_eq!(seen.highest(), BTreeMap::from([(1, 1)]));
    }

    proptest! {
        #[test]
        fn a_token_counts_once_and_old_ones_never(seqs in prop::collection::vec((0u32..3, 1u64..400), 0..400)) {
            let mut seen = SeenTokens::begin(JobId(7), 3, 3);
            let mut model: HashSet<(u32, u64)> = HashSet::new();
            let mut highest = [0u64; 3];
            let mut inserted: BTreeMap<u32, u64> = BTreeMap::new();
            for (rank, seq) in seqs {
                let high = &mut highest[rank as usize];
                let too_old = *high >= 128 && seq <= *high - 128;
                let fresh = !too_old && model.insert((rank, seq));
                prop_assert_eq!(seen.insert(token(rank, seq)).unwrap(), fresh);
                prop_assert!(seen.contains(token(rank, seq)).unwrap());
                *high = (*high).max(seq);
                // Neither a repeated token nor an old one changes the highest number of its rank.
                inserted.insert(rank, *high);
                prop_assert_eq!(seen.highest(), inserted.clone());
            }
        }
    }
}
