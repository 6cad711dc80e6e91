//! Tests of the behavior on which users of the crate rely.
#![allow(clippy::unwrap_used, reason = "a test panics when it fails")]

mod errors;
mod fitting;
mod fuzz;
mod hashes;
mod layouts;
mod rules;

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use persia_features::{DataErrors, Features, Fitter, Options, Records, Samples, Transform};

/// Parse a block of features. The label is the column `y`.
fn features(block: &str) -> Features {
    let text = format!("features: {{{block}}}\nlabels: {{y: {{}}}}");
    Features::parse(&text, "persia.yml").unwrap().config
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)))
        .unwrap()
}

/// Fit features on these columns and a label column. Returns the transform.
fn fitted(features: &Features, columns: Vec<(&str, ArrayRef)>) -> Transform {
    let rows = columns[0].1.len();
    let label: ArrayRef = Arc::new(arrow_array::Float32Array::from(vec![0.0; rows]));
    let batch = batch([columns, vec![("y", label)]].concat());
    let mut fitter = Fitter::new(features.clone());
    fitter.update(&batch).unwrap();
    fitter.finish().unwrap()
}

const SERVING: Options = Options { strict: false, labels: false, first_row: 0 };
const STRICT: Options = Options { strict: true, labels: false, first_row: 0 };

fn from_json(transform: &Transform, json: &str, options: Options) -> Result<Samples, DataErrors> {
    transform.records(&Records::from_json(json.as_bytes()).unwrap(), options)
}

/// The ids of the first slot in each row.
fn ids(samples: &Samples) -> Vec<Vec<u64>> {
    let ids = &samples.ids()[0];
    (0..samples.rows()).map(|row| ids.ids[ids.bounds(row)].to_vec()).collect()
}
