//! Tests that fitting takes one pass over the training data, can be merged, and does not depend on the order.

use std::sync::Arc;

use arrow_array::{ArrayRef, Float32Array, Float64Array, Int64Array, NullArray, StringArray};
use persia_features::{Features, Fitted, Fitter, Transform, TransformError};
use proptest::prelude::*;

use crate::{SERVING, STRICT, batch, features, fitted, ids};

const BLOCK: &str = "u: {type: id, dim: 2}, b: {type: bucket, column: x, quantiles: 4, dim: 2}, \
    z: {type: dense, column: x, standardise: true, missing: median}, \
    l: {type: dense, column: x, log1p: true, min_max: true, missing: mean}, \
    c: {type: dense, column: x, clip: {quantiles: [0.1, 0.9]}, min_max: true}";

fn data(values: &[Option<f64>]) -> arrow_array::RecordBatch {
    let users: ArrayRef = Arc::new(Int64Array::from_iter_values(0..values.len() as i64));
    let numbers: ArrayRef = Arc::new(Float64Array::from(values.to_vec()));
    batch(vec![("u", users), ("x", numbers), ("y", Arc::new(Float32Array::from(vec![1.0; values.len()])))])
}

#[test]
fn numbers_are_those_of_the_column() {
    let values: Vec<_> = (1..=100).map(|i| Some(f64::from(i))).chain([None, Some(f64::NAN)]).collect();
    let mut fitter = Fitter::new(features(BLOCK));
    fitter.update(&data(&values)).unwrap();
    assert_eq!(fitter.rows(), 102);
    let transform = fitter.finish().unwrap();
    let of = |name: &str| transform.fitted().features[name].clone();
    assert_eq!(of("b").boundaries, Some(vec![25.0, 50.0, 75.0]));
    assert_eq!(of("b").range, Some((1.0, 100.0)));
    let (mean, std) = of("z").standardise.unwrap();
    assert!(mean == 50.5 && (std - (9999.0f64 / 12.0).sqrt()).abs() < 1e-12, "{mean} {std}");
    assert_eq!((of("z").missing, of("l").missing), (Some(50.0), Some(50.5)));
    assert_eq!(of("l").min_max, Some((libm::log1pf(1.0), libm::log1pf(100.0))));
    assert_eq!((of("c").clip, of("c").min_max), (Some((10.0, 90.0)), Some((10.0, 90.0))));
    let test = data(&[Some(25.0), Some(25.5), Some(1000.0), Some(-4.0), None]);
    let samples = transform.batches([&test], STRICT).unwrap();
    let null = persia_features::hash::hash_text(b"\xffnull");
    assert_eq!(samples.ids()[1].ids, [0, 1, 3, 0, null]);
    let report = samples.report().counts();
    assert_eq!(report["b"]["out_of_range"], 2);
    // The median and the mean of the training data replace the missing number.
    let last = &samples.dense()[4 * 3..];
    let (mean, std) = of("z").standardise.unwrap();
    assert_eq!(last[0], ((50.0 - mean) / std) as f32);
    assert_eq!(last[2], 0.0);
    assert!(0.0 < last[1] && last[1] < 1.0);
}

#[test]
fn quantiles_of_many_equal_numbers_are_fewer() {
    let values: Vec<_> = (0..100).map(|i| Some(if i < 60 { 0.0 } else { f64::from(i) })).collect();
    let transform = fitted(
        &features("u: {type: bucket, quantiles: 5, dim: 2}"),
        vec![("u", Arc::new(Float64Array::from(values)))],
    );
    assert_eq!(transform.fitted().features["u"].boundaries, Some(vec![0.0, 79.0]));
    let constant: ArrayRef = Arc::new(Float64Array::from(vec![7.0; 9]));
    let block = "u: {type: bucket, quantiles: 5, dim: 2}, x: {type: dense, column: u, standardise: true}";
    let transform = fitted(&features(block), vec![("u", constant.clone())]);
    let samples = transform.batches([&batch(vec![("u", constant)])], STRICT).unwrap();
    assert_eq!((ids(&samples).concat(), samples.dense()), (vec![0; 9], &[0.0; 9][..]));
}

#[test]
fn a_transform_refuses_to_run_unfitted() {
    let error = features(BLOCK).transform(Fitted::default()).unwrap_err();
    let TransformError::Unfitted { missing } = error else { panic!("{error}") };
    assert_eq!(missing.len(), 5, "{missing:?}");
    assert_eq!(missing[0], "u has no `values` (integer or string)");
    assert_eq!(missing[2], "z has no value for missing numbers and no mean and standard deviation");
}

#[test]
fn a_column_without_numbers_is_an_error() {
    let mut fitter = Fitter::new(features(BLOCK));
    fitter.update(&data(&[None, Some(f64::NAN)])).unwrap();
    let error = fitter.finish().unwrap_err().to_string();
    assert_eq!(error.matches("none of 2 rows of column `x` has a finite number").count(), 4, "{error}");
    let mut fitter = Fitter::new(features("u: {type: id, dim: 2}"));
    let y: ArrayRef = Arc::new(Float32Array::from(vec![1.0]));
    fitter.update(&batch(vec![("u", Arc::new(NullArray::new(1))), ("y", y)])).unwrap();
    assert!(fitter.finish().unwrap_err().to_string().contains("u: none of 1 rows of column `u` has a value"));
}

#[test]
fn features_that_share_a_table_have_values_of_one_type() {
    let block = "i: {type: id, dim: 2}, s: {type: bag, separator: ' ', dim: 2, table: i}";
    let y: ArrayRef = Arc::new(Float32Array::from(vec![1.0]));
    let columns = vec![
        ("i", Arc::new(Int64Array::from(vec![1])) as ArrayRef),
        ("s", Arc::new(StringArray::from(vec!["1 2"]))),
        ("y", y),
    ];
    let mut fitter = Fitter::new(features(block));
    fitter.update(&batch(columns.clone())).unwrap();
    assert!(fitter.finish().unwrap_err().to_string().contains("share the table `i`"));
    let declared = features(&block.replace("separator", "values: integer, separator"));
    let mut fitter = Fitter::new(declared);
    fitter.update(&batch(columns.clone())).unwrap();
    let samples = fitter.finish().unwrap().batches([&batch(columns)], STRICT).unwrap();
    assert_eq!((samples.ids()[0].ids.clone(), samples.ids()[1].ids.clone()), (vec![1], vec![1, 2]));
}

#[test]
fn json_keeps_every_bit_and_the_digest_guards_it() {
    let mut fitter = Fitter::new(features(BLOCK));
    let values: Vec<_> = (0..999).map(|i| Some(f64::from(i).sin() * 1e-3)).collect();
    fitter.update(&data(&values)).unwrap();
    let transform = fitter.finish().unwrap();
    let json = transform.to_json().unwrap();
    let back = Transform::from_json(&json).unwrap();
    assert_eq!((back.digest(), back.fitted()), (transform.digest(), transform.fitted()));
    assert_eq!(back.features().embedding(), transform.features().embedding());
    let test = data(&values);
    assert_eq!(back.batches([&test], SERVING).unwrap(), transform.batches([&test], SERVING).unwrap());
    let changed = json.replacen("\"dim\": 2", "\"dim\": 4", 1);
    assert_eq!(Transform::from_json(&changed).unwrap().digest(), transform.digest());
    let changed = json.replacen("\"quantiles\": 4", "\"quantiles\": 5", 1);
    assert!(Transform::from_json(&changed).unwrap_err().to_string().contains("it was changed"));
    let mut incomplete: serde_json::Value = serde_json::from_str(&json).unwrap();
    incomplete["fitted"] = serde_json::json!({});
    let error = Transform::from_json(&incomplete.to_string()).unwrap_err();
    assert!(matches!(error, TransformError::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("it lacks fitted values: u has no `values`"), "{error}");
    assert!(Transform::from_json("{}").is_err());
    assert!(
        Transform::from_json(&json.replace("\"persia_features\": 1", "\"persia_features\": 2"))
            .unwrap_err()
            .to_string()
            .contains("version 2")
    );
}

#[test]
fn a_file_whose_features_changed_is_refused_by_name() {
    let old = fitted(
        &features("u: {type: id, dim: 2}, v: {type: id, dim: 2}"),
        vec![("u", Arc::new(Int64Array::from(vec![1]))), ("v", Arc::new(Int64Array::from(vec![1])))],
    );
    let json = old.to_json().unwrap();
    let same: Features = features("u: {type: id, dim: 8}, v: {type: id, dim: 2}");
    assert_eq!(same.load(&json).unwrap().digest(), old.digest());
    let other = features("u: {type: id, dim: 2, prefix: x}, w: {type: id, dim: 2}");
    let error = other.load(&json).unwrap_err().to_string();
    for part in ["`u` has changed", "`w` is new", "`v` is missing"] {
        assert!(error.contains(part), "{error}");
    }
    let pair = ", c: {type: cross, features: [u, v], dim: 2}";
    let [with, without] = [2, 0].map(|dim| {
        features(&format!(
            "u: {{type: id, values: integer, dim: 2}}, v: {{type: id, values: integer, dim: {dim}}}{pair}"
        ))
    });
    for (one, other, said) in [
        (&with, &without, "`v` has no embedding, but had one"),
        (&without, &with, "`v` has an embedding, but had none"),
    ] {
        let json = one.transform(Fitted::default()).unwrap().to_json().unwrap();
        let error = other.load(&json).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    assert!(
        features("v: {type: id, dim: 2}, u: {type: id, dim: 2}")
            .load(&json)
            .unwrap_err()
            .to_string()
            .contains("order")
    );
}

proptest! {
    #[test]
    fn any_split_and_order_gives_equal_digests(
        values in prop::collection::vec(prop::option::weighted(0.9, -1e6f64..1e6), 4..60),
        cut in 0usize..60,
    ) {
        prop_assume!(values.iter().any(Option::is_some));
        let mut whole = Fitter::new(features(BLOCK));
        whole.update(&data(&values)).unwrap();
        let mut reversed = values.clone();
        reversed.reverse();
        let (one, other) = reversed.split_at(cut.min(values.len()));
        let (mut first, mut second) = (Fitter::new(features(BLOCK)), Fitter::new(features(BLOCK)));
        first.update(&data(one)).unwrap();
        second.update(&data(other)).unwrap();
        first.merge(&second).unwrap();
        let (whole, merged) = (whole.finish().unwrap(), first.finish().unwrap());
        prop_assert_eq!(whole.digest(), merged.digest());
    }
}
