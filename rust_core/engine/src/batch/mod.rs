//! [`Batch`]: a user's `PersiaBatch`, after all checks.

mod codec;
pub(crate) mod dedup;
pub(crate) mod expand;
pub(crate) mod feature;
mod occurrences;
pub(crate) mod tensor;
mod weights;

use std::collections::BTreeSet;
use std::time::Duration;

use persia_types::limits::{MAX_BATCH_SIZE, MAX_SLOTS};

use crate::batch::feature::IdFeature;
use crate::batch::tensor::Tensor;
use crate::error::Error;

/// The parts of a [`Batch`], before they are checked against each other.
#[derive(Debug, Clone, Default)]
pub struct BatchParts {
    /// The id features, at least one.
    pub id_features: Vec<IdFeature>,
    /// The dense inputs.
    pub dense: Vec<Tensor>,
    /// The labels.
    pub labels: Vec<Tensor>,
    /// The number of samples, if given. All other parts must agree with it.
    pub batch_size: Option<usize>,
    /// Whether the batch is for training. If not, it has no ticket, and ids without a row read as zeros.
    pub requires_grad: bool,
    /// The user's metadata, which is passed through unchanged.
    pub meta: Option<Vec<u8>>,
}

/// A mini-batch: id features, dense tensors and labels of the same samples.
#[derive(Debug, Clone)]
pub struct Batch {
    parts: BatchParts,
    batch_size: usize,
}

impl Batch {
    /// Create a batch. Checks that the parts agree and that all floats are finite.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::UnequalBatchSizes`] with all parts, [`Error::DuplicateNames`],
    /// [`Error::NonFinite`], [`Error::TooLarge`].
    pub fn new(parts: BatchParts) -> Result<Self, Error> {
        check_counts([parts.id_features.len(), parts.dense.len(), parts.labels.len()])?;
        let batch_size = common_size(&parts)?;
        check_names("id feature", parts.id_features.iter().map(IdFeature::name))?;
        check_names("dense tensor", parts.dense.iter().filter_map(Tensor::name))?;
        check_names("label", parts.labels.iter().filter_map(Tensor::name))?;
        for (kind, tensors) in [("dense tensor", &parts.dense), ("label", &parts.labels)] {
            for (index, tensor) in tensors.iter().enumerate() {
                if let Some((row, column, value)) = tensor.first_nonfinite() {
                    return Err(Error::NonFinite { tensor: tensor.label(kind, index), row, column, value });
                }
            }
        }
        Ok(Self { parts, batch_size })
    }

    /// Check that every label is 0 or 1, as some losses require.
    ///
    /// # Errors
    /// [`Error::LabelNotBinary`], with the first other value.
    pub fn check_binary_labels(&self) -> Result<(), Error> {
        for (index, label) in self.labels().iter().enumerate() {
            if let Some((row, column, value)) = label.first_not_binary() {
                return Err(Error::LabelNotBinary {
                    tensor: label.label("label", index),
                    row,
                    column,
                    value,
                });
            }
        }
        Ok(())
    }

    /// The number of samples.
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// The id features, in the user's order.
    pub fn id_features(&self) -> &[IdFeature] {
        &self.parts.id_features
    }

    /// The dense tensors, in the user's order.
    pub fn dense(&self) -> &[Tensor] {
        &self.parts.dense
    }

    /// The labels, in the user's order.
    pub fn labels(&self) -> &[Tensor] {
        &self.parts.labels
    }

    /// Whether the batch is for training.
    pub fn requires_grad(&self) -> bool {
        self.parts.requires_grad
    }

    /// The user's metadata, if any.
    pub fn meta(&self) -> Option<&[u8]> {
        self.parts.meta.as_deref()
    }

    /// The time that the deduplication of all id features took.
    pub(crate) fn deduplication(&self) -> Duration {
        self.id_features().iter().map(IdFeature::spent).sum()
    }
}

/// Check the numbers of id features, dense tensors and labels.
fn check_counts(counts: [usize; 3]) -> Result<(), Error> {
    if counts[0] == 0 {
        return Err(Error::Empty { what: "it has no id feature" });
    }
    let names = ["id features of a batch", "dense tensors of a batch", "labels of a batch"];
    for (what, size) in names.into_iter().zip(counts) {
        if size > MAX_SLOTS {
            return Err(Error::TooLarge { what: what.into(), size, limit: MAX_SLOTS });
        }
    }
    Ok(())
}

/// The number of samples, on which all parts must agree.
fn common_size(parts: &BatchParts) -> Result<usize, Error> {
    let mut sizes: Vec<(String, usize)> = Vec::new();
    sizes.extend(parts.batch_size.map(|size| ("batch_size".to_owned(), size)));
    sizes.extend(parts.id_features.iter().map(|f| (format!("id feature {:?}", f.name()), f.samples())));
    for (kind, tensors) in [("dense tensor", &parts.dense), ("label", &parts.labels)] {
        sizes.extend(tensors.iter().enumerate().map(|(i, t)| (t.label(kind, i), t.shape()[0])));
    }
    let size = sizes[0].1;
    if sizes.iter().any(|(_, other)| *other != size) {
        return Err(Error::UnequalBatchSizes { sizes });
    }
    if size == 0 {
        return Err(Error::Empty { what: "it has no sample" });
    }
    if size > MAX_BATCH_SIZE {
        return Err(Error::TooLarge { what: "samples of a batch".into(), size, limit: MAX_BATCH_SIZE });
    }
    Ok(size)
}

fn check_names<'a>(kind: &'static str, names: impl Iterator<Item = &'a str>) -> Result<(), Error> {
    let mut seen = BTreeSet::new();
    let twice: BTreeSet<&str> = names.filter(|name| !seen.insert(*name)).collect();
    if twice.is_empty() {
        return Ok(());
    }
    Err(Error::DuplicateNames { kind, names: twice.into_iter().map(str::to_owned).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::tensor::Dtype;

    fn f32_tensor(name: &str, rows: usize, values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor::new(Some(name.into()), Dtype::F32, vec![rows, values.len() / rows], bytes).unwrap()
    }

    fn ids(name: &str, count: u64) -> IdFeature {
        IdFeature::single(name, &(0..count).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn unequal_sizes_are_all_named() {
        let parts = BatchParts {
            id_features: vec![ids("a", 3), ids("b", 4)],
            dense: vec![f32_tensor("x", 5, &[0.0; 5])],
            labels: vec![f32_tensor("y", 6, &[0.0; 6])],
            batch_size: Some(7),
            ..Default::default()
        };
        let message = Batch::new(parts).unwrap_err().to_string();
        for part in ["batch_size has 7", "\"a\" has 3", "\"b\" has 4", "\"x\" has 5", "\"y\" has 6"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn duplicate_names_and_empty_batches_are_refused() {
        let id_features = vec![ids("a", 3), ids("b", 3), ids("a", 3)];
        let error = Batch::new(BatchParts { id_features, ..Default::default() }).unwrap_err();
        assert!(matches!(&error, Error::DuplicateNames { names, .. } if names == &["a"]), "{error}");
        let empty = BatchParts { id_features: vec![ids("a", 0)], ..Default::default() };
        assert!(matches!(Batch::new(empty).unwrap_err(), Error::Empty { .. }));
        assert!(matches!(Batch::new(BatchParts::default()).unwrap_err(), Error::Empty { .. }));
    }

    #[test]
    fn nan_and_infinity_are_named_with_their_place() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let dense = vec![f32_tensor("x", 2, &[0.0, 1.0, 2.0, 3.0, bad, 5.0])];
            let parts = BatchParts { id_features: vec![ids("a", 2)], dense, ..Default::default() };
            let error = Batch::new(parts).unwrap_err();
            assert!(matches!(error, Error::NonFinite { row: 1, column: 1, .. }), "{error}");
        }
        let wide = Tensor::new(None, Dtype::F64, vec![2], [1.0f64, f64::NAN].map(f64::to_le_bytes).concat());
        let parts =
            BatchParts { id_features: vec![ids("a", 2)], labels: vec![wide.unwrap()], ..Default::default() };
        assert!(matches!(Batch::new(parts).unwrap_err(), Error::NonFinite { row: 1, column: 0, .. }));
    }

    #[test]
    fn labels_outside_zero_and_one_are_refused_on_request() {
        for (values, good) in [([0.0, 1.0], true), ([0.0, 0.5], false), ([-1.0, 1.0], false)] {
            let labels = vec![f32_tensor("y", 2, &values)];
            let parts = BatchParts { id_features: vec![ids("a", 2)], labels, ..Default::default() };
            assert_eq!(Batch::new(parts).unwrap().check_binary_labels().is_ok(), good);
        }
    }

    #[test]
    fn batches_above_65535_samples_work() {
        let parts = BatchParts { id_features: vec![ids("a", 70_000)], ..Default::default() };
        assert_eq!(Batch::new(parts).unwrap().batch_size(), 70_000);
    }
}
