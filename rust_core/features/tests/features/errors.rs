//! Tests that errors in training data are reported together, with feature, column and row.

use std::sync::Arc;

use arrow_array::{ArrayRef, Date32Array, Float64Array, Int64Array, NullArray, StringArray};
use persia_features::{Features, Fitter, Options, Records};

use crate::{STRICT, batch, features, from_json};

#[test]
fn mistakes_of_columns_are_reported_together() {
    let text = "features:
  user: {type: id, dim: 2}
  score: {type: id, dim: 2}
  tags: {type: bag, dim: 2}
  price: {type: dense}
  age: {type: bucket, dim: 2, boundaries: [3]}
  hour: {type: date, column: day, part: hour, dim: 2}
  when: {type: date, column: score_, part: hour, dim: 2}
labels:
  clicked: {column: clik}
  bought: {column: name}
";
    let features = Features::parse(text, "persia.yml").unwrap().config;
    let name: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
    let number: ArrayRef = Arc::new(Float64Array::from(vec![1.0]));
    let data = batch(vec![
        ("usr", name.clone()),
        ("score", number.clone()),
        ("tags", name.clone()),
        ("price", name.clone()),
        ("age", Arc::new(NullArray::new(1))),
        ("day", Arc::new(Date32Array::from(vec![1]))),
        ("score_", Arc::new(Int64Array::from(vec![1]))),
        ("click", number),
        ("name", name),
    ]);
    let error = Fitter::new(features).update(&data).unwrap_err().to_string();
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(
        lines,
        [
            "the data does not fit the features: 8 errors",
            "  user (line 2): there is no column `user`, did you mean `usr`?",
            "  score (line 3): column `score` is Float64, allowed: integers or strings: floats cannot be ids; cast \
             whole numbers to integers, or use `type: bucket`",
            "  tags (line 4): column `tags` is Utf8, allowed: lists, or strings if `separator` is set",
            "  price (line 5): column `price` is Utf8, allowed: numbers; declare its type where the data is read, or \
             cast it",
            "  hour (line 7): column `day` is Date32, allowed: timestamps: a date has no time of day",
            "  when (line 8): column `score_` is Int64, allowed: timestamps, or integers if `unit` says what they \
             count: s, ms, us, ns",
            "  clicked (line 10): there is no column `clik`, did you mean `click`?",
            "  bought (line 11): column `name` is Utf8, allowed: numbers; for strings, set `equals` to a string",
        ]
    );
}

#[test]
fn wrong_values_are_reported_with_their_rows() {
    let transform = features("u: {type: id, values: integer, dim: 2}, x: {type: dense}");
    let transform = transform.transform(Default::default()).unwrap();
    let json =
        r#"[{"u": 1, "x": 1, "y": 0}, {"u": "7", "x": "a string", "y": 2}, {"u": "8", "x": 1, "y": null}]"#;
    let options = Options { first_row: 1_234_566, ..Options::default() };
    let error = from_json(&transform, json, options).unwrap_err().to_string();
    let lines: Vec<&str> = error.lines().skip(1).collect();
    assert_eq!(
        lines,
        [
            "  u (line 1), row 1234567: found the string \"7\", allowed: an integer, as declared or as in the \
             training data (one of 2 wrong values)",
            "  x (line 1), row 1234567: found the string \"a string\", allowed: a number",
            "  y (line 2), row 1234567: found the integer 2, allowed: 0 or 1; for other numbers, set \
             `greater_than`, `equals` or `loss: mse`; remove rows without a label (one of 2 wrong values)",
        ]
    );
}

#[test]
fn a_wrong_id_is_reported_before_a_wrong_weight() {
    let transform = features("u: {type: bag, values: integer, weights: w, dim: 2}");
    let transform = transform.transform(Default::default()).unwrap();
    let said = |json| from_json(&transform, json, STRICT).unwrap_err().to_string();
    let error = said(r#"[{"u": [1], "w": ["heavy"], "y": 0}, {"u": ["one"], "w": [2], "y": 0}]"#);
    let expected = "u (line 1), row 1: found the string \"one\", allowed: an integer, as declared or as in the \
                    training data (one of 2 wrong values)";
    assert!(error.contains(expected), "{error}");
    let error = said(r#"[{"u": [1], "w": ["heavy"], "y": 0}]"#);
    let expected = "u (line 1), row 0: found the string \"heavy\" as a weight, allowed: a number";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_type_that_changed_since_the_fit_is_refused() {
    let features = features("u: {type: id, dim: 2}");
    let transform = crate::fitted(&features, vec![("u", Arc::new(StringArray::from(vec!["7"])))]);
    let other = batch(vec![("u", Arc::new(Int64Array::from(vec![7])) as ArrayRef)]);
    let error = transform.batches([&other], STRICT).unwrap_err().to_string();
    assert!(
        error.contains("column `u` is Int64, allowed: strings, as declared or as in the training data"),
        "{error}"
    );
}

#[test]
fn the_same_column_twice_is_refused() {
    let transform = features("u: {type: id, values: integer, dim: 2}").transform(Default::default()).unwrap();
    let one: ArrayRef = Arc::new(Int64Array::from(vec![7]));
    let twice = batch(vec![("u", one.clone()), ("u", one)]);
    let error = transform.batches([&twice], STRICT).unwrap_err().to_string();
    assert!(error.contains("several columns `u`"), "{error}");
}

#[test]
fn text_that_is_no_json_is_refused_with_its_place() {
    for (text, part) in [
        ("[{\"u\": 1}, 5]", "expected an object"),
        ("{\"u\": NaN}", "line 1 column"),
        ("[{\"u\": 1}", "EOF"),
        ("[[[]]]", "cannot read the records as JSON objects"),
    ] {
        let error = Records::from_json(text.as_bytes()).unwrap_err();
        assert!(error.contains(part) || error.contains("as JSON objects"), "{error}");
    }
    assert_eq!(Records::from_json(b"{\"u\": 1}\n{\"u\": 2}\n").unwrap().len(), 2);
    assert!(Records::from_json(b"").unwrap().is_empty());
}
