//! Per-sample weights: what the row of each occurrence is multiplied by before the rows of a sample are summed.

use crate::batch::occurrences::Occurrences;
use crate::error::Error;

/// The weights of one feature, in the two orders they are used in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Weights {
    /// Per occurrence, in batch order: pooling.
    in_order: Vec<f32>,
    /// Unique id after unique id, each in batch order: the segment sum.
    grouped: Vec<f32>,
}

impl Weights {
    /// `inverse` is the feature's: per occurrence the place of its id among `unique`.
    ///
    /// # Errors
    /// [`Error::BadFeature`] when there is not one finite weight per occurrence.
    pub(crate) fn new(
        feature: &str,
        in_order: &[f32],
        unique: usize,
        inverse: &[u32],
    ) -> Result<Self, Error> {
        let bad = |what: String| Err(Error::BadFeature { feature: feature.into(), what });
        if in_order.len() != inverse.len() {
            return bad(format!(
                "{} weights for {} ids; give one weight per id",
                in_order.len(),
                inverse.len()
            ));
        }
        if let Some(place) = in_order.iter().position(|weight| !weight.is_finite()) {
            return bad(format!("weight {} of id {place} is not finite; clean the data", in_order[place]));
        }
        // The positions stand where samples do elsewhere, and are grouped like them.
        let positions = Occurrences::group(unique, inverse, 0..inverse.len() as u32);
        let grouped = positions.samples().iter().map(|position| in_order[*position as usize]).collect();
        Ok(Self { in_order: in_order.to_vec(), grouped })
    }

    pub(crate) fn in_order(&self) -> &[f32] {
        &self.in_order
    }

    pub(crate) fn grouped(&self) -> &[f32] {
        &self.grouped
    }
}
