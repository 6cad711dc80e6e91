//! Tests that a row gives the same ids and floats alone, in a batch, in Arrow of any layout, and in JSON.

use std::fmt::Write;
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringBuilder};
use arrow_array::types::{Int8Type, Int32Type, UInt16Type};
use arrow_array::*;
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_schema::{DataType, Field};
use persia_features::{Samples, Transform};
use proptest::prelude::*;

use crate::{SERVING, STRICT, batch, features, from_json};

const BLOCK: &str = "
  user: {type: id, dim: 4, values: string, lower: true},
  item: {type: id, dim: 4, values: integer},
  tags: {type: bag, dim: 4, values: string, weights: weights},
  seen: {type: sequence, dim: 4, values: integer, table: item, last: 3},
  price: {type: dense, log1p: true, standardise: {mean: 1.5, std: 0.7}, missing: 3},
  range: {type: dense, column: price, min_max: {min: 0, max: 50}, clip: [1, 40]},
  step: {type: bucket, column: price, dim: 2, boundaries: [0.1, 1, 10]},
  hour: {type: date, column: at, part: hour_of_week, timezone: Europe/Berlin, dim: 2},
  year: {type: date, column: at, part: year, dim: 0},
  pair: {type: cross, features: [user, item], dim: 2},
  many: {type: cross, features: [labels_, year, item], dim: 2},
  labels_: {type: bag, column: tags, values: string, dim: 0}";

#[derive(Debug, Clone)]
struct Row {
    user: Option<String>,
    item: Option<u32>,
    tags: Option<Vec<(Option<String>, f32)>>,
    seen: Option<Vec<Option<u32>>>,
    price: Option<f32>,
    at: Option<i64>,
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let text = || prop::option::weighted(0.9, "[a-zA-Z0-9äß_]{0,24}");
    let item = || prop::option::weighted(0.9, 0u32..=i32::MAX as u32);
    let row = (
        text(),
        item(),
        prop::option::weighted(0.9, prop::collection::vec((text(), -4.0f32..4.0), 0..5)),
        prop::option::weighted(0.9, prop::collection::vec(item(), 0..6)),
        prop::option::weighted(0.9, prop_oneof![-100.0f32..100.0, Just(0.1f32), Just(f32::MAX), Just(1e-40)]),
        prop::option::weighted(0.9, -3_000_000_000i64..5_000_000_000),
    );
    let row = row.prop_map(|(user, item, tags, seen, price, at)| Row { user, item, tags, seen, price, at });
    prop::collection::vec(row, 1..12)
}

/// The columns in one of several layouts.
fn arrow(rows: &[Row], layout: usize) -> RecordBatch {
    let users = || rows.iter().map(|row| row.user.as_deref());
    let user: ArrayRef = match layout % 4 {
        0 => Arc::new(StringArray::from_iter(users())),
        1 => Arc::new(LargeStringArray::from_iter(users())),
        2 => Arc::new(StringViewArray::from_iter(users())),
        _ => Arc::new(users().collect::<DictionaryArray<UInt16Type>>()),
    };
    let items = || rows.iter().map(|row| row.item);
    let item: ArrayRef = match layout % 5 {
        0 => Arc::new(UInt64Array::from_iter(items().map(|item| item.map(u64::from)))),
        1 => Arc::new(Int64Array::from_iter(items().map(|item| item.map(i64::from)))),
        2 => Arc::new(Int32Array::from_iter(items().map(|item| item.map(|item| item as i32)))),
        3 => Arc::new(UInt32Array::from_iter(items())),
        _ => {
            let keys = Int32Array::from_iter(items().enumerate().map(|(row, item)| item.map(|_| row as i32)));
            let values = Int64Array::from_iter(items().map(|item| item.map(i64::from)));
            Arc::new(DictionaryArray::<Int32Type>::new(keys, Arc::new(values)))
        }
    };
    let prices = || rows.iter().map(|row| row.price);
    let price: ArrayRef = match layout % 2 {
        0 => Arc::new(Float32Array::from_iter(prices())),
        _ => Arc::new(Float64Array::from_iter(prices().map(|price| price.map(f64::from)))),
    };
    let ats = || rows.iter().map(|row| row.at);
    let at: ArrayRef = match layout % 6 {
        0 => Arc::new(TimestampSecondArray::from_iter(ats())),
        1 => Arc::new(TimestampMillisecondArray::from_iter(ats().map(|at| at.map(|at| at * 1000 + 999)))),
        2 => Arc::new(TimestampMicrosecondArray::from_iter(ats().map(|at| at.map(|at| at * 1_000_000)))),
        3 => Arc::new(TimestampNanosecondArray::from_iter(ats().map(|at| at.map(|at| at * 1_000_000_000)))),
        4 => Arc::new(TimestampSecondArray::from_iter(ats()).with_timezone("+05:00")),
        _ => Arc::new(StringArray::from_iter(ats().map(|at| at.map(iso)))),
    };
    let (tags, weights) = tags(rows, layout);
    batch(vec![
        ("user", user),
        ("item", item),
        ("tags", tags),
        ("weights", weights),
        ("seen", seen(rows, layout)),
        ("price", price),
        ("at", at),
    ])
}

fn tags(rows: &[Row], layout: usize) -> (ArrayRef, ArrayRef) {
    let mut tags = ListBuilder::new(StringBuilder::new());
    let mut weights = ListBuilder::new(builder::Float64Builder::new());
    for row in rows {
        for (tag, weight) in row.tags.iter().flatten() {
            tags.values().append_option(tag.as_deref());
            weights.values().append_value(f64::from(*weight));
        }
        tags.append(row.tags.is_some());
        weights.append(row.tags.is_some());
    }
    let (tags, weights) = (tags.finish(), weights.finish());
    if layout.is_multiple_of(2) {
        return (Arc::new(tags), Arc::new(weights));
    }
    // This layout has large lists of dictionary values.
    let values: &StringArray = tags.values().as_any().downcast_ref().unwrap();
    let values: DictionaryArray<Int8Type> = values.iter().collect();
    let field = Arc::new(Field::new("item", values.data_type().clone(), true));
    let offsets = OffsetBuffer::from_lengths((0..rows.len()).map(|row| tags.value_length(row) as usize));
    let tags = LargeListArray::new(field, offsets, Arc::new(values), tags.nulls().cloned());
    (Arc::new(tags), Arc::new(weights))
}

fn seen(rows: &[Row], layout: usize) -> ArrayRef {
    let flat = || rows.iter().flat_map(|row| row.seen.iter().flatten().copied());
    let offsets = || OffsetBuffer::from_lengths(rows.iter().map(|row| row.seen.as_ref().map_or(0, Vec::len)));
    let nulls = Some(NullBuffer::from_iter(rows.iter().map(|row| row.seen.is_some())));
    if layout.is_multiple_of(3) {
        let values = Int64Array::from_iter(flat().map(|item| item.map(i64::from)));
        let field = Arc::new(Field::new("item", DataType::Int64, true));
        return Arc::new(ListArray::new(field, offsets(), Arc::new(values), nulls));
    }
    let values = UInt32Array::from_iter(flat());
    let field = Arc::new(Field::new("item", DataType::UInt32, true));
    Arc::new(ListArray::new(field, offsets(), Arc::new(values), nulls))
}

fn iso(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds).unwrap().to_string()
}

fn json(rows: &[Row]) -> String {
    let list: Vec<serde_json::Value> = rows
        .iter()
        .map(|row| {
            let tags: Option<Vec<_>> =
                row.tags.as_ref().map(|tags| tags.iter().map(|(tag, _)| tag).collect());
            let weights: Option<Vec<_>> =
                row.tags.as_ref().map(|tags| tags.iter().map(|(_, weight)| f64::from(*weight)).collect());
            serde_json::json!({
                "user": row.user, "item": row.item, "tags": tags, "weights": weights, "seen": row.seen,
                "at": row.at.map(iso), "more": {"not": ["used"]},
            })
        })
        .collect();
    let mut text = serde_json::to_string(&list).unwrap();
    // JSON has the shortest decimal representation of each f32.
    for row in rows {
        let mut price = String::from("{\"price\":");
        match row.price {
            Some(value) => write!(price, "{value:?},").unwrap(),
            None => price += "null,",
        }
        text = text.replacen("{\"at\"", &format!("{price}\"at\""), 1);
    }
    text
}

fn same(one: &Samples, other: &Samples) -> bool {
    let bits = |floats: &[f32]| floats.iter().map(|float| float.to_bits()).collect::<Vec<_>>();
    one.ids() == other.ids() && bits(one.dense()) == bits(other.dense())
}

fn transform() -> Transform {
    features(BLOCK).transform(Default::default()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_layout_and_json_give_the_same(rows in rows(), layout in 0usize..60) {
        let transform = transform();
        let plain = transform.batches([&arrow(&rows, 0)], STRICT).unwrap();
        let other = transform.batches([&arrow(&rows, layout)], STRICT).unwrap();
        prop_assert!(same(&plain, &other), "{:?} {:?}", plain, other);
        prop_assert_eq!(plain.report(), other.report());
        for options in [STRICT, SERVING] {
            let records = from_json(&transform, &json(&rows), options).unwrap();
            prop_assert!(same(&plain, &records), "{:?} {:?} {}", plain, records, json(&rows));
            prop_assert_eq!(plain.report(), records.report());
        }
    }

    #[test]
    fn rows_alone_and_in_chunks_give_the_same(rows in rows(), layout in 0usize..60, cut in 0usize..12) {
        let transform = transform();
        let batch = arrow(&rows, layout);
        let whole = transform.batches([&batch], STRICT).unwrap();
        let cut = cut.min(rows.len());
        let (one, other) = (batch.slice(0, cut), batch.slice(cut, rows.len() - cut));
        let chunked = transform.batches([&one, &other], STRICT).unwrap();
        prop_assert_eq!(&whole, &chunked);
        let mut alone = whole.slice(0..0).unwrap();
        for row in 0..rows.len() {
            let one = transform.batches([&batch.slice(row, 1)], STRICT).unwrap();
            prop_assert!(same(&whole.slice(row..row + 1).unwrap(), &one));
            prop_assert!(alone.extend(&one));
        }
        prop_assert!(same(&whole, &alone));
        let places: Vec<usize> = (0..rows.len()).rev().collect();
        let reversed = whole.take(&places).unwrap();
        prop_assert!(same(&whole, &reversed.take(&places).unwrap()));
        prop_assert!(whole.take(&[rows.len()]).is_none() && whole.slice(0..rows.len() + 1).is_none());
    }
}
