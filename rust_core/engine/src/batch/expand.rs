//! Expands features according to their slots: hash stacks and raw features become ordinary features.
//!
//! Look-up, pooling and segment sum handle ordinary features only. A hash stack turns each occurrence of an id
//! into one occurrence of each of its buckets. A raw feature turns each sample into `sample_fixed_size` samples
//! with at most one id each. Pooling then returns the rows of the first ids, padded with zeros.

use std::cell::RefCell;

use persia_types::Id;
use persia_types::limits::{MAX_BATCH_SIZE, MAX_OCCURRENCES};
use persia_types::schema::{Pooling, Slot};

use crate::batch::feature::IdFeature;
use crate::error::Error;

/// A feature after the expansion.
#[derive(Debug)]
pub(crate) struct Expanded {
    pub(crate) feature: IdFeature,
    /// The number of ids that were truncated: those after the first `sample_fixed_size` ids of a sample.
    pub(crate) truncated: usize,
}

/// Expand a feature. Returns None if it is looked up unchanged.
///
/// # Errors
/// [`Error::BadFeature`] for per-sample weights of a feature that is not summed; [`Error::TooLarge`].
pub(crate) fn expand(feature: &IdFeature, slot: &Slot) -> Result<Option<Expanded>, Error> {
    check_weights(feature, slot)?;
    if slot.sample_fixed_size.is_none() && slot.hash_stack.is_none() {
        return Ok(None);
    }
    check_size(feature, slot)?;
    LISTS.with_borrow_mut(|lists| lists.expand(feature, slot)).map(Some)
}

thread_local! {
    static LISTS: RefCell<Lists> = RefCell::default();
}

/// Memory that is reused for every expansion.
#[derive(Default)]
struct Lists {
    ids: Vec<Id>,
    weights: Vec<f32>,
    offsets: Vec<usize>,
}

impl Lists {
    fn expand(&mut self, feature: &IdFeature, slot: &Slot) -> Result<Expanded, Error> {
        let Self { ids, weights, offsets } = self;
        ids.clear();
        weights.clear();
        offsets.clear();
        offsets.push(0);
        let rounds = slot.hash_stack.map_or(1, |stack| stack.rounds as usize);
        let mut truncated = 0;
        for sample in 0..feature.samples() {
            let occurrences = feature.occurrences_of(sample);
            let kept =
                slot.sample_fixed_size.map_or(occurrences.len(), |size| occurrences.len().min(size as usize));
            truncated += occurrences.len() - kept;
            for occurrence in occurrences.take(kept) {
                let id = feature.unique().ids()[feature.inverse()[occurrence] as usize];
                match slot.hash_stack {
                    None => ids.push(id),
                    Some(stack) => ids.extend(stack.buckets_of(id)),
                }
                if let Some(all) = feature.per_sample_weights() {
                    weights.extend(std::iter::repeat_n(all[occurrence], rounds));
                }
                if slot.sample_fixed_size.is_some() {
                    offsets.push(ids.len());
                }
            }
            let ends = slot.sample_fixed_size.map_or(1, |size| size as usize - kept);
            offsets.extend(std::iter::repeat_n(ids.len(), ends));
        }
        let expanded = IdFeature::lists(feature.name(), ids, offsets)?;
        let feature =
            if feature.per_sample_weights().is_some() { expanded.with_weights(weights)? } else { expanded };
        Ok(Expanded { feature, truncated })
    }
}

fn check_weights(feature: &IdFeature, slot: &Slot) -> Result<(), Error> {
    let instead = match (slot.sample_fixed_size, slot.pooling) {
        _ if feature.per_sample_weights().is_none() => return Ok(()),
        (Some(_), _) => "`embedding_summation: false`",
        (None, Pooling::Mean) => "`pooling: mean`",
        (None, Pooling::Sum) => return Ok(()),
    };
    Err(Error::BadFeature {
        feature: feature.name().into(),
        what: format!(
            "per-sample weights need sum pooling, but its slot has {instead}; remove the weights, or change the slot"
        ),
    })
}

fn check_size(feature: &IdFeature, slot: &Slot) -> Result<(), Error> {
    let places = slot.sample_fixed_size.map_or(1, |size| size as usize);
    let rounds = slot.hash_stack.map_or(1, |stack| stack.rounds as usize);
    for (what, size, limit) in [
        ("samples × sample_fixed_size", feature.samples().saturating_mul(places), MAX_BATCH_SIZE),
        ("ids × hash_stack_rounds", feature.inverse().len().saturating_mul(rounds), MAX_OCCURRENCES),
    ] {
        if size > limit {
            return Err(Error::TooLarge {
                what: format!("{what} of id feature {:?}", feature.name()),
                size,
                limit,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use persia_types::schema::HashStack;

    use super::*;

    fn ids_of(feature: &IdFeature) -> Vec<Vec<u64>> {
        let id = |occurrence: usize| feature.unique().ids()[feature.inverse()[occurrence] as usize];
        (0..feature.samples()).map(|sample| feature.occurrences_of(sample).map(id).collect()).collect()
    }

    #[test]
    fn a_raw_feature_has_a_sample_per_place() {
        let feature = IdFeature::lists("a", &[5, 6, 5, 7, 8, 9], &[0, 1, 1, 5, 6]).unwrap();
        let slot = Slot { sample_fixed_size: Some(3), ..Slot::default() };
        let expanded = expand(&feature, &slot).unwrap().unwrap();
        let [none, one] = [vec![], vec![5]];
        let expected = [
            [one.clone(), none.clone(), none.clone()],
            [none.clone(), none.clone(), none.clone()],
            [vec![6], one, vec![7]],
            [vec![9], none.clone(), none],
        ];
        assert_eq!(ids_of(&expanded.feature), expected.concat());
        assert_eq!(expanded.truncated, 1);
        assert!(!expanded.feature.unique().ids().contains(&8), "a truncated id is not looked up");
        let single = IdFeature::single("a", &[4, 2]).unwrap();
        assert_eq!(ids_of(&expand(&single, &slot).unwrap().unwrap().feature).concat(), [4, 2]);
    }

    #[test]
    fn a_hash_stack_has_every_bucket_of_every_id() {
        let stack = HashStack { rounds: 3, buckets: 50 };
        let feature =
            IdFeature::lists("a", &[5, 6, 5], &[0, 2, 2, 3]).unwrap().with_weights(&[2.0, 3.0, 4.0]);
        let slot = Slot { hash_stack: Some(stack), ..Slot::default() };
        let expanded = expand(&feature.unwrap(), &slot).unwrap().unwrap();
        let buckets = |ids: &[u64]| ids.iter().flat_map(|id| stack.buckets_of(*id)).collect::<Vec<_>>();
        assert_eq!(ids_of(&expanded.feature), [buckets(&[5, 6]), buckets(&[]), buckets(&[5])]);
        assert_eq!(
            expanded.feature.per_sample_weights().unwrap(),
            [2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0]
        );
        let raw = Slot { sample_fixed_size: Some(2), ..slot };
        let feature = IdFeature::lists("a", &[5, 6, 5], &[0, 2, 2, 3]).unwrap();
        let places = [&[5][..], &[6], &[], &[], &[5], &[]].map(buckets);
        assert_eq!(ids_of(&expand(&feature, &raw).unwrap().unwrap().feature), places);
    }

    #[test]
    fn weights_without_a_sum_are_refused() {
        let feature = IdFeature::lists("a", &[5], &[0, 1]).unwrap().with_weights(&[2.0]).unwrap();
        let mean = Slot { pooling: Pooling::Mean, ..Slot::default() };
        let raw = Slot { sample_fixed_size: Some(2), ..Slot::default() };
        for (slot, named) in [(mean, "pooling: mean"), (raw, "embedding_summation: false")] {
            let error = expand(&feature, &slot).unwrap_err();
            assert!(matches!(&error, Error::BadFeature { what, .. } if what.contains(named)), "{error}");
        }
        let scaled = Slot { sqrt_scaling: true, ..Slot::default() };
        assert!(expand(&feature, &scaled).unwrap().is_none());
    }

    #[test]
    fn sizes_beyond_the_limits_are_refused_before_anything_is_built() {
        let feature = IdFeature::single("a", &vec![5; (1 << 10) + 1]).unwrap();
        let slot = Slot { sample_fixed_size: Some(1 << 14), ..Slot::default() };
        let error = expand(&feature, &slot).unwrap_err();
        assert!(error.to_string().contains("samples × sample_fixed_size"), "{error}");
    }
}
