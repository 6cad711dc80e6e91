//! Tests that an engine whose device runs the kernels' source, compiled for the CPU, is bit-identical to an
//! engine without a device. Vectors, masks, dense tensors, and rows after many pushes are compared. A real
//! device only adds copies and their order.
#![allow(unsafe_code, clippy::unwrap_used)]

mod host;
mod host_device;

use std::any::Any;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use host::Shim;
use host_device::{HostDevice, Step, sum};
use persia_cuda::kernels::element_bytes;
use persia_engine::device::Device;
use persia_engine::{
    Batch, BatchParts, DrainOutcome, Dtype as Element, Engine, EngineOptions, Gradient as Floats, IdFeature,
    Next, PushOptions, Tensor,
};
use persia_kernels::{Pool, pool};
use persia_store::{Store, StoreOptions};
use persia_types::id::hash_id;
use persia_types::schema::{HashStack, Initializer, Optimizer, Pooling, Slot};
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PerSample, PushReport, PushRequest, Run, Snapshot, Stats,
    TableIds,
};
use persia_types::{Dtype, Schema, Table, Tables, TablesError};

const LONG: Duration = Duration::from_secs(60);
const BATCH: usize = 40;

/// A store that, like a middleware, pools the samples of tables of one dimension.
struct Pools(Store, usize);

impl Tables for Pools {
    fn begin(&self, run: &Run) -> Result<(), TablesError> {
        self.0.begin(run)
    }

    fn pools(&self, dim: usize, _: usize, _: &persia_kernels::Bags<'_>) -> bool {
        dim == self.1
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        let dim = |ids: &TableIds<'_>, out: &[f32]| out.len() / ids.vectors();
        let plain: Vec<TableIds<'_>> = request
            .tables
            .iter()
            .map(|ids| match ids.per_sample {
                Some(PerSample::Pooled(_)) => TableIds { per_sample: None, ..*ids },
                _ => *ids,
            })
            .collect();
        let mut own: Vec<Vec<f32>> = plain
            .iter()
            .zip(request.tables.iter().zip(rows.iter()))
            .map(|(plain, (ids, out))| vec![0.0; plain.vectors() * dim(ids, out)])
            .collect();
        let mut targets: Vec<&mut [f32]> = own.iter_mut().map(|rows| &mut rows[..]).collect();
        let report = self.0.lookup(&LookupRequest { tables: &plain, ..*request }, &mut targets)?;
        for ((ids, own), out) in request.tables.iter().zip(&own).zip(rows) {
            let dim = dim(ids, out);
            match ids.per_sample {
                Some(PerSample::Pooled(bags)) => pool(&Pool { rows: own, dim, bags }, out),
                _ => out.copy_from_slice(own),
            }
        }
        Ok(report)
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        self.0.push(request)
    }

    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.0.prepare_snapshot(number)
    }

    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.0.abort_snapshot(number)
    }

    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        self.0.write_snapshot(dir, number)
    }

    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.0.restore(dir, files)
    }

    fn stats(&self) -> Result<Stats, TablesError> {
        self.0.stats()
    }

    fn clear(&self) -> Result<(), TablesError> {
        self.0.clear()
    }
}

/// A schema with slots of every kind, three of which share a table.
fn schema() -> Schema {
    let slot = |name: &str, table| Slot { name: name.into(), table, ..Slot::default() };
    let stack = |rounds, buckets| Some(HashStack { rounds, buckets });
    let slots = vec![
        slot("single", 0),
        slot("summed", 1),
        Slot { pooling: Pooling::Mean, ..slot("mean", 2) },
        Slot { sqrt_scaling: true, ..slot("root", 3) },
        Slot { sample_fixed_size: Some(3), ..slot("raw", 4) },
        Slot { hash_stack: stack(2, 9), ..slot("stack", 5) },
        Slot { sample_fixed_size: Some(2), hash_stack: stack(3, 9), sqrt_scaling: true, ..slot("both", 6) },
        slot("left", 7),
        Slot { pooling: Pooling::Mean, ..slot("right", 7) },
        slot("third", 7),
        slot("hot", 8),
    ];
    let dims = [8, 12, 5, 16, 7, 32, 4, 6, 33];
    let tables = dims.iter().enumerate().map(|(i, dim)| Table::new(format!("t{i}"), *dim)).collect();
    Schema { slots, tables }
}

fn draw(seed: u64, end: u64) -> u64 {
    hash_id(seed.wrapping_mul(0x9E37_79B9) ^ 0x1234) % end
}

fn batch(number: u64) -> Batch {
    let feature = |(index, slot): (usize, &Slot)| {
        let seed = number * 1000 + index as u64 * 100_000;
        if slot.name == "single" {
            let ids: Vec<u64> = (0..BATCH as u64).map(|sample| draw(seed + sample, 30)).collect();
            return IdFeature::single(slot.name.clone(), &ids).unwrap();
        }
        let (mut ids, mut offsets) = (Vec::new(), vec![0]);
        for sample in 0..BATCH as u64 {
            let hot = slot.name == "hot" && sample == 7;
            let count = if hot { 900 } else { draw(seed + sample * 7, 5) };
            ids.extend((0..count).map(|i| if hot { 3 } else { draw(seed + sample * 31 + i, 30) }));
            offsets.push(ids.len());
        }
        let feature = IdFeature::lists(slot.name.clone(), &ids, &offsets).unwrap();
        if slot.name != "summed" && slot.name != "stack" {
            return feature;
        }
        let weights: Vec<f32> = (0..ids.len() as u64).map(|i| draw(i, 100) as f32 / 7.0 - 5.0).collect();
        feature.with_weights(&weights).unwrap()
    };
    let values: Vec<u8> = (0..BATCH * 3).flat_map(|i| (i as f32 * 0.1).to_le_bytes()).collect();
    let dense = Tensor::new(None, Element::F32, vec![BATCH, 3], values).unwrap();
    let label = Tensor::new(None, Element::U8, vec![BATCH, 1], vec![1; BATCH]).unwrap();
    let id_features = schema().slots.iter().enumerate().map(feature).collect();
    let parts = BatchParts {
        id_features,
        dense: vec![dense],
        labels: vec![label],
        requires_grad: true,
        ..Default::default()
    };
    Batch::new(parts).unwrap()
}

fn gradients(number: u64, sizes: &[usize]) -> Vec<Vec<f32>> {
    let value = |i: usize| (draw(number * 77 + i as u64, 2001) as f32 - 1000.0) / 3000.0;
    sizes
        .iter()
        .enumerate()
        .map(|(feature, size)| (0..*size).map(|i| value(i + feature * 999)).collect())
        .collect()
}

fn tables(pooled_dim: usize) -> Arc<dyn Tables> {
    let store = Store::new(schema(), StoreOptions { capacity: 10_000, ..StoreOptions::default() }).unwrap();
    let run = Run {
        job: "persia".into(),
        generation: 1,
        schema: schema(),
        seed: 1,
        optimizer: Some(Optimizer::Sgd { lr: 0.5, momentum: 0.9, weight_decay: 0.01 }),
        initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: false,
        continues: 0,
        world_size: 1,
        reproducible: false,
    };
    store.begin(&run).unwrap();
    Arc::new(Pools(store, pooled_dim))
}

/// The results of a run: the vectors of every step, and all rows at the end.
#[derive(PartialEq, Debug)]
struct Seen {
    vectors: Vec<Vec<u32>>,
    masks: Vec<Vec<bool>>,
    rows: Vec<Vec<u32>>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Train some steps. Every gradient is multiplied by `scale`, and the push divides it by `scale` again.
fn train(pooled_dim: usize, device: Option<Arc<HostDevice>>, scale: f32) -> Seen {
    let tables = tables(pooled_dim);
    let options = EngineOptions { reproducible: true, gradient_scale: 0.5, ..EngineOptions::default() };
    let given = device.clone().map(|device| device as Arc<dyn Device>);
    let engine = Engine::with_device(Arc::clone(&tables), schema(), options, given).unwrap();
    let pipeline = engine.pipeline().unwrap();
    let mut seen = Seen { vectors: vec![], masks: vec![], rows: vec![] };
    for number in 0..4 {
        let _ = pipeline.feed(batch(number), LONG).unwrap();
        let Next::Ready(looked) = pipeline.next(LONG).unwrap() else { panic!("no batch") };
        let sizes: Vec<usize> = looked
            .outputs
            .iter()
            .map(|output| BATCH * output.raw().map_or(1, |raw| raw.places) * output.dim())
            .collect();
        let gradients = gradients(number, &sizes);
        let scaled: Vec<Vec<f32>> =
            gradients.iter().map(|values| values.iter().map(|value| value * scale).collect()).collect();
        let ticket = looked.ticket.unwrap();
        let options = PushOptions { lr_factor: 0.75, scale: 1.0 / scale };
        let Some(device) = &device else {
            for output in &looked.outputs {
                seen.vectors.push(bits(output.as_ref()));
                seen.masks.push(output.raw().map(|raw| raw.mask.clone()).unwrap_or_default());
            }
            let boxed = scaled.into_iter().map(|values| Some(Box::new(values) as Floats)).collect();
            ticket.push(boxed, options).unwrap();
            continue;
        };
        let on_device: Arc<dyn Any + Send + Sync> = looked.on_device.unwrap();
        let step: Arc<Step> = on_device.downcast().unwrap_or_else(|_| panic!("another device's step"));
        for (index, output) in looked.outputs.iter().enumerate() {
            assert!(output.as_ref().is_empty(), "the CPU has pooled it, too");
            let place = step.layout.vectors(index).unwrap();
            let bytes = &step.outputs.bytes()[place..place + sizes[index] * element_bytes(Dtype::F32)];
            seen.vectors.push(bytemuck::cast_slice(bytes).to_vec());
            let places = output.raw().map_or(0, |raw| raw.places) * BATCH;
            let mask = step.layout.mask(index).map(|at| &step.outputs.bytes()[at..at + places]);
            seen.masks.push(mask.unwrap_or_default().iter().map(|byte| *byte != 0).collect());
        }
        let tensors = looked.batch.dense().iter().chain(looked.batch.labels());
        for (index, tensor) in tensors.enumerate() {
            let place = step.layout.tensor(index).unwrap();
            assert_eq!(&step.inputs.bytes()[place..place + tensor.bytes().len()], tensor.bytes());
        }
        let scale = options.scale * ticket.gradient_scale();
        let (sums, flag) = sum(&device.shim.lock().unwrap(), &step, &scaled, scale, Dtype::F32);
        assert_eq!(flag, 0);
        ticket.push_summed(Box::new(sums), options).unwrap();
    }
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    let probe = Engine::new(tables, schema(), EngineOptions::default()).unwrap();
    let found = probe.lookup_now(&batch(99), persia_types::Mode::Eval).unwrap();
    seen.rows = found.outputs.iter().map(|output| bits(output.as_ref())).collect();
    seen
}

fn device(vectors: Dtype) -> Option<Arc<HostDevice>> {
    Some(Arc::new(HostDevice { shim: Arc::new(Mutex::new(Shim::compile())), vectors }))
}

#[test]
fn vectors_masks_and_rows_have_the_bits_of_the_cpu() {
    assert_eq!(train(0, device(Dtype::F32), 1.0), train(0, None, 1.0));
}

#[test]
fn a_scaled_loss_gives_the_same_rows() {
    let plain = train(0, None, 1.0);
    let scaled = train(0, device(Dtype::F32), 65_536.0);
    assert_eq!(scaled.rows, plain.rows);
}

#[test]
fn samples_that_the_tables_pool_travel_as_samples() {
    // The last two dimensions are those of raw features, which keep their masks.
    for dim in [12, 16, 5, 7, 4] {
        assert_eq!(train(dim, device(Dtype::F32), 1.0), train(dim, None, 1.0), "dim {dim}");
    }
}

#[test]
fn a_gradient_that_is_not_finite_sets_the_flag_wherever_it_is_added() {
    let device = device(Dtype::F32).unwrap();
    let given = Some(Arc::clone(&device) as Arc<dyn Device>);
    let options = EngineOptions { reproducible: true, ..EngineOptions::default() };
    let engine = Engine::with_device(tables(12), schema(), options, given).unwrap();
    let pipeline = engine.pipeline().unwrap();
    let _ = pipeline.feed(batch(1), LONG).unwrap();
    let Next::Ready(looked) = pipeline.next(LONG).unwrap() else { panic!("no batch") };
    let size =
        |output: &persia_engine::Output| BATCH * output.raw().map_or(1, |raw| raw.places) * output.dim();
    let sizes: Vec<usize> = looked.outputs.iter().map(size).collect();
    let step: Arc<Step> =
        looked.on_device.clone().unwrap().downcast().unwrap_or_else(|_| panic!("not a step"));
    let flag =
        |gradients: &[Vec<f32>], wire| sum(&device.shim.lock().unwrap(), &step, gradients, 1.0, wire).1;
    for wire in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        assert_eq!(flag(&gradients(1, &sizes), wire), 0);
        for feature in 0..sizes.len() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut spoilt = gradients(1, &sizes);
                // Fill the whole buffer, because some samples use no id.
                spoilt[feature].fill(bad);
                assert_eq!(flag(&spoilt, wire), 1, "feature {feature}, {bad}, {wire:?}");
            }
        }
    }
}

#[test]
fn vectors_of_sixteen_bits_are_the_rounded_ones() {
    let device = device(Dtype::Bf16).unwrap();
    let engine = Engine::new(tables(0), schema(), EngineOptions::default()).unwrap();
    let pipeline = engine.pipeline().unwrap();
    let _ = pipeline.feed(batch(1), LONG).unwrap();
    let Next::Ready(looked) = pipeline.next(LONG).unwrap() else { panic!("no batch") };
    drop(looked);
    let here = engine.lookup_now(&batch(1), persia_types::Mode::Eval).unwrap();
    let there = engine.lookup_on(Some(device.as_ref()), &batch(1), persia_types::Mode::Eval).unwrap();
    let step: Arc<Step> = there.on_device.unwrap().downcast().unwrap_or_else(|_| panic!("not a step"));
    assert!(!step.layout.trains(), "an evaluation has no lists to sum by");
    for (index, output) in here.outputs.iter().enumerate() {
        let place = step.layout.vectors(index).unwrap();
        let bytes = &step.outputs.bytes()[place..place + output.as_ref().len() * 2];
        for (half, value) in bytes.chunks_exact(2).zip(output.as_ref()) {
            let found = f32::from_bits(u32::from(u16::from_le_bytes([half[0], half[1]])) << 16);
            assert!((found - value).abs() <= value.abs() / 256.0, "{found} for {value}");
        }
    }
}
