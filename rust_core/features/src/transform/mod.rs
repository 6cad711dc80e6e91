//! [`Transform`]: features with their fitted values.

mod plan;

use std::sync::Arc;

use arrow_array::RecordBatch;
use persia_types::config::features::FeaturesConfig;
use serde::{Deserialize, Serialize};

use crate::error::{DataErrors, Mistake, TransformError};
use crate::features::Features;
use crate::fit::fitted::Fitted;
use crate::input::cell::Source;
use crate::input::records::Records;
use crate::input::schema::{check, id_column};
use crate::report::{Report, Tally, Unusual};
use crate::rules::ids;
use crate::rules::labels::ReadLabels;
use crate::rules::numbers::ReadDense;
use crate::samples::{Ids, Names, Samples};
use plan::{Plan, Step};

/// The version of the JSON and of the rules. Rules of another version compute different ids or floats.
const FORMAT: u32 = 1;

/// Options for reading rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whether missing columns of record batches, and values of wrong types, are refused, as in training,
    /// evaluation and prediction. If not, they are counted, and the feature's rule for missing columns or for
    /// nulls is applied, as in serving.
    pub strict: bool,
    /// Whether labels are read. A value that is not a label is refused, even if `strict` is false.
    pub labels: bool,
    /// The row number of the first row, for error messages.
    pub first_row: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { strict: true, labels: true, first_row: 0 }
    }
}

/// Features with their fitted values. A transform converts equal values to equal ids and floats, whatever their
/// source.
#[derive(Debug, Clone)]
pub struct Transform {
    features: Features,
    fitted: Fitted,
    plan: Arc<Plan>,
    digest: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    persia_features: u32,
    digest: String,
    declared: FeaturesConfig,
    fitted: Fitted,
}

impl Transform {
    pub(crate) fn new(features: Features, fitted: Fitted) -> Result<Self, TransformError> {
        let config = features.config();
        let none = Default::default();
        let of = |name: &str| fitted.features.get(name).unwrap_or(&none);
        let lacking = config.features.iter().map(|feature| (feature, of(&feature.name).lacks(feature)));
        let missing: Vec<String> = lacking
            .filter(|(_, lacks)| !lacks.is_empty())
            .map(|(feature, lacks)| format!("{} has no {}", feature.name, lacks.join(" and no ")))
            .collect();
        if !missing.is_empty() {
            return Err(TransformError::Unfitted { missing });
        }
        let plan = Arc::new(Plan::new(config, &fitted)?);
        let digest = digest(config, &fitted)?;
        Ok(Self { features, fitted, plan, digest })
    }

    /// Parse the result of [`Self::to_json`].
    ///
    /// # Errors
    /// [`TransformError::Invalid`] if the text is not a transform, was changed, has another version, or needs something
    /// that this build lacks.
    pub fn from_json(json: &str) -> Result<Self, TransformError> {
        let invalid = |what: String| TransformError::Invalid { what };
        let stored: Stored = serde_json::from_str(json).map_err(|error| invalid(error.to_string()))?;
        if stored.persia_features != FORMAT {
            return Err(invalid(format!(
                "it has version {}, but this build reads version {FORMAT}; use the version of Persia that wrote it",
                stored.persia_features
            )));
        }
        // A transform that was written is complete and has no contradiction.
        let transform = Self::new(Features(Arc::new(stored.declared)), stored.fitted);
        let transform = transform.map_err(|error| match error {
            TransformError::Unfitted { missing } => {
                invalid(format!("it lacks fitted values: {}; use an unchanged copy", missing.join("; ")))
            }
            TransformError::Contradiction { what } => invalid(what),
            other => other,
        })?;
        if transform.digest != stored.digest {
            let message = format!(
                "its digest is {}, but its content has the digest {}: it was changed after it was written; use an \
                 unchanged copy",
                stored.digest, transform.digest
            );
            return Err(invalid(message));
        }
        Ok(transform)
    }

    /// Convert the declarations, the fitted values and the digest to JSON.
    ///
    /// # Errors
    /// [`TransformError::Invalid`], which does not occur for a valid transform.
    pub fn to_json(&self) -> Result<String, TransformError> {
        let stored = Stored {
            persia_features: FORMAT,
            digest: self.digest.clone(),
            declared: self.features.config().clone(),
            fitted: self.fitted.clone(),
        };
        serde_json::to_string_pretty(&stored)
            .map_err(|error| TransformError::Invalid { what: error.to_string() })
    }

    /// The digest. Transforms with equal digests compute equal ids, floats and labels. It does not cover
    /// dimensions, tables and optimizers.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The declarations of the features and labels.
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// The fitted values of the features.
    pub fn fitted(&self) -> &Fitted {
        &self.fitted
    }

    /// The names of the outputs.
    pub fn names(&self) -> &Names {
        &self.plan.names
    }

    /// Transform the rows of record batches, one after another.
    ///
    /// # Errors
    /// All errors in the first batch that has any.
    pub fn batches<'b>(
        &self,
        batches: impl IntoIterator<Item = &'b RecordBatch>,
        options: Options,
    ) -> Result<Samples, DataErrors> {
        let mut work = Work::new(self, options);
        for batch in batches {
            work.check(batch)?;
            work.add(batch)?;
        }
        Ok(work.finish())
    }

    /// Transform JSON records.
    ///
    /// # Errors
    /// All labels with a wrong value and, with strict `options`, all features with a wrong value.
    pub fn records(&self, records: &Records, options: Options) -> Result<Samples, DataErrors> {
        let mut work = Work::new(self, options);
        work.add(records)?;
        Ok(work.finish())
    }
}

fn digest(config: &FeaturesConfig, fitted: &Fitted) -> Result<String, TransformError> {
    let features: Vec<_> = config
        .features
        .iter()
        .map(|feature| (&feature.name, &feature.rule, feature.slot.is_some()))
        .collect();
    let labels: Vec<_> =
        config.labels.iter().map(|label| (&label.name, &label.column, &label.target)).collect();
    let content = serde_json::to_vec(&(FORMAT, features, labels, fitted));
    let content = content.map_err(|error| TransformError::Invalid { what: error.to_string() })?;
    Ok(blake3::hash(&content).to_hex().to_string())
}

/// Samples that are being built.
struct Work<'t> {
    transform: &'t Transform,
    options: Options,
    /// The ids of each feature; those of dense features stay empty.
    ids: Vec<Ids>,
    dense: Vec<f32>,
    labels: Vec<Vec<f32>>,
    rows: usize,
    report: Report,
}

impl<'t> Work<'t> {
    fn new(transform: &'t Transform, options: Options) -> Self {
        let plan = &transform.plan;
        let labels = if options.labels { plan.names.labels.len() } else { 0 };
        Self {
            transform,
            options,
            ids: plan.empty_ids(),
            dense: Vec::new(),
            labels: vec![Vec::new(); labels],
            rows: 0,
            report: Report::new(plan.reported.clone()),
        }
    }

    /// Check the columns of a record batch.
    fn check(&self, batch: &RecordBatch) -> Result<(), DataErrors> {
        if !self.options.strict {
            return Ok(());
        }
        let (config, fitted) = (self.transform.features.config(), &self.transform.fitted);
        let known = |name: &str| {
            let declared = config.feature(name).and_then(|feature| id_column(&feature.rule)?.values);
            declared.or_else(|| fitted.features.get(name)?.values)
        };
        let mistakes = check(config, &known, batch.schema_ref(), self.options.labels);
        if mistakes.is_empty() { Ok(()) } else { Err(DataErrors { mistakes }) }
    }

    /// Add the rows of a source.
    fn add(&mut self, source: &impl Source) -> Result<(), DataErrors> {
        let transform = self.transform;
        let (config, plan) = (transform.features.config(), &transform.plan);
        let rows = source.rows();
        let width = plan.names.dense.len();
        self.dense.resize((self.rows + rows) * width, 0.0);
        let mut mistakes = Vec::new();
        for (index, step) in plan.steps.iter().enumerate() {
            let mut tally = Tally::default();
            match step {
                Step::Ids(step) => step.read(source, &mut self.ids[index], &mut tally),
                Step::Dense { column, rule, place } => {
                    let out = &mut self.dense[self.rows * width..];
                    let tally = &mut tally;
                    source.cells(column, ReadDense { rule, out, column: *place, width, tally });
                }
                Step::Cross { .. } => continue,
            }
            let feature = &config.features[index];
            self.note(index, &feature.name, feature.line, tally, self.options.strict, &mut mistakes);
        }
        self.add_crosses(plan, rows);
        for (index, out) in self.labels.iter_mut().enumerate() {
            let mut tally = Tally::default();
            let label = &config.labels[index];
            source.cells(&label.column, ReadLabels { label, out, tally: &mut tally });
            let (report, first) = (&mut self.report, self.options.first_row + self.rows as u64);
            note(
                report,
                config.features.len() + index,
                &label.name,
                label.line,
                tally,
                Some(first),
                &mut mistakes,
            );
        }
        self.rows += rows;
        self.report.add_rows(rows);
        if mistakes.is_empty() { Ok(()) } else { Err(DataErrors { mistakes }) }
    }

    fn add_crosses(&mut self, plan: &Plan, rows: usize) {
        for (index, step) in plan.steps.iter().enumerate() {
            if let Step::Cross { parts } = step {
                let mut out = std::mem::take(&mut self.ids[index]);
                let parts: Vec<_> = parts.iter().map(|part| &self.ids[*part]).collect();
                ids::cross(&parts, self.rows, rows, &mut out);
                self.ids[index] = out;
            }
        }
    }

    fn note(
        &mut self,
        index: usize,
        name: &str,
        line: usize,
        tally: Tally,
        strict: bool,
        mistakes: &mut Vec<Mistake>,
    ) {
        let first = strict.then_some(self.options.first_row + self.rows as u64);
        note(&mut self.report, index, name, line, tally, first, mistakes);
    }

    fn finish(self) -> Samples {
        let names = self.transform.plan.names.clone();
        let slots = self.ids.into_iter().zip(&self.transform.plan.is_slot);
        let ids = slots.filter(|(_, slot)| **slot).map(|(ids, _)| ids).collect();
        Samples { rows: self.rows, names, ids, dense: self.dense, labels: self.labels, report: self.report }
    }
}

/// Add the counts of a feature to the report. If the number of the first row is given, report the first wrong value
/// as an error.
fn note(
    report: &mut Report,
    index: usize,
    feature: &str,
    line: usize,
    tally: Tally,
    first_row: Option<u64>,
    mistakes: &mut Vec<Mistake>,
) {
    report.add_counts(index, &tally.counts);
    if let (Some((row, message)), Some(first)) = (tally.first_wrong, first_row) {
        let count = tally.counts[Unusual::WrongType as usize];
        let message = if count > 1 { format!("{message} (one of {count} wrong values)") } else { message };
        mistakes.push(Mistake { feature: feature.into(), line, row: Some(first + row as u64), message });
    }
}
