//! Tests the rule and the count of each kind of unusual value.

use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use persia_features::hash::{hash_cross, hash_text};
use persia_features::{Transform, Unusual};

use crate::{SERVING, STRICT, batch, features, from_json, ids};

const NULL: &[u8] = b"\xffnull";

fn given(block: &str) -> Transform {
    features(block).transform(Default::default()).unwrap()
}

/// The ids of the column `u` in each record, and the counts of the feature.
fn of(keys: &str, json: &str) -> (Vec<Vec<u64>>, Vec<(&'static str, u64)>) {
    let transform = given(&format!("u: {{dim: 2, {keys}}}"));
    let samples = from_json(&transform, json, SERVING).unwrap();
    let counts = samples.report().counts().remove("u").unwrap_or_default();
    (ids(&samples), counts.into_iter().collect())
}

#[test]
fn null_empty_and_missing_have_separate_rules() {
    let json = r#"[{"u": null}, {"u": ""}, {}]"#;
    let (null, empty) = (hash_text(NULL), hash_text(b""));
    let counts = vec![("empty", 1), ("missing", 1), ("null", 1)];
    let id = "type: id, values: string";
    assert_eq!(of(id, json), (vec![vec![null], vec![empty], vec![null]], counts.clone()));
    let skip = format!("{id}, if_null: skip");
    assert_eq!(of(&skip, json), (vec![vec![], vec![empty], vec![]], counts.clone()));
    let skip = format!("{id}, if_empty: skip, if_missing: skip");
    assert_eq!(of(&skip, json), (vec![vec![null], vec![], vec![]], counts.clone()));
    let as_null = format!("{id}, if_empty: null");
    assert_eq!(of(&as_null, json), (vec![vec![null], vec![null], vec![null]], counts));
}

#[test]
fn wrong_types_in_serving_are_nulls_that_are_counted() {
    let null = vec![hash_text(NULL)];
    let json = r#"[{"u": 5}, {"u": 1.5}, {"u": {"a": 1}}, {"u": [1]}, {"u": true}]"#;
    assert_eq!(of("type: id, values: string", json), (vec![null.clone(); 5], vec![("wrong_type", 5)]));
    let (found, counts) = of("type: id, values: integer", json);
    assert_eq!(found, [vec![5], null.clone(), null.clone(), null.clone(), vec![1]]);
    assert_eq!(counts, [("wrong_type", 3)]);
    let (found, counts) =
        of("type: date, part: hour", r#"[{"u": "noon"}, {"u": 5}, {"u": "2024-01-01T05:00Z"}]"#);
    assert_eq!((found, counts), (vec![null.clone(), null.clone(), vec![5]], vec![("wrong_type", 2)]));
    let (found, counts) = of("type: bucket, boundaries: [1]", r#"[{"u": "x"}, {"u": 1}, {"u": 1.01}]"#);
    assert_eq!((found, counts), (vec![null, vec![0], vec![1]], vec![("wrong_type", 1)]));
}

#[test]
fn lists_skip_what_is_not_there() {
    let json = r#"[{"u": ["a", null, "", "b"]}, {"u": []}, {"u": null}, {}, {"u": "a"}]"#;
    let (a, b) = (hash_text(b"a"), hash_text(b"b"));
    let (found, counts) = of("type: bag, values: string", json);
    assert_eq!(found, [vec![a, b], vec![], vec![], vec![], vec![]]);
    assert_eq!(counts, [("empty", 1), ("missing", 1), ("null", 2), ("wrong_type", 1)]);
    let (found, counts) = of("type: sequence, values: integer, last: 2", r#"[{"u": [1, 2, 3]}, {"u": [4]}]"#);
    assert_eq!((found, counts), (vec![vec![2, 3], vec![4]], vec![("truncated", 1)]));
}

#[test]
fn strings_are_split_at_the_separator() {
    let json = r#"[{"u": "a|b"}, {"u": "a"}, {"u": ""}, {"u": "|b|"}]"#;
    let (a, b) = (hash_text(b"a"), hash_text(b"b"));
    let (found, counts) = of("type: bag, values: string, separator: '|'", json);
    assert_eq!((found, counts), (vec![vec![a, b], vec![a], vec![], vec![b]], vec![("empty", 3)]));
    let (found, _) = of("type: bag, values: string, separator: ', '", r#"[{"u": "a, b"}]"#);
    assert_eq!(found, [[a, b]]);
    let json = r#"[{"u": "1|-2||x"}]"#;
    let (found, counts) = of("type: sequence, values: integer, separator: '|', last: 9", json);
    assert_eq!(found, [vec![1, -2i64 as u64]]);
    assert_eq!(counts, [("null", 1), ("wrong_type", 1)]);
}

#[test]
fn weights_follow_their_values() {
    let transform = given("u: {type: bag, dim: 2, values: integer, weights: w, separator: ';'}");
    let json = r#"[{"u": [1, null, 3], "w": [0.5, 9, -2]}, {"u": "4;5", "w": "1;2.5"}, {"u": [6], "w": null},
                   {"u": [7, 8], "w": [1]}, {"u": [], "w": []}, {"u": "", "w": ""}, {"u": [9], "w": [null]}]"#;
    let samples = from_json(&transform, json, SERVING).unwrap();
    let found = ids(&samples);
    assert_eq!(found, [vec![1, 3], vec![4, 5], vec![6], vec![], vec![], vec![], vec![]]);
    assert_eq!(samples.ids()[0].weights.as_deref(), Some(&[0.5, -2.0, 1.0, 2.5, 1.0][..]));
    let error = from_json(&transform, json, STRICT).unwrap_err().to_string();
    assert!(error.contains("u (line 1), row 3: found 1 as the number of weights, allowed: 2"), "{error}");
}

#[test]
fn buckets_count_the_boundaries_below() {
    let json = r#"[{"u": -5}, {"u": 10}, {"u": 10.5}, {"u": 20}, {"u": 1e9}, {"u": null}, {"u": 1e300}]"#;
    let (found, counts) = of("type: bucket, boundaries: [10, 20]", json);
    let null = hash_text(NULL);
    assert_eq!(found.concat(), [0, 0, 1, 1, 2, null, null]);
    assert_eq!(counts, [("not_finite", 1), ("null", 1)]);
    let (found, _) = of("type: bucket, boundaries: [10, 20], prefix: 'age'", r#"[{"u": 11}]"#);
    assert_eq!(found, [[hash_text(b"age1")]]);
}

#[test]
fn crosses_are_ordered_and_empty_where_a_part_is() {
    let block = "a: {type: id, values: integer, dim: 0, if_null: skip}, b: {type: id, values: integer, dim: 0}, \
                 t: {type: bag, values: integer, dim: 0}, ab: {type: cross, features: [a, b], dim: 2}, \
                 ba: {type: cross, features: [b, a], dim: 2}, atb: {type: cross, features: [a, t, b], dim: 2}";
    let json =
        r#"[{"a": 1, "b": 2, "t": [7, 8]}, {"a": null, "b": 2, "t": [7]}, {"a": 1, "b": null, "t": []}]"#;
    let samples = from_json(&given(block), json, SERVING).unwrap();
    let all: Vec<Vec<Vec<u64>>> = samples
        .ids()
        .iter()
        .map(|ids| (0..3).map(|row| ids.ids[ids.bounds(row)].to_vec()).collect())
        .collect();
    let null = hash_text(NULL);
    assert_eq!(all[0], [vec![hash_cross(&[1, 2])], vec![], vec![hash_cross(&[1, null])]]);
    assert_eq!(all[1], [vec![hash_cross(&[2, 1])], vec![], vec![hash_cross(&[null, 1])]]);
    assert_eq!(all[2], [vec![hash_cross(&[1, 7, 2]), hash_cross(&[1, 8, 2])], vec![], vec![]]);
}

/// The floats of a dense feature with these keys.
fn dense(keys: &str, values: &[f64]) -> (Vec<f32>, Vec<(&'static str, u64)>) {
    let transform = given(&format!("u: {{type: id, values: integer, dim: 2}}, x: {{type: dense{keys}}}"));
    let column: ArrayRef = Arc::new(Float64Array::from(values.to_vec()));
    let samples = transform.batches([&batch(vec![("x", column)])], SERVING).unwrap();
    let counts = samples.report().counts().remove("x").unwrap_or_default();
    (samples.dense().to_vec(), counts.into_iter().collect())
}

#[test]
fn numbers_are_clipped_then_logarithms_then_scaled() {
    let odd = [f64::NAN, f64::INFINITY, 1e300];
    assert_eq!(dense("", &[1.5, -0.1, 7.0]).0, [1.5, -0.1, 7.0]);
    assert_eq!(dense("", &odd), (vec![0.0; 3], vec![("not_finite", 3)]));
    assert_eq!(dense(", missing: 5", &odd).0, [5.0; 3]);
    assert_eq!(dense(", clip: [0, 2]", &[-1.0, 1.0, 3.0]).0, [0.0, 1.0, 2.0]);
    let log = dense(", log1p: true", &[0.0, 1.0, -1.0, 3.0e38]).0;
    assert_eq!(log, [0.0, std::f32::consts::LN_2, -std::f32::consts::LN_2, 3.0e38f32.ln()]);
    assert_eq!(dense(", standardise: {mean: 3, std: 2}", &[3.0, 7.0, f64::NAN]).0, [0.0, 2.0, 0.0]);
    assert_eq!(dense(", standardise: {mean: 3, std: 2}, missing: 7", &[f64::NAN]).0, [2.0]);
    let scaled = dense(", min_max: {min: 0, max: 4}", &[0.0, 1.0, 4.0, 5.0, -1.0]);
    assert_eq!(scaled, (vec![0.0, 0.25, 1.0, 1.0, 0.0], vec![("out_of_range", 2)]));
    let overflow = dense(", standardise: {mean: 0, std: 1e-30}", &[1e38]);
    assert_eq!(overflow, (vec![0.0], vec![("not_finite", 1)]));
}

#[test]
fn a_feature_twice_over_one_column_reads_it_twice() {
    let block =
        "h: {type: date, column: at, part: hour, dim: 2}, w: {type: date, column: at, part: weekday, dim: 2}";
    let samples = from_json(&given(block), r#"[{"at": "2024-05-01 10:00"}]"#, STRICT).unwrap();
    assert_eq!((samples.ids()[0].ids[0], samples.ids()[1].ids[0]), (10, 2));
}

#[test]
fn integers_are_times_only_with_a_unit() {
    let json = r#"[{"u": 7200}, {"u": null}]"#;
    assert_eq!(of("type: date, part: hour, unit: s", json).0[0], [2]);
    assert_eq!(of("type: date, part: hour", json).1, [("null", 1), ("wrong_type", 1)]);
}

#[test]
fn a_date_without_a_time_has_no_hour() {
    let json = r#"[{"u": "2024-05-01"}, {"u": "2024-05-01 00:00"}]"#;
    for part in ["minute", "hour"] {
        let (found, counts) = of(&format!("type: date, part: {part}"), json);
        assert_eq!(found, [vec![hash_text(NULL)], vec![0]]);
        assert_eq!(counts, [("wrong_type", 1)]);
    }
    assert_eq!(of("type: date, part: day", json), (vec![vec![1]; 2], vec![]));
    let transform = given("u: {type: date, part: hour, dim: 2}");
    let error = from_json(&transform, json, STRICT).unwrap_err().to_string();
    let said = "found the string \"2024-05-01\", allowed: a timestamp with a time of day, such as";
    assert!(error.contains(said), "{error}");
}

#[test]
fn reports_add_up_and_take_unseen_ids() {
    let transform = given("u: {type: id, values: string, dim: 2}");
    let mut sum = persia_features::Report::default();
    for json in [r#"[{"u": null}]"#, r#"[{"u": "x"}, {}]"#] {
        sum.add(from_json(&transform, json, SERVING).unwrap().report());
    }
    sum.add_unseen("u", 3);
    assert_eq!((sum.rows(), sum.count("u", Unusual::Null), sum.count("u", Unusual::Missing)), (3, 1, 1));
    assert_eq!(sum.count("u", Unusual::Unseen), 3);
    let json = serde_json::to_string(&sum).unwrap();
    assert_eq!(json, r#"{"rows":3,"counts":{"u":{"missing":1,"null":1,"unseen":3}}}"#);
}

#[test]
fn nothing_is_made_of_nothing() {
    let transform = given("u: {type: id, values: string, dim: 2}, x: {type: dense}");
    assert_eq!(from_json(&transform, "[]", SERVING).unwrap().rows(), 0);
    let empty: Vec<RecordBatch> = Vec::new();
    assert_eq!(transform.batches(&empty, STRICT).unwrap().rows(), 0);
    let none: ArrayRef = Arc::new(StringArray::from(Vec::<&str>::new()));
    let batch = batch(vec![("u", none), ("x", Arc::new(Float64Array::from(Vec::<f64>::new())))]);
    assert_eq!(transform.batches([&batch], STRICT).unwrap().rows(), 0);
}
