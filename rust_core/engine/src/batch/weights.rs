//! Per-sample weights: the factors by which the rows of a sample are multiplied before they are summed.

use crate::batch::occurrences::Occurrences;
use crate::error::Error;
use crate::memory::FeatureMemory;

/// The weights of one feature, in two orders.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Weights {
    /// The weight of each occurrence in batch order, for pooling.
    in_order: Vec<f32>,
    /// The same weights for the segment sum: ordered by unique id, and in batch order for each id.
    grouped: Vec<f32>,
}

impl Weights {
    /// Create the weights of a feature. `inverse` is, for each occurrence, the index of its unique id.
    ///
    /// # Errors
    /// [`Error::BadFeature`] unless there is one finite weight per occurrence.
    pub(crate) fn new(
        feature: &str,
        in_order: &[f32],
        occurrences: &Occurrences,
        inverse: &[u32],
        memory: &FeatureMemory,
    ) -> Result<Self, Error> {
        let bad = |what: String| Err(Error::BadFeature { feature: feature.into(), what });
        if in_order.len() != inverse.len() {
            return bad(format!(
                "the number of weights is {}, but the number of ids is {}; pass one weight per id",
                in_order.len(),
                inverse.len()
            ));
        }
        if let Some(place) = in_order.iter().position(|weight| !weight.is_finite()) {
            return bad(format!("weight {} at index {place} is not finite; clean the data", in_order[place]));
        }
        let mut cursors = memory.copy_places(occurrences.starts());
        let mut grouped = memory.weights(in_order.len());
        for (weight, unique) in in_order.iter().zip(inverse) {
            let cursor = &mut cursors[*unique as usize];
            grouped[*cursor as usize] = *weight;
            *cursor += 1;
        }
        memory.put_places(cursors);
        let mut copy = memory.weights(in_order.len());
        copy.copy_from_slice(in_order);
        Ok(Self { in_order: copy, grouped })
    }

    pub(crate) fn in_order(&self) -> &[f32] {
        &self.in_order
    }

    pub(crate) fn grouped(&self) -> &[f32] {
        &self.grouped
    }

    /// Return the weights in both orders, so that their memory can be reused.
    pub(crate) fn into_parts(self) -> [Vec<f32>; 2] {
        [self.in_order, self.grouped]
    }
}
