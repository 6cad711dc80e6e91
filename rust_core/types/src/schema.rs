//! Slots, tables, optimizers and initializers, as the engine and the store use them.
//!
//! A *slot* is a feature of the model. A *table* is a set of rows of one dimension. The slots of a feature group
//! share a table. A slot outside all groups has a table with the slot's name.

use serde::{Deserialize, Serialize};

use crate::id::{Id, hash_id};

/// The pooling of the rows of one sample's ids into one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The sum of the rows.
    #[default]
    Sum,
    /// The sum of the rows divided by `max(n, 1)`, where n is the sample's number of ids.
    Mean,
}

/// A hash stack, which represents many ids by few rows: the row of an id is the sum of one bucket's row per round.
///
/// With `h(0) = id` and `h(k) = hash_id(h(k - 1))`, the bucket of round k, counted from 1, is `(k - 1) * buckets +
/// h(k) mod buckets`. There are therefore at most `rounds * buckets` rows, and no two rounds share a row. Ids that
/// share a bucket in one round rarely share a bucket in the others (Svenstrup et al. 2017, "Hash Embeddings for
/// Efficient Word Representations").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashStack {
    /// The number of rounds, which is the number of buckets per id, at least 1.
    pub rounds: u32,
    /// The number of buckets in each round, at least 1.
    pub buckets: u32,
}

impl HashStack {
    /// The buckets of `id`, in the order of rounds.
    pub fn buckets_of(self, id: Id) -> impl Iterator<Item = Id> {
        let mut hash = id;
        (0..u64::from(self.rounds)).map(move |round| {
            hash = hash_id(hash);
            round * u64::from(self.buckets) + hash % u64::from(self.buckets)
        })
    }
}

/// A feature of the model.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Slot {
    /// The name of the feature, as in the batch.
    pub name: String,
    /// The index into [`Schema::tables`].
    pub table: usize,
    /// The pooling: sum or mean.
    pub pooling: Pooling,
    /// Whether the sum and its gradient are divided by `sqrt(max(n, 1))`, where n is the sample's number of ids times
    /// the rounds of the hash stack.
    pub sqrt_scaling: bool,
    /// For a raw (sequence) feature, the number of positions. Its output is the rows of a sample's first ids instead of
    /// one pooled vector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_fixed_size: Option<u32>,
    /// The hash stack whose buckets the ids share, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_stack: Option<HashStack>,
}

impl Slot {
    /// The divisor of each sample's sum, at least 1. For a mean, it is the sample's number of ids. For sqrt
    /// scaling, it is the square root of the sample's number of rows, which is its number of ids times the
    /// rounds of the hash stack. For both, it is the product. None if the slot has neither, or if every sample
    /// has one row (`offsets` is None).
    ///
    /// `offsets` are the offsets of the samples after ids have been replaced by buckets.
    pub fn divisors<'a>(
        &self,
        offsets: Option<&'a [u32]>,
    ) -> Option<impl ExactSizeIterator<Item = f32> + use<'a>> {
        if self.pooling == Pooling::Sum && !self.sqrt_scaling {
            return None;
        }
        let rounds = self.hash_stack.map_or(1, |stack| stack.rounds);
        let (means, roots) = (self.pooling == Pooling::Mean, self.sqrt_scaling);
        let divisor = move |bounds: &[u32]| {
            let rows = bounds[1] - bounds[0];
            let mean = if means { (rows / rounds).max(1) as f32 } else { 1.0 };
            let root = if roots { (rows.max(1) as f32).sqrt() } else { 1.0 };
            mean * root
        };
        offsets.map(|offsets| offsets.windows(2).map(divisor))
    }
}

/// A set of rows of one dimension.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// The name of the feature group, or of the slot if it has no group.
    pub name: String,
    /// The number of weights in a row.
    pub dim: usize,
    /// The row format of the table, and its settings that differ from those of the run.
    #[serde(default)]
    pub settings: TableSettings,
}

impl Table {
    /// Create a table with f32 rows that uses all settings of the run.
    pub fn new(name: impl Into<String>, dim: usize) -> Self {
        Self { name: name.into(), dim, settings: TableSettings::default() }
    }
}

/// The row format of a table, and its settings that differ from those of the run.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TableSettings {
    /// The stored type of a weight.
    pub dtype: Dtype,
    /// How an updated weight is rounded to `dtype`; f32 is never rounded.
    pub rounding: Rounding,
    /// The optimizer, instead of the run's.
    pub optimizer: Option<Optimizer>,
    /// The initializer, instead of the run's.
    pub initializer: Option<Initializer>,
    /// The admission rule, instead of the run's.
    pub admission: Option<Admission>,
    /// The number of steps without a push of its id after which a row expires; None means never.
    pub ttl: Option<u32>,
}

/// The stored type of a weight. Optimizer state is f32, look-ups return f32, and updates are computed in f32.
///
/// A number beyond the largest finite number of a 16-bit type (65504 for f16, 3.39e38 for bf16), including
/// infinity, is stored as that largest number, so rounding never produces an infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE 754 binary32.
    #[default]
    F32,
    /// IEEE 754 binary16: 11 significant bits; the smallest normal number is 6.1e-5.
    F16,
    /// The upper half of a binary32: 8 significant bits and the range of a binary32.
    Bf16,
}

/// How an f32 is rounded to fewer bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rounding {
    /// Round to nearest, ties to even. An update smaller than half the distance between two adjacent numbers is
    /// lost.
    #[default]
    Nearest,
    /// Round up or down with the probability that makes the expected value exact (Gupta et al. 2015, "Deep Learning
    /// with Limited Numerical Precision"). The draw is a hash of (seed, table, id, step, element).
    Stochastic,
}

/// The rule that decides whether a push of a missing id gives the id a row. The push must meet both conditions. An id
/// without a row reads as zeros, except in the training look-up of the step whose push inserts the row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Admission {
    /// The probability of admission, in `0..=1`. The draw is a hash of (seed, id, step).
    pub probability: f32,
    /// The required number of pushes of the id since it last had a row, including the current push. At least
    /// 1.
    pub min_count: u32,
}

impl Default for Admission {
    /// Every id gets a row at its first push.
    fn default() -> Self {
        Self { probability: 1.0, min_count: 1 }
    }
}

/// The slots and tables of one configuration, as built by `config::EmbeddingConfig`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Schema {
    /// The slots, in the order of the file.
    pub slots: Vec<Slot>,
    /// The tables, in the order of their first slots.
    pub tables: Vec<Table>,
}

impl Schema {
    /// The slot called `name` and its index.
    pub fn slot(&self, name: &str) -> Option<(usize, &Slot)> {
        self.slots.iter().enumerate().find(|(_, slot)| slot.name == name)
    }
}

/// The rule by which the summed gradient `g` updates a row, element by element unless noted otherwise.
///
/// Each push multiplies `lr` by its factor. Multiply-adds are not fused.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Optimizer {
    /// SGD: `w -= lr * (g + wd * w)`. With momentum: `v = momentum * v + g; w -= lr * (v + wd * w)`.
    Sgd {
        /// Learning rate.
        lr: f32,
        /// The momentum; with 0 there is no state.
        momentum: f32,
        /// Weight decay.
        weight_decay: f32,
    },
    /// Adagrad: `w -= lr * g / sqrt(s + eps)` with the *old* s, then `s = s * g_square_momentum + g * g`, in
    /// PersiaML's order; g includes `weight_decay * w`.
    Adagrad {
        /// Learning rate.
        lr: f32,
        /// Weight decay.
        weight_decay: f32,
        /// The initial value of `s`.
        initial_accumulator_value: f32,
        /// The decay factor of `s`; 1 is standard Adagrad.
        g_square_momentum: f32,
        /// The value added to `s` under the square root.
        eps: f32,
        /// Whether there is one `s` per row, to which `mean(g * g)` is added.
        vectorwise_shared: bool,
    },
    /// Adam with bias correction, where t is the global step of the push; g includes `weight_decay * w`.
    Adam {
        /// Learning rate.
        lr: f32,
        /// The decay factor of the first moment.
        beta1: f32,
        /// The decay factor of the second moment.
        beta2: f32,
        /// Weight decay.
        weight_decay: f32,
        /// The value added to the square root.
        eps: f32,
    },
}

impl Optimizer {
    /// The number of floats of optimizer state that follow the `dim` weights of a row.
    pub fn state_len(&self, dim: usize) -> usize {
        match self {
            Self::Sgd { momentum, .. } => {
                if *momentum == 0.0 {
                    0
                } else {
                    dim
                }
            }
            Self::Adagrad { vectorwise_shared: true, .. } => 1,
            Self::Adagrad { .. } => dim,
            Self::Adam { .. } => 2 * dim,
        }
    }
}

/// The weights of a new row: a function of the run's seed, the table's name and the id.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Initializer {
    /// All zeros.
    Zero,
    /// Uniformly distributed in `[low, high)`.
    Uniform {
        /// The lower bound, inclusive.
        low: f32,
        /// The upper bound, exclusive.
        high: f32,
    },
    /// Normally distributed.
    Normal {
        /// The mean.
        mean: f32,
        /// The standard deviation.
        std: f32,
    },
    /// Gamma distributed, with the mean `shape * scale`.
    Gamma {
        /// The shape k, above 0.
        shape: f32,
        /// The scale θ.
        scale: f32,
    },
    /// Poisson distributed: integers with the mean and variance `lam`.
    Poisson {
        /// The mean, at most [`crate::limits::MAX_POISSON_MEAN`].
        lam: f32,
    },
    /// Uniformly distributed in `[-b, b)` with `b = 1 / sqrt(dim)`, so that the expected squared length of a row
    /// is 1/3 for every dimension.
    InverseSqrtDim,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn buckets_of_different_rounds_are_different_rows() {
        let stack = HashStack { rounds: 3, buckets: 100 };
        let ids = 0..10_000u64;
        let buckets: Vec<Vec<Id>> = ids.map(|id| stack.buckets_of(id).collect()).collect();
        for (round, range) in [0..100, 100..200, 200..300].into_iter().enumerate() {
            let used: BTreeSet<Id> = buckets.iter().map(|buckets| buckets[round]).collect();
            assert!(
                used.iter().eq(range.collect::<Vec<Id>>().iter()),
                "every bucket of round {round} is used"
            );
        }
        // With 10,000 ids and 10^6 combinations of buckets, about 50 pairs share all three buckets by chance.
        let distinct = buckets.iter().collect::<BTreeSet<_>>().len();
        assert!((9_850..10_000).contains(&distinct), "{distinct}");
    }

    /// Checkpoints depend on these values.
    #[test]
    fn buckets_never_change() {
        let stack = HashStack { rounds: 2, buckets: 1000 };
        let buckets: Vec<Vec<Id>> = [0, 1, u64::MAX].map(|id| stack.buckets_of(id).collect()).into();
        assert_eq!(buckets, [[173, 1404], [429, 1157], [345, 1677]]);
    }
}
