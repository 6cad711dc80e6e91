//! Tests with arbitrary JSON records: nothing panics, every row keeps its position, and every float is
//! finite.

use persia_features::{Records, Transform};
use proptest::prelude::*;

use crate::{SERVING, STRICT, features};

const BLOCK: &str = "
  s: {type: id, dim: 2, values: string, lower: true, prefix: p}, i: {type: id, dim: 2, values: integer, if_null: skip},
  t: {type: bag, dim: 2, values: string, separator: ',', weights: w},
  q: {type: sequence, dim: 2, values: integer, separator: ' ', last: 2},
  b: {type: bucket, dim: 2, boundaries: [-1, 0, 1]}, d: {type: date, dim: 2, part: day_of_year, timezone: America/New_York, unit: ns},
  x: {type: dense, log1p: true, standardise: {mean: 0, std: 1e-20}}, m: {type: dense, min_max: {min: 0, max: 1e-30}},
  c: {type: cross, dim: 2, features: [s, i, d]}, n: {type: cross, dim: 2, features: [b, u]}, u: {type: bag, column: t, values: integer, dim: 0}";

fn value() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<u64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        ".{0,12}".prop_map(Into::into),
        "[0-9T:. Z+-]{0,25}".prop_map(Into::into),
        "-?[0-9]{1,22}( -?[0-9]{0,22}){0,3}".prop_map(Into::into),
    ];
    leaf.prop_recursive(2, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::hash_map("[a-z]", inner, 0..3)
                .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
        ]
    })
}

fn transform() -> Transform {
    features(BLOCK).transform(Default::default()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn no_record_crashes(rows in prop::collection::vec(prop::collection::hash_map("[sitwqbdxm]", value(), 0..10), 0..6)) {
        let text = serde_json::to_string(&rows).unwrap();
        let records = Records::from_json(text.as_bytes()).unwrap();
        let transform = transform();
        let samples = transform.records(&records, SERVING).unwrap();
        prop_assert_eq!(samples.rows(), rows.len());
        for ids in samples.ids() {
            prop_assert_eq!(ids.rows(), rows.len());
            let ends: Vec<usize> = (0..rows.len()).map(|row| ids.bounds(row).end).collect();
            prop_assert_eq!(ends.last().copied().unwrap_or(0), ids.ids.len());
            if let Some(weights) = &ids.weights {
                prop_assert!(weights.len() == ids.ids.len() && weights.iter().all(|weight| weight.is_finite()));
            }
        }
        prop_assert_eq!(samples.dense().len(), rows.len() * 2);
        prop_assert!(samples.dense().iter().all(|float| float.is_finite()));
        // For values that it does not refuse, strict mode gives the same result.
        if let Ok(strict) = transform.records(&records, STRICT) {
            prop_assert_eq!(strict, samples);
        }
    }

    #[test]
    fn no_text_crashes(text in ".{0,80}") {
        if let Ok(records) = Records::from_json(text.as_bytes()) {
            transform().records(&records, SERVING).unwrap();
        }
        let _ = Transform::from_json(&text);
    }
}
