//! Compares pooling and segment sums with explicit formulas, and gradients with finite differences.

use std::collections::BTreeMap;
use std::sync::Arc;

use persia_engine::{Batch, BatchParts, DrainOutcome, EngineOptions, Gradient, IdFeature, PushOptions};
use persia_types::Mode;
use persia_types::schema::{Pooling, Schema};
use proptest::prelude::*;

use crate::plain::PlainTables;
use crate::support::{LONG, engine, feed, plain, ready, reproducible, schema};

/// The ids of each sample of each feature.
type Lists = Vec<Vec<Vec<u64>>>;

fn batch(names: &[&str], lists: &Lists) -> Batch {
    let feature = |(name, samples): (&&str, &Vec<Vec<u64>>)| {
        let mut offsets = vec![0];
        for sample in samples {
            offsets.push(offsets[offsets.len() - 1] + sample.len());
        }
        IdFeature::lists(*name, &samples.concat(), &offsets).unwrap()
    };
    let id_features = names.iter().zip(lists).map(feature).collect();
    Batch::new(BatchParts { id_features, requires_grad: true, ..Default::default() }).unwrap()
}

/// A schema in which slots a and c share a table, b is a mean, c uses sqrt scaling, and d uses both.
fn mixed_schema(dim: usize) -> Schema {
    let slots = [
        ("a", 0, Pooling::Sum, false),
        ("b", 1, Pooling::Mean, false),
        ("c", 0, Pooling::Sum, true),
        ("d", 2, Pooling::Mean, true),
    ];
    schema(&slots, &[dim, dim, 3])
}

fn divisor(schema: &Schema, slot: usize, ids: usize) -> f32 {
    let slot = &schema.slots[slot];
    let n = ids.max(1) as f32;
    let mean = if slot.pooling == Pooling::Mean { n } else { 1.0 };
    mean * if slot.sqrt_scaling { n.sqrt() } else { 1.0 }
}

/// A weight that depends on the table, the id and the column.
fn weight(table: usize, id: u64, column: usize) -> f32 {
    ((id * 7 + column as u64 * 3 + table as u64) % 23) as f32 * 0.37 - 4.0
}

fn filled(schema: &Schema, lists: &Lists) -> PlainTables {
    let tables = plain(schema);
    for (slot, samples) in schema.slots.iter().zip(lists) {
        for &id in samples.iter().flatten() {
            let dim = schema.tables[slot.table].dim;
            tables.set(slot.table, id, (0..dim).map(|column| weight(slot.table, id, column)).collect());
        }
    }
    tables
}

/// The input of the model, computed with explicit formulas.
fn pooled(schema: &Schema, lists: &Lists) -> Vec<Vec<f32>> {
    let slots = schema.slots.iter().enumerate().zip(lists);
    slots
        .map(|((index, slot), samples)| {
            let dim = schema.tables[slot.table].dim;
            let sample = |ids: &Vec<u64>| -> Vec<f32> {
                let sum = |column| ids.iter().fold(0.0f32, |sum, id| sum + weight(slot.table, *id, column));
                (0..dim).map(|column| sum(column) / divisor(schema, index, ids.len())).collect()
            };
            samples.iter().flat_map(sample).collect()
        })
        .collect()
}

/// The summed gradient of each id of each table, slot by slot, each in batch order.
fn summed(
    schema: &Schema,
    lists: &Lists,
    gradients: &[Option<Vec<f32>>],
    scale: f32,
) -> Vec<BTreeMap<u64, Vec<f32>>> {
    let mut sums: Vec<BTreeMap<u64, Vec<f32>>> = vec![BTreeMap::new(); schema.tables.len()];
    for (index, slot) in schema.slots.iter().enumerate() {
        let Some(gradient) = &gradients[index] else { continue };
        let dim = schema.tables[slot.table].dim;
        for (sample, ids) in lists[index].iter().enumerate() {
            let factor = 1.0 / divisor(schema, index, ids.len());
            for id in ids {
                let sum = sums[slot.table].entry(*id).or_insert_with(|| vec![0.0; dim]);
                for column in 0..dim {
                    sum[column] += gradient[sample * dim + column] * factor;
                }
            }
        }
    }
    let values = sums.iter_mut().flat_map(BTreeMap::values_mut);
    values.flatten().for_each(|value| *value *= scale);
    sums
}

fn lists() -> impl Strategy<Value = Lists> {
    (1usize..7).prop_flat_map(|samples| {
        let ids = prop::collection::vec(0u64..12, 0..6);
        prop::collection::vec(prop::collection::vec(ids, samples), 4)
    })
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The results must be bit-identical, because the engine adds in the documented order.
    #[test]
    fn a_step_equals_the_formulas(
        lists in lists(),
        dim in prop::sample::select(vec![1usize, 3, 16, 19, 64, 131, 208]),
        absent in prop::option::of(0usize..4),
        scale in prop::sample::select(vec![1.0f32, 0.5, 0.1]),
    ) {
        let schema = mixed_schema(dim);
        let tables = Arc::new(filled(&schema, &lists));
        let options = EngineOptions { gradient_scale: 0.5, ..reproducible() };
        let engine = engine(tables.clone(), &schema, options);
        let pipeline = engine.pipeline().unwrap();
        feed(&pipeline, batch(&NAMES, &lists));
        let mut looked = ready(&pipeline);
        let outputs: Vec<Vec<f32>> = looked.outputs.iter().map(|output| output.as_ref().to_vec()).collect();
        prop_assert_eq!(&outputs, &pooled(&schema, &lists));

        let gradients: Vec<Option<Vec<f32>>> = outputs
            .iter()
            .enumerate()
            .map(|(index, output)| (absent != Some(index)).then(|| output.iter().map(|v| v * 0.3 + 0.1).collect()))
            .collect();
        let boxed = gradients.iter().map(|g| g.clone().map(|g| Box::new(g) as Gradient)).collect();
        let before: Vec<_> = (0..3).map(|table| tables.weights(table)).collect();
        looked.ticket.take().unwrap().push(boxed, PushOptions { scale, ..Default::default() }).unwrap();
        prop_assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
        let sums = summed(&schema, &lists, &gradients, scale * 0.5);
        for table in 0..3 {
            for (id, after) in tables.weights(table) {
                let expected: Vec<f32> = match sums[table].get(&id) {
                    Some(sum) => before[table][&id].iter().zip(sum).map(|(weight, g)| weight - g).collect(),
                    None => before[table][&id].clone(),
                };
                prop_assert_eq!(after, expected, "table {} id {}", table, id);
            }
        }
        // Ids without a gradient are not pushed, because a gradient of zero would still decay the moments.
        let pushed: usize = sums.iter().map(BTreeMap::len).sum();
        prop_assert_eq!(engine.stats().push_report.rows_applied, pushed as u64);
    }
}

#[test]
fn pushed_gradients_equal_finite_differences() {
    const STEP: f64 = 1e-2;
    let lists: Lists = vec![
        vec![vec![1, 2, 2], vec![], vec![3]],
        vec![vec![1, 1, 4], vec![5], vec![]],
        vec![vec![2, 9], vec![3, 3, 3], vec![1]],
        vec![vec![7, 7], vec![8, 7], vec![6]],
    ];
    let schema = mixed_schema(5);
    let tables = Arc::new(filled(&schema, &lists));
    let engine = engine(tables.clone(), &schema, reproducible());
    let batch = batch(&NAMES, &lists);
    // The loss is half the sum of squares, so its gradient with respect to an output is the output.
    let loss = || -> f64 {
        let outputs = engine.lookup_now(&batch, Mode::Eval).unwrap().outputs;
        outputs.iter().flat_map(|o| o.as_ref().to_vec()).map(|v| 0.5 * f64::from(v) * f64::from(v)).sum()
    };
    let mut differences: Vec<BTreeMap<u64, Vec<f64>>> = Vec::new();
    for table in 0..3 {
        let weights = tables.weights(table);
        let derivative = |id: u64, column: usize| {
            let moved = |by: f64| {
                let mut row = weights[&id].clone();
                row[column] += by as f32;
                tables.set(table, id, row);
                let loss = loss();
                tables.set(table, id, weights[&id].clone());
                loss
            };
            (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
        };
        let row = |(id, row): (&u64, &Vec<f32>)| (*id, (0..row.len()).map(|c| derivative(*id, c)).collect());
        differences.push(weights.iter().map(row).collect());
    }
    let before: Vec<_> = (0..3).map(|table| tables.weights(table)).collect();
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch.clone());
    let mut looked = ready(&pipeline);
    let gradients = looked.outputs.iter().map(|o| Some(Box::new(o.as_ref().to_vec()) as Gradient)).collect();
    looked.ticket.take().unwrap().push(gradients, PushOptions::default()).unwrap();
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    for table in 0..3 {
        for (id, after) in tables.weights(table) {
            for (column, after) in after.iter().enumerate() {
                let pushed = f64::from(before[table][&id][column] - after); // the learning rate is 1
                let expected = differences[table][&id][column];
                assert!((pushed - expected).abs() < 2e-2, "{table} {id} {column}: {pushed} {expected}");
            }
        }
    }
}
