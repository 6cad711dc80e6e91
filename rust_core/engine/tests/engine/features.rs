//! Compares raw features, hash stacks and per-sample weights with a model that has only a map from ids to
//! rows.

use std::collections::BTreeMap;
use std::sync::Arc;

use persia_engine::{Batch, BatchParts, DrainOutcome, Gradient, IdFeature, PushOptions};
use persia_types::schema::{HashStack, Pooling, Schema, Slot, Table};
use persia_types::{Id, Tables};
use proptest::prelude::*;

use crate::plain::PlainTables;
use crate::support::{LONG, engine, feed, plain, push, ready, reproducible};

/// The ids of a sample, each with its weight.
type Sample = Vec<(Id, f32)>;

const DIM: usize = 5;
const WEIGHTED: [&str; 3] = ["weighted", "scaled", "stacked"];

/// A schema with slots of every kind. `weighted` and `scaled` share a table, and so do `raw` and `beside`.
fn mixed_schema() -> Schema {
    let slot = |name: &str, table| Slot { name: name.into(), table, ..Slot::default() };
    let stack = |rounds, buckets| Some(HashStack { rounds, buckets });
    let slots = vec![
        slot("weighted", 0),
        Slot { sqrt_scaling: true, ..slot("scaled", 0) },
        Slot { sample_fixed_size: Some(3), ..slot("raw", 1) },
        slot("beside", 1),
        Slot { hash_stack: stack(2, 7), ..slot("stacked", 2) },
        Slot { hash_stack: stack(3, 5), sample_fixed_size: Some(2), sqrt_scaling: true, ..slot("both", 3) },
        Slot { hash_stack: stack(2, 6), pooling: Pooling::Mean, ..slot("mean", 4) },
    ];
    let tables = (0..5).map(|table| Table::new(format!("t{table}"), DIM)).collect();
    Schema { slots, tables }
}

/// The rows of an id.
fn rows_of(slot: &Slot, id: Id) -> Vec<Id> {
    slot.hash_stack.map_or_else(|| vec![id], |stack| stack.buckets_of(id).collect())
}

/// The ids that are pooled into one vector: those of a sample, or of one of its positions.
fn vectors(slot: &Slot, samples: &[Sample]) -> Vec<Sample> {
    match slot.sample_fixed_size {
        None => samples.to_vec(),
        Some(size) => {
            let place = |sample: &Sample, place: usize| sample.get(place).copied().into_iter().collect();
            samples.iter().flat_map(|sample| (0..size as usize).map(move |at| place(sample, at))).collect()
        }
    }
}

fn divisor(slot: &Slot, ids: usize) -> f32 {
    let rounds = slot.hash_stack.map_or(1, |stack| stack.rounds as usize);
    let mean = if slot.pooling == Pooling::Mean { ids.max(1) as f32 } else { 1.0 };
    mean * if slot.sqrt_scaling { ((ids * rounds).max(1) as f32).sqrt() } else { 1.0 }
}

/// A weight that depends on the table, the id and the column.
fn weight(table: usize, id: Id, column: usize) -> f32 {
    ((id * 7 + column as u64 * 3 + table as u64) % 23) as f32 * 0.37 - 4.0
}

fn filled(schema: &Schema, lists: &[Vec<Sample>]) -> PlainTables {
    let tables = plain(schema);
    for (slot, samples) in schema.slots.iter().zip(lists) {
        for (id, _) in samples.iter().flatten() {
            for row in rows_of(slot, *id) {
                tables.set(slot.table, row, (0..DIM).map(|column| weight(slot.table, row, column)).collect());
            }
        }
    }
    tables
}

fn expected_output(slot: &Slot, samples: &[Sample]) -> Vec<f32> {
    let vector = |ids: &Sample| -> Vec<f32> {
        let sum = |column| {
            let rows = ids.iter().flat_map(|(id, w)| rows_of(slot, *id).into_iter().map(move |row| (row, w)));
            rows.fold(0.0f32, |sum, (row, w)| sum + weight(slot.table, row, column) * w)
        };
        (0..DIM).map(|column| sum(column) / divisor(slot, ids.len())).collect()
    };
    vectors(slot, samples).iter().flat_map(vector).collect()
}

/// The summed gradient of each row of each table, slot by slot, each in batch order.
fn expected_gradients(
    schema: &Schema,
    lists: &[Vec<Sample>],
    gradients: &[Vec<f32>],
) -> BTreeMap<(usize, Id), Vec<f32>> {
    let mut sums: BTreeMap<(usize, Id), Vec<f32>> = BTreeMap::new();
    for ((slot, samples), gradient) in schema.slots.iter().zip(lists).zip(gradients) {
        for (ids, gradient) in vectors(slot, samples).iter().zip(gradient.chunks(DIM)) {
            let factor = 1.0 / divisor(slot, ids.len());
            for (id, w) in ids {
                for row in rows_of(slot, *id) {
                    let sum = sums.entry((slot.table, row)).or_insert_with(|| vec![0.0; DIM]);
                    sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g * (factor * w));
                }
            }
        }
    }
    sums
}

fn batch(schema: &Schema, lists: &[Vec<Sample>]) -> Batch {
    let feature = |(slot, samples): (&Slot, &Vec<Sample>)| {
        let mut offsets = vec![0];
        for sample in samples {
            offsets.push(offsets[offsets.len() - 1] + sample.len());
        }
        let (ids, weights): (Vec<Id>, Vec<f32>) = samples.iter().flatten().copied().unzip();
        let feature = IdFeature::lists(slot.name.as_str(), &ids, &offsets).unwrap();
        if WEIGHTED.contains(&slot.name.as_str()) { feature.with_weights(&weights).unwrap() } else { feature }
    };
    let id_features = schema.slots.iter().zip(lists).map(feature).collect();
    Batch::new(BatchParts { id_features, requires_grad: true, ..Default::default() }).unwrap()
}

fn lists() -> impl Strategy<Value = Vec<Vec<Sample>>> {
    let schema = mixed_schema();
    (1usize..6).prop_flat_map(move |samples| {
        let slot = |slot: &Slot| {
            let weighted = WEIGHTED.contains(&slot.name.as_str());
            let weight = move |eighths: i8| if weighted { f32::from(eighths) / 8.0 } else { 1.0 };
            let entry = (0u64..9, any::<i8>()).prop_map(move |(id, eighths)| (id, weight(eighths)));
            prop::collection::vec(prop::collection::vec(entry, 0..5), samples)
        };
        schema.slots.iter().map(slot).collect::<Vec<_>>()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The outputs and the updated rows must have the bits of the model, after a round trip of the batch through the wire
    /// format.
    #[test]
    fn a_step_equals_the_model(lists in lists()) {
        let schema = mixed_schema();
        let tables = Arc::new(filled(&schema, &lists));
        let engine = engine(tables.clone(), &schema, reproducible());
        let pipeline = engine.pipeline().unwrap();
        let sent = batch(&schema, &lists).to_bytes().unwrap();
        feed(&pipeline, Batch::from_bytes(&sent).unwrap());
        let mut looked = ready(&pipeline);
        for ((slot, samples), output) in schema.slots.iter().zip(&lists).zip(&looked.outputs) {
            prop_assert_eq!(output.as_ref(), &expected_output(slot, samples)[..], "{}", &slot.name);
            let Some(size) = slot.sample_fixed_size.map(|size| size as usize) else {
                prop_assert!(output.raw().is_none());
                continue;
            };
            let raw = output.raw().unwrap();
            let mask: Vec<bool> =
                samples.iter().flat_map(|sample| (0..size).map(|place| place < sample.len())).collect();
            prop_assert_eq!((raw.places, &raw.mask), (size, &mask));
            let truncated: usize = samples.iter().map(|sample| sample.len().saturating_sub(size)).sum();
            prop_assert_eq!(raw.truncated, truncated);
        }
        let truncated: u64 = engine.stats().slots.iter().map(|slot| slot.truncated).sum();
        prop_assert_eq!(truncated, looked.outputs.iter().filter_map(|o| o.raw()).map(|raw| raw.truncated as u64).sum::<u64>());

        let gradients: Vec<Vec<f32>> =
            looked.outputs.iter().map(|output| output.as_ref().iter().map(|v| v * 0.3 + 0.1).collect()).collect();
        let boxed = gradients.iter().map(|g| Some(Box::new(g.clone()) as Gradient)).collect();
        let before: Vec<_> = (0..5).map(|table| tables.weights(table)).collect();
        looked.ticket.take().unwrap().push(boxed, PushOptions::default()).unwrap();
        prop_assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
        let sums = expected_gradients(&schema, &lists, &gradients);
        for (table, before) in before.iter().enumerate() {
            for (id, after) in tables.weights(table) {
                let expected: Vec<f32> = match sums.get(&(table, id)) {
                    Some(sum) => before[&id].iter().zip(sum).map(|(weight, g)| weight - g).collect(),
                    None => before[&id].clone(),
                };
                prop_assert_eq!(after, expected, "table {} row {}", table, id);
            }
        }
        prop_assert_eq!(engine.stats().push_report.rows_applied, sums.len() as u64);
    }
}

#[test]
fn truncated_ids_are_neither_inserted_nor_updated() {
    let schema = Schema {
        slots: vec![Slot { name: "raw".into(), sample_fixed_size: Some(2), ..Slot::default() }],
        tables: vec![Table::new("t", DIM)],
    };
    let tables = Arc::new(plain(&schema));
    let engine = engine(tables.clone(), &schema, reproducible());
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&schema, &[vec![vec![(1, 1.0), (2, 1.0), (3, 1.0)]]]));
    push(ready(&pipeline), 1.0);
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    assert_eq!(tables.stats().unwrap().rows, [2]);
}

#[test]
fn a_hash_stack_holds_no_more_rows_than_buckets() {
    let stack = HashStack { rounds: 2, buckets: 50 };
    let schema = Schema {
        slots: vec![Slot { name: "a".into(), hash_stack: Some(stack), ..Slot::default() }],
        tables: vec![Table::new("t", DIM)],
    };
    let tables = Arc::new(plain(&schema));
    let engine = engine(tables.clone(), &schema, reproducible());
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&schema, &[(0..5000).map(|id| vec![(id, 1.0)]).collect::<Vec<_>>()]));
    push(ready(&pipeline), 1.0);
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    assert_eq!(tables.stats().unwrap().rows, [100]);
}

#[test]
fn weights_without_a_sum_end_the_pipeline_and_are_named() {
    let schema = Schema {
        slots: vec![Slot { name: "weighted".into(), pooling: Pooling::Mean, ..Slot::default() }],
        tables: vec![Table::new("t", DIM)],
    };
    let engine = engine(Arc::new(plain(&schema)), &schema, reproducible());
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&schema, &[vec![vec![(1, 0.5)]]]));
    let error = pipeline.next(LONG).unwrap_err().to_string();
    assert!(error.contains("\"weighted\"") && error.contains("pooling: mean"), "{error}");
}
