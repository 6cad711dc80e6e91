//! One deduplicated id feature of a batch.

use std::sync::Weak;
use std::time::{Duration, Instant};

use persia_kernels::Csr;
use persia_types::id::{Id, ShardedIds};
use persia_types::limits::{MAX_BATCH_SIZE, MAX_IDS_PER_REQUEST, MAX_NAME_BYTES, MAX_OCCURRENCES};

use crate::batch::dedup::{self, Unique};
use crate::batch::occurrences::Occurrences;
use crate::batch::weights::Weights;
use crate::error::Error;
use crate::memory::FeatureMemory;

/// The ids of one feature in all samples of a batch: the unique ids, and the samples of each unique id.
#[derive(Debug, Clone)]
pub struct IdFeature {
    name: String,
    unique: ShardedIds,
    /// For each occurrence, the index of its id in `unique`.
    inverse: Vec<u32>,
    /// The starts of the samples' occurrences, as `batch + 1` offsets; None means one id per sample.
    offsets: Option<Vec<u32>>,
    occurrences: Occurrences,
    /// The per-sample weights; None means 1 for all.
    weights: Option<Weights>,
    spent: Duration,
    /// The pool to which the feature's vectors are returned, if the thread that created the feature still exists.
    home: Weak<FeatureMemory>,
}

impl IdFeature {
    /// Create a feature with one id per sample.
    ///
    /// # Errors
    /// [`Error::BadFeature`] for an invalid name; [`Error::TooLarge`] if a limit is exceeded.
    pub fn single(name: impl Into<String>, ids: &[Id]) -> Result<Self, Error> {
        Self::build(name.into(), ids, None)
    }

    /// Create a feature with any number of ids per sample. Sample `i` has `ids[offsets[i]..offsets[i + 1]]`.
    ///
    /// # Errors
    /// Those of [`Self::single`]; [`Error::BadFeature`] if offsets do not ascend from 0 to `ids.len()`.
    pub fn lists(name: impl Into<String>, ids: &[Id], offsets: &[usize]) -> Result<Self, Error> {
        let name = name.into();
        check_offsets(&name, ids.len(), offsets)?;
        // Before any offset is used, `check_limits` refuses sizes that do not fit into a u32.
        let offsets = offsets.iter().map(|offset| *offset as u32).collect();
        Self::build(name, ids, Some(offsets))
    }

    /// Like [`Self::lists`], but takes the offsets in the form in which they are kept.
    ///
    /// # Errors
    /// Those of [`Self::lists`].
    pub fn ragged(name: impl Into<String>, ids: &[Id], offsets: Vec<u32>) -> Result<Self, Error> {
        let name = name.into();
        check_offsets(&name, ids.len(), &wide(&offsets))?;
        Self::build(name, ids, Some(offsets))
    }

    fn build(name: String, ids: &[Id], offsets: Option<Vec<u32>>) -> Result<Self, Error> {
        let samples = offsets.as_ref().map_or(ids.len(), |offsets| offsets.len() - 1);
        check_limits(&name, ids.len(), samples)?;
        let start = Instant::now();
        let (Unique { ids: unique, inverse, occurrences }, home) =
            dedup::with(|deduplicator| (deduplicator.unique(ids, offsets.as_deref()), deduplicator.memory()));
        let spent = start.elapsed();
        let feature = Self { name, unique, inverse, offsets, occurrences, weights: None, spent, home };
        feature.check_unique()?;
        Ok(feature)
    }

    /// Add per-sample weights, one per occurrence. A sample's vector is then the sum of weight × row, and the
    /// gradient of a row is multiplied by the same weight. No gradient of the weights is computed.
    ///
    /// # Errors
    /// [`Error::BadFeature`] unless there is one finite weight per occurrence.
    pub fn with_weights(mut self, weights: &[f32]) -> Result<Self, Error> {
        let memory = self.home.upgrade().unwrap_or_default();
        let weights = Weights::new(&self.name, weights, &self.occurrences, &self.inverse, &memory)?;
        self.weights = Some(weights);
        Ok(self)
    }

    /// Create a feature from decoded parts, and check all parts.
    pub(crate) fn from_parts(
        name: String,
        unique: &[Id],
        inverse: Vec<u32>,
        offsets: Option<Vec<u32>>,
    ) -> Result<Self, Error> {
        let samples = match &offsets {
            None => inverse.len(),
            Some(offsets) => {
                check_offsets(&name, inverse.len(), &wide(offsets))?;
                offsets.len() - 1
            }
        };
        check_limits(&name, inverse.len(), samples)?;
        let bad = |what: &str| Err(Error::BadFeature { feature: name.clone(), what: what.into() });
        let found = dedup::with(|deduplicator| deduplicator.unique(unique, None));
        if found.ids.ids() != unique {
            return bad("its unique ids are not unique, or not in order of their shards");
        }
        if inverse.iter().any(|place| *place as usize >= unique.len()) {
            return bad("an occurrence has an index outside the unique ids");
        }
        let occurrences = match &offsets {
            None => Occurrences::group(unique.len(), &inverse, 0..inverse.len() as u32),
            Some(offsets) => Occurrences::group(unique.len(), &inverse, samples_of(offsets)),
        };
        if occurrences.starts().windows(2).any(|bounds| bounds[0] == bounds[1]) {
            return bad("a unique id has no occurrence");
        }
        let (spent, home) = (Duration::ZERO, Weak::new());
        let feature =
            Self { name, unique: found.ids, inverse, offsets, occurrences, weights: None, spent, home };
        feature.check_unique()?;
        Ok(feature)
    }

    fn check_unique(&self) -> Result<(), Error> {
        if self.unique.len() > MAX_IDS_PER_REQUEST {
            let what = format!("unique ids of id feature {:?}", self.name);
            return Err(Error::TooLarge { what, size: self.unique.len(), limit: MAX_IDS_PER_REQUEST });
        }
        Ok(())
    }

    /// The name of the feature, which is also the name of its slot.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of samples.
    pub fn samples(&self) -> usize {
        self.offsets.as_ref().map_or(self.inverse.len(), |offsets| offsets.len() - 1)
    }

    /// The unique ids, in the order of (shard, first occurrence).
    pub fn unique(&self) -> &ShardedIds {
        &self.unique
    }

    /// For each occurrence, in batch order, the index of its id in [`Self::unique`].
    pub fn inverse(&self) -> &[u32] {
        &self.inverse
    }

    /// The starts of the samples' occurrences, as `samples + 1` offsets; None means one id per sample.
    pub fn offsets(&self) -> Option<&[u32]> {
        self.offsets.as_deref()
    }

    /// For each unique id, the samples in which it occurs, once per occurrence.
    pub fn csr(&self) -> Csr<'_> {
        Csr { offsets: self.occurrences.starts(), indices: self.occurrences.samples() }
    }

    /// The occurrences of one sample. `sample` must be below [`Self::samples`].
    pub(crate) fn occurrences_of(&self, sample: usize) -> std::ops::Range<usize> {
        match &self.offsets {
            None => sample..sample + 1,
            Some(offsets) => offsets[sample] as usize..offsets[sample + 1] as usize,
        }
    }

    /// For each occurrence, in batch order, the factor of its row; None means 1 for all.
    pub fn per_sample_weights(&self) -> Option<&[f32]> {
        self.weights.as_ref().map(Weights::in_order)
    }

    /// The weights in the order of [`Self::csr`].
    pub(crate) fn csr_weights(&self) -> Option<&[f32]> {
        self.weights.as_ref().map(Weights::grouped)
    }

    /// The time that the deduplication of this feature took.
    pub(crate) fn spent(&self) -> Duration {
        self.spent
    }
}

impl Drop for IdFeature {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            let (ids, _) = std::mem::take(&mut self.unique).into_parts();
            let [starts, samples] = std::mem::take(&mut self.occurrences).into_parts();
            let weights = self.weights.take().map(Weights::into_parts);
            home.put(
                [std::mem::take(&mut self.inverse), starts, samples],
                ids,
                weights.into_iter().flatten(),
            );
        }
    }
}

/// The sample of each occurrence.
fn samples_of(offsets: &[u32]) -> impl Iterator<Item = u32> {
    offsets
        .windows(2)
        .enumerate()
        .flat_map(|(sample, bounds)| std::iter::repeat_n(sample as u32, (bounds[1] - bounds[0]) as usize))
}

fn wide(offsets: &[u32]) -> Vec<usize> {
    offsets.iter().map(|offset| *offset as usize).collect()
}

fn check_offsets(name: &str, ids: usize, offsets: &[usize]) -> Result<(), Error> {
    let bad = |what: String| Err(Error::BadFeature { feature: name.into(), what });
    let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
        return bad("found no offsets, expected one more than the number of samples".into());
    };
    if *first != 0 || *last != ids {
        return bad(format!("offsets go from {first} to {last}, expected 0 to {ids}, the number of ids"));
    }
    match offsets.windows(2).position(|bounds| bounds[0] > bounds[1]) {
        Some(sample) => bad(format!("offsets descend at sample {sample}")),
        None => Ok(()),
    }
}

fn check_limits(name: &str, occurrences: usize, samples: usize) -> Result<(), Error> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        let what = format!("its name has {} bytes, allowed: 1 to {MAX_NAME_BYTES}", name.len());
        return Err(Error::BadFeature { feature: name.into(), what });
    }
    for (what, size, limit) in [("samples", samples, MAX_BATCH_SIZE), ("ids", occurrences, MAX_OCCURRENCES)] {
        if size > limit {
            return Err(Error::TooLarge { what: format!("{what} of id feature {name:?}"), size, limit });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_may_be_empty() {
        let feature = IdFeature::lists("a", &[5, 5, 6], &[0, 2, 2, 3]).unwrap();
        assert_eq!(feature.samples(), 3);
        assert_eq!(feature.unique().len(), 2);
        let place = feature.inverse()[0] as usize;
        assert_eq!(feature.csr().of(place), [0, 0]);
    }

    #[test]
    fn memory_of_dropped_features_leaves_no_trace() {
        let ids: Vec<Id> = (0..20_000).map(|i| i % 7_001).collect();
        let offsets: Vec<usize> = (0..=2_000).map(|i| i * 10).collect();
        let weights: Vec<f32> = (0..20_000).map(|i| i as f32).collect();
        let make = || IdFeature::lists("a", &ids, &offsets).unwrap().with_weights(&weights).unwrap();
        let before = IdFeature::single("before", &(0..20_000).rev().collect::<Vec<_>>()).unwrap();
        drop(before.with_weights(&[-1.0; 20_000]).unwrap());
        let again = make();
        let fresh = std::thread::scope(|scope| scope.spawn(make).join().unwrap());
        assert_eq!(again.unique(), fresh.unique());
        assert_eq!(again.inverse(), fresh.inverse());
        assert_eq!(again.occurrences, fresh.occurrences);
        assert_eq!(again.weights, fresh.weights);
    }

    #[test]
    fn bad_offsets_and_names_are_refused() {
        for offsets in [&[][..], &[1, 3], &[0, 2], &[0, 3, 2, 3]] {
            let error = IdFeature::lists("a", &[1, 2, 3], offsets).unwrap_err();
            assert!(matches!(error, Error::BadFeature { .. }), "{error}");
        }
        assert!(IdFeature::single("", &[1]).is_err());
        assert!(IdFeature::single("x".repeat(MAX_NAME_BYTES + 1), &[1]).is_err());
    }

    #[test]
    fn ragged_ids_are_those_of_lists() {
        let one = IdFeature::lists("a", &[5, 5, 6], &[0, 2, 2, 3]).unwrap();
        let other = IdFeature::ragged("a", &[5, 5, 6], vec![0, 2, 2, 3]).unwrap();
        assert_eq!(
            (one.unique(), one.inverse(), one.offsets()),
            (other.unique(), other.inverse(), other.offsets())
        );
        assert!(IdFeature::ragged("a", &[5, 5, 6], vec![0, 2, 2]).is_err());
    }

    #[test]
    fn weights_follow_their_ids() {
        let feature = IdFeature::lists("a", &[5, 6, 5, 7, 5], &[0, 2, 2, 5]).unwrap();
        let feature = feature.with_weights(&[0.5, 2.0, -1.0, 3.0, 4.0]).unwrap();
        let grouped = feature.csr_weights().unwrap();
        for (place, id) in feature.unique().ids().iter().enumerate() {
            let weights = &grouped[feature.csr().range(place)];
            let expected: &[f32] = match id {
                5 => &[0.5, -1.0, 4.0],
                6 => &[2.0],
                _ => &[3.0],
            };
            assert_eq!(weights, expected);
        }
    }

    #[test]
    fn a_weight_too_few_or_not_finite_is_refused() {
        for (weights, named) in
            [(&[1.0, 2.0][..], "number of weights is 2"), (&[1.0, f32::NAN, 2.0], "weight NaN at index 1")]
        {
            let error = IdFeature::single("a", &[5, 6, 7]).unwrap().with_weights(weights).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn limits_are_checked_before_anything_is_built() {
        let samples = vec![0usize; MAX_BATCH_SIZE + 2];
        let error = IdFeature::lists("a", &[], &samples).unwrap_err();
        assert!(matches!(error, Error::TooLarge { size, .. } if size == MAX_BATCH_SIZE + 1), "{error}");
        assert!(check_limits("a", MAX_OCCURRENCES + 1, 1).is_err());
    }
}
