//! [`Fitter`]: computes fitted values in one pass over the training data.

pub(crate) mod fitted;
mod histogram;
mod moments;

use std::collections::BTreeMap;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use persia_types::config::features::{Boundaries, Clip, Dense, Missing, Rule, Scaling, ValueType};

use crate::error::{DataErrors, Mistake, TransformError};
use crate::features::Features;
use crate::fit::fitted::{Fitted, FittedFeature, Needs};
use crate::input::cell::{Cell, ReadCells, Source};
use crate::input::schema::{check, id_column, values_of};
use crate::rules::numbers::{Number, given_clip, number, unscaled};
use crate::transform::Transform;
use histogram::Histogram;
use moments::Moments;

/// Computes the fitted values, and the types of the values that become ids, in one pass. The result is bit-identical
/// for every order and split of the rows.
#[derive(Debug, Clone)]
pub struct Fitter {
    features: Features,
    columns: Vec<FitColumn>,
    /// The undeclared types of the values that become ids, by feature.
    values: BTreeMap<String, ValueType>,
    checked: Option<SchemaRef>,
    rows: u64,
}

/// The statistics of one feature.
#[derive(Debug, Clone)]
struct FitColumn {
    feature: usize,
    column: String,
    needs: Needs,
    raw: Moments,
    /// The numbers after clip and log1p; None if the feature has neither.
    unscaled: Option<Unscaled>,
    histogram: Histogram,
}

/// The statistics of numbers after a given clip and log1p.
#[derive(Debug, Clone)]
struct Unscaled {
    clip: Option<(f32, f32)>,
    log1p: bool,
    moments: Moments,
}

impl Fitter {
    /// Create a fitter that has read no rows.
    pub fn new(features: Features) -> Self {
        let all = features.config().features.iter().enumerate();
        let columns = all.filter_map(|(index, feature)| FitColumn::new(index, &feature.rule)).collect();
        Self { features, columns, values: BTreeMap::new(), checked: None, rows: 0 }
    }

    /// Add rows of the training data.
    ///
    /// # Errors
    /// All errors in the columns. If there are none, the first wrong value of each feature with fitted numbers.
    pub fn update(&mut self, batch: &RecordBatch) -> Result<(), DataErrors> {
        self.bind(batch.schema_ref())?;
        let mut mistakes = Vec::new();
        for column in &mut self.columns {
            let name = column.column.clone();
            if let Some((row, message)) = batch.cells(&name, ReadNumbers(column)) {
                let feature = &self.features.config().features[column.feature];
                let row = Some(self.rows + row as u64);
                mistakes.push(Mistake { feature: feature.name.clone(), line: feature.line, row, message });
            }
        }
        self.rows += batch.num_rows() as u64;
        if mistakes.is_empty() { Ok(()) } else { Err(DataErrors { mistakes }) }
    }

    /// Check the columns, and determine from them the types of the values that become ids. [`Self::update`]
    /// calls this.
    ///
    /// # Errors
    /// All errors in the columns.
    pub fn bind(&mut self, schema: &SchemaRef) -> Result<(), DataErrors> {
        if self.checked.as_ref() == Some(schema) {
            return Ok(());
        }
        let config = self.features.config();
        let known = |name: &str| {
            let declared = config.feature(name).and_then(|feature| id_column(&feature.rule)?.values);
            declared.or_else(|| self.values.get(name).copied())
        };
        let mistakes = check(config, &known, schema, true);
        if !mistakes.is_empty() {
            return Err(DataErrors { mistakes });
        }
        for feature in &config.features {
            let undeclared = id_column(&feature.rule).is_some_and(|column| column.values.is_none());
            if let Some(values) = values_of(&feature.rule, schema).filter(|_| undeclared) {
                self.values.entry(feature.name.clone()).or_insert(values);
            }
        }
        self.checked = Some(schema.clone());
        Ok(())
    }

    /// Add the data that another fitter for the same features has read.
    ///
    /// # Errors
    /// The values of an id feature have different types in the two fitters.
    pub fn merge(&mut self, other: &Self) -> Result<(), DataErrors> {
        let mut mistakes = Vec::new();
        for (name, values) in &other.values {
            let known = *self.values.entry(name.clone()).or_insert(*values);
            if known != *values {
                let message =
                    "found integers and strings in different parts of the data: cast the column to one type";
                mistakes.push(Mistake { feature: name.clone(), line: 0, row: None, message: message.into() });
            }
        }
        for (column, more) in self.columns.iter_mut().zip(&other.columns) {
            column.merge(more);
        }
        self.rows += other.rows;
        if mistakes.is_empty() { Ok(()) } else { Err(DataErrors { mistakes }) }
    }

    /// The number of rows read.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Create the transform with the fitted values.
    ///
    /// # Errors
    /// [`TransformError::NothingToFit`], with all features whose column has no number or no value; those of
    /// [`Features::transform`].
    pub fn finish(self) -> Result<Transform, TransformError> {
        let config = self.features.config();
        let mut fitted = Fitted::default();
        for (name, values) in &self.values {
            fitted.features.entry(name.clone()).or_default().values = Some(*values);
        }
        let mut empty = Vec::new();
        for column in &self.columns {
            let feature = &config.features[column.feature];
            match column.finish(&feature.rule) {
                Some(found) => {
                    fitted.features.insert(feature.name.clone(), found);
                }
                None => empty.push(format!(
                    "{}: none of {} rows of column `{}` has a finite number",
                    feature.name, self.rows, column.column
                )),
            }
        }
        for feature in &config.features {
            let column = id_column(&feature.rule).filter(|column| column.values.is_none());
            if let Some(column) =
                column.filter(|_| self.checked.is_some() && !self.values.contains_key(&feature.name))
            {
                empty.push(format!(
                    "{}: none of {} rows of column `{}` has a value; declare `values` (integer or string)",
                    feature.name, self.rows, column.column
                ));
            }
        }
        if !empty.is_empty() {
            return Err(TransformError::NothingToFit { features: empty });
        }
        self.features.transform(fitted)
    }
}

impl FitColumn {
    fn new(feature: usize, rule: &Rule) -> Option<Self> {
        let needs = Needs::of(rule);
        let unscaled = match rule {
            Rule::Dense(dense) if dense.log1p || dense.clip != Clip::None => {
                let (clip, moments) = (given_clip(dense.clip), Moments::default());
                Some(Unscaled { clip, log1p: dense.log1p, moments })
            }
            _ => None,
        };
        let (raw, histogram) = (Moments::default(), Histogram::default());
        let column = rule.columns().next()?.to_owned();
        needs.any().then_some(Self { feature, column, needs, raw, unscaled, histogram })
    }

    #[inline]
    fn add(&mut self, value: f32) {
        if self.needs.moments {
            self.raw.add(value);
            if let Some(Unscaled { clip, log1p, moments }) = &mut self.unscaled {
                moments.add(unscaled(value, *clip, *log1p));
            }
        }
        if self.needs.histogram {
            self.histogram.add(value);
        }
    }

    fn merge(&mut self, other: &Self) {
        self.raw.merge(&other.raw);
        if let (Some(one), Some(more)) = (&mut self.unscaled, &other.unscaled) {
            one.moments.merge(&more.moments);
        }
        self.histogram.merge(&other.histogram);
    }

    /// Compute the fitted values of the feature. Returns None if there are no numbers.
    fn finish(&self, rule: &Rule) -> Option<FittedFeature> {
        match rule {
            Rule::Bucket(bucket) => {
                let Boundaries::Quantiles(count) = bucket.boundaries else { return None };
                let (min, max) = self.raw.range()?;
                let shares: Vec<f64> = (1..count).map(|index| f64::from(index) / f64::from(count)).collect();
                let mut boundaries = self.histogram.quantiles(&shares);
                boundaries.dedup();
                // A boundary at the largest number of the training data would have no number above it.
                boundaries.retain(|boundary| *boundary < max);
                Some(FittedFeature {
                    boundaries: Some(boundaries),
                    range: Some((min, max)),
                    ..FittedFeature::default()
                })
            }
            Rule::Dense(dense) => self.finish_dense(dense),
            _ => None,
        }
    }

    fn finish_dense(&self, dense: &Dense) -> Option<FittedFeature> {
        let quantiles = |shares: &[f64]| self.histogram.quantiles(shares);
        let mut fitted = FittedFeature::default();
        match dense.missing {
            Missing::Mean => fitted.missing = Some(self.raw.mean_std()?.0 as f32),
            Missing::Median => fitted.missing = Some(*quantiles(&[0.5]).first()?),
            Missing::Zero | Missing::Given(_) => {}
        }
        if let Clip::Quantiles(low, high) = dense.clip {
            let found = quantiles(&[as_written(low), as_written(high)]);
            fitted.clip = Some((*found.first()?, *found.get(1)?));
        }
        let scaled = match fitted.clip {
            // The clip is computed after all rows are read, so the numbers after the clip are approximated
            // from the histogram.
            Some(clip) => {
                let mut moments = Moments::default();
                for (value, count) in self.histogram.counts() {
                    moments.add_many(unscaled(value, Some(clip), dense.log1p), count);
                }
                moments
            }
            None => self.unscaled.as_ref().map_or(&self.raw, |unscaled| &unscaled.moments).clone(),
        };
        match dense.scaling {
            Scaling::Standardise(None) => fitted.standardise = Some(scaled.mean_std()?),
            Scaling::MinMax(None) => fitted.min_max = Some(scaled.range()?),
            _ => {}
        }
        Some(fitted)
    }
}

/// Adds the numbers of a column. Returns the row and the error of the first value that is not a number.
struct ReadNumbers<'c>(&'c mut FitColumn);

impl ReadCells for ReadNumbers<'_> {
    type Out = Option<(usize, String)>;

    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) -> Self::Out {
        let mut wrong = None;
        for row in 0..rows {
            match number(cell(row)) {
                Number::Value(value) => self.0.add(value),
                Number::Unusual(_) => {}
                Number::Wrong => {
                    wrong.get_or_insert_with(|| {
                        (row, format!("found {}, allowed: a number", cell(row).found()))
                    });
                }
            }
        }
        wrong
    }
}

/// The decimal value of a share as it was written, because 0.1 as f32 is more than a tenth.
fn as_written(share: f32) -> f64 {
    share.to_string().parse().unwrap_or_else(|_| share.into())
}
