//! The memory layout of a step, and the jobs that use it. Addresses are device addresses. This module does not call
//! the device.

use std::ops::Range;

use bytemuck::Pod;
use persia_engine::device::{DeviceFeature, DeviceTable, DeviceWork};
use persia_types::Dtype;

use crate::kernels::{Job, Kernel, element, element_bytes, lay_out};
use crate::memory::ALIGNMENT;

/// A position in a block: an offset in bytes.
pub type Place = usize;

/// The gradient of one feature's vectors on the device, row-major, with the shape `[samples, dim]`.
#[derive(Debug, Clone, Copy)]
pub struct Gradient {
    /// The address of the first element.
    pub address: u64,
    /// The type of the elements.
    pub dtype: Dtype,
}

/// The jobs of one kernel in a block: their position, their number, and the number of thread blocks that they need.
#[derive(Debug, Clone, Copy)]
pub struct Jobs {
    /// The kernel to be launched.
    pub kernel: Kernel,
    /// The position of the jobs.
    pub place: Place,
    /// The number of jobs.
    pub count: u32,
    /// The number of thread blocks.
    pub blocks: u32,
}

/// The positions of one feature's lists in the block of inputs; None for a list that the feature does not have.
#[derive(Debug, Default)]
struct FeaturePlaces {
    table: usize,
    samples: usize,
    /// The number of unique ids of the feature.
    unique: usize,
    /// Whether the table's vectors are those of samples.
    by_samples: bool,
    raw: bool,
    places: Option<Place>,
    map: Option<Place>,
    offsets: Option<Place>,
    weights: Option<Place>,
    divisors: Option<Place>,
    csr_offsets: Option<Place>,
    csr_indices: Option<Place>,
    csr_weights: Option<Place>,
    /// The position in the block of outputs.
    vectors: Place,
    mask: Place,
}

/// Computes the layout of a block.
#[derive(Default)]
struct BlockBuilder {
    bytes: usize,
}

impl BlockBuilder {
    fn add(&mut self, bytes: usize) -> Place {
        let place = self.bytes;
        self.bytes = (place + bytes).next_multiple_of(ALIGNMENT);
        place
    }

    fn add_list<T>(&mut self, list: Option<&[T]>) -> Option<Place> {
        list.map(|list| self.add(size_of_val(list)))
    }
}

/// The layout of one look-up. The block of inputs has rows, lists, dense tensors and jobs. The block of
/// outputs has vectors and masks.
#[derive(Debug)]
pub struct StepLayout {
    inputs: usize,
    outputs: usize,
    rows: Vec<Range<usize>>,
    tables: Vec<DeviceTable>,
    features: Vec<FeaturePlaces>,
    tensors: Vec<Place>,
    jobs: Place,
    vectors: Dtype,
}

impl StepLayout {
    /// Compute the layout for `work`. Vectors have the type `vectors`.
    pub fn new(work: &DeviceWork<'_>, vectors: Dtype) -> Self {
        let (mut inputs, mut outputs) = (BlockBuilder::default(), BlockBuilder::default());
        let table = |table: &DeviceTable| {
            let bytes = table.vectors * table.dim * size_of::<f32>();
            let place = inputs.add(bytes);
            place..place + bytes
        };
        let rows: Vec<Range<usize>> = work.tables.iter().map(table).collect();
        let place = |feature| place_feature(work, vectors, feature, &mut inputs, &mut outputs);
        let features: Vec<FeaturePlaces> = work.features.iter().map(place).collect();
        let tensors = work.tensors.iter().map(|bytes| inputs.add(bytes.len())).collect();
        let jobs = inputs.add(features.len() * size_of::<Job>());
        let tables = work.tables.clone();
        Self { inputs: inputs.bytes, outputs: outputs.bytes, rows, tables, features, tensors, jobs, vectors }
    }

    /// The size of the block of inputs, in bytes.
    pub fn input_bytes(&self) -> usize {
        self.inputs
    }

    /// The size of the block of outputs, in bytes.
    pub fn output_bytes(&self) -> usize {
        self.outputs
    }

    /// The number of id features.
    pub fn features(&self) -> usize {
        self.features.len()
    }

    /// Whether gradients can be summed.
    pub fn trains(&self) -> bool {
        self.features.iter().all(|feature| feature.csr_offsets.is_some())
    }

    /// The position of a feature's vectors in the outputs.
    pub fn vectors(&self, feature: usize) -> Option<Place> {
        Some(self.features.get(feature)?.vectors)
    }

    /// The position of a raw feature's mask in the outputs.
    pub fn mask(&self, feature: usize) -> Option<Place> {
        Some(self.features.get(feature).filter(|feature| feature.raw)?.mask)
    }

    /// The position of a dense input or label in the inputs.
    pub fn tensor(&self, index: usize) -> Option<Place> {
        self.tensors.get(index).copied()
    }

    /// The rows of each table in a block of inputs.
    pub fn rows<'a>(&self, inputs: &'a mut [u8]) -> Vec<&'a mut [f32]> {
        let mut rest = inputs;
        let mut at = 0;
        let mut rows = Vec::with_capacity(self.rows.len());
        for range in &self.rows {
            let (_, from) = rest.split_at_mut(range.start - at);
            let (own, after) = from.split_at_mut(range.len());
            rows.push(bytemuck::cast_slice_mut(own));
            (rest, at) = (after, range.end);
        }
        rows
    }

    /// Write everything except the rows into `memory`, which is later copied to the block at address
    /// `inputs`. The kernels write vectors to `outputs`. Returns the jobs of the features that are not raw,
    /// followed by those of the raw features.
    pub fn write(&self, memory: &mut [u8], work: &DeviceWork<'_>, inputs: u64, outputs: u64) -> [Jobs; 2] {
        for (feature, places) in work.features.iter().zip(&self.features) {
            copy_feature(memory, feature, places);
        }
        for (bytes, place) in work.tensors.iter().zip(&self.tensors) {
            put(memory, Some(*place), Some(*bytes));
        }
        let mut place = self.jobs;
        [(Kernel::GatherPool, false), (Kernel::GatherRaw, true)].map(|(kernel, raw)| {
            let chosen = self.features.iter().filter(|feature| feature.raw == raw);
            let mut jobs: Vec<Job> = chosen.map(|feature| self.gather(feature, inputs, outputs)).collect();
            let blocks = lay_out(&mut jobs);
            put(memory, Some(place), Some(&jobs));
            let written = Jobs { kernel, place, count: jobs.len() as u32, blocks };
            place += size_of_val(&jobs[..]);
            written
        })
    }

    fn gather(&self, feature: &FeaturePlaces, inputs: u64, outputs: u64) -> Job {
        Job {
            rows: inputs + self.rows[feature.table].start as u64,
            places: address(inputs, feature.places),
            map: address(inputs, feature.map),
            starts: address(inputs, feature.offsets),
            weights: address(inputs, feature.weights),
            divisors: address(inputs, feature.divisors),
            out: outputs + feature.vectors as u64,
            mask: outputs + feature.mask as u64,
            sums: feature.samples as u32,
            dim: self.tables[feature.table].dim as u32,
            from: element(Dtype::F32),
            to: element(self.vectors),
            ..Job::default()
        }
    }
}

fn place_feature(
    work: &DeviceWork<'_>,
    vectors: Dtype,
    feature: &DeviceFeature<'_>,
    inputs: &mut BlockBuilder,
    outputs: &mut BlockBuilder,
) -> FeaturePlaces {
    let dim = work.tables[feature.table].dim;
    let bags = feature.bags;
    FeaturePlaces {
        table: feature.table,
        samples: feature.samples,
        unique: feature.csr.map_or(0, |csr| csr.offsets.len().saturating_sub(1)),
        by_samples: bags.is_none(),
        raw: feature.raw,
        places: inputs.add_list(bags.map(|bags| bags.indices)),
        map: inputs.add_list(feature.map),
        offsets: inputs.add_list(bags.and_then(|bags| bags.offsets)),
        weights: inputs.add_list(bags.and_then(|bags| bags.per_sample_weights)),
        divisors: inputs.add_list(bags.and_then(|bags| bags.divisors)),
        csr_offsets: inputs.add_list(feature.csr.map(|csr| csr.offsets)),
        csr_indices: inputs.add_list(feature.csr.map(|csr| csr.indices)),
        csr_weights: inputs.add_list(feature.csr.and(feature.csr_weights)),
        vectors: outputs.add(feature.samples * dim * element_bytes(vectors)),
        mask: outputs.add(if feature.raw { feature.samples } else { 0 }),
    }
}

fn copy_feature(memory: &mut [u8], feature: &DeviceFeature<'_>, places: &FeaturePlaces) {
    let bags = feature.bags;
    put(memory, places.places, bags.map(|bags| bags.indices));
    put(memory, places.map, feature.map);
    put(memory, places.offsets, bags.and_then(|bags| bags.offsets));
    put(memory, places.weights, bags.and_then(|bags| bags.per_sample_weights));
    put(memory, places.divisors, bags.and_then(|bags| bags.divisors));
    put(memory, places.csr_offsets, feature.csr.map(|csr| csr.offsets));
    put(memory, places.csr_indices, feature.csr.map(|csr| csr.indices));
    put(memory, places.csr_weights, feature.csr_weights);
}

fn put<T: Pod>(memory: &mut [u8], place: Option<Place>, list: Option<&[T]>) {
    if let (Some(place), Some(list)) = (place, list) {
        let bytes: &[u8] = bytemuck::cast_slice(list);
        memory[place..place + bytes.len()].copy_from_slice(bytes);
    }
}

/// The address of a list; 0 if there is no list.
fn address(block: u64, place: Option<Place>) -> u64 {
    place.map_or(0, |place| block + place as u64)
}

/// The layout of the sums of one step, in one block. The block contains a flag, the jobs, the accumulators of
/// shared tables, and the sums that are copied back. The flag is set if a sum is not finite.
#[derive(Debug)]
pub struct SumsLayout {
    jobs: Place,
    shared: Vec<Option<Range<usize>>>,
    back: Place,
    tables: Vec<Range<usize>>,
    bytes: usize,
    wire: Dtype,
}

impl SumsLayout {
    /// The position of the flag: a word that becomes 1 if a sum is not finite.
    pub const FLAG: Place = 0;

    /// Compute the layout of the sums of a step with the layout `step` and the wire type `wire`.
    pub fn new(step: &StepLayout, wire: Dtype) -> Self {
        let mut parts = BlockBuilder::default();
        parts.add(size_of::<u32>());
        let jobs = parts.add((step.features.len() + step.tables.len()) * size_of::<Job>());
        let mut take = |floats: usize, bytes: usize| {
            let place = parts.add(floats * bytes);
            place..place + floats * bytes
        };
        let floats = |table: &DeviceTable| table.vectors * table.dim;
        let shared =
            |table: &DeviceTable| (table.members.len() > 1).then(|| take(floats(table), size_of::<f32>()));
        let shared = step.tables.iter().map(shared).collect();
        let tables: Vec<Range<usize>> =
            step.tables.iter().map(|table| take(floats(table), element_bytes(wire))).collect();
        let back = tables.first().map_or(0, |first| first.start);
        Self { jobs, shared, back, tables, bytes: parts.bytes, wire }
    }

    /// The size of the block, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The part that is copied back.
    pub fn back(&self) -> Range<usize> {
        self.back..self.bytes
    }

    /// The position of each table's vectors in the part that is copied back.
    pub fn tables(&self) -> Vec<Range<usize>> {
        self.tables.iter().map(|range| range.start - self.back..range.end - self.back).collect()
    }

    /// The parts that must be zeroed before the launches: the flag and the accumulators.
    pub fn zeros(&self) -> impl Iterator<Item = Range<usize>> {
        std::iter::once(Self::FLAG..Self::FLAG + size_of::<u32>())
            .chain(self.shared.iter().flatten().cloned())
    }

    /// All jobs for the block at address `memory`, and their launches, in order.
    pub fn jobs(
        &self,
        step: &StepLayout,
        gradients: &[Gradient],
        scale: f32,
        inputs: u64,
        memory: u64,
    ) -> (Vec<Job>, Vec<Jobs>) {
        let mut rounds = self.rounds(step, gradients, scale, inputs, memory);
        let mut place = self.jobs;
        let mut launches = Vec::new();
        for jobs in &mut rounds {
            let blocks = lay_out(jobs);
            launches.push(Jobs { kernel: Kernel::SegmentSum, place, count: jobs.len() as u32, blocks });
            place += size_of_val(&jobs[..]);
        }
        (rounds.concat(), launches)
    }

    /// The position of the jobs in the block.
    pub fn jobs_place(&self) -> Place {
        self.jobs
    }

    /// The rounds of jobs. The jobs of a round may run concurrently. Features that share a table add to the same rows
    /// in the order of their slots, so each of them needs a separate round. Their sums are scaled in a further round.
    fn rounds(
        &self,
        step: &StepLayout,
        gradients: &[Gradient],
        scale: f32,
        inputs: u64,
        memory: u64,
    ) -> Vec<Vec<Job>> {
        let most = step.tables.iter().map(|table| table.members.len()).max().unwrap_or(0);
        let mut rounds = vec![Vec::new(); if most > 1 { most + 1 } else { 1 }];
        let (f32, wire) = (element(Dtype::F32), element(self.wire));
        for (table, (out, shared)) in step.tables.iter().zip(self.tables.iter().zip(&self.shared)) {
            let out = memory + out.start as u64;
            let (dim, sums) = (table.dim as u32, table.vectors as u32);
            if let Some(shared) = shared {
                let rows = memory + shared.start as u64;
                for (round, member) in table.members.iter().enumerate() {
                    let job = segment_sum(&step.features[*member], gradients[*member], dim, inputs);
                    rounds[round].push(Job { out: rows, to: f32, onto: 1, scale: 1.0, ..job });
                }
                let scaled = Job { rows, from: f32, out, to: wire, sums, dim, scale, ..Job::default() };
                rounds[table.members.len()].push(scaled);
                continue;
            }
            let Some(&member) = table.members.first() else { continue };
            let job = if step.features[member].by_samples {
                let Gradient { address: rows, dtype } = gradients[member];
                Job { rows, from: element(dtype), sums, dim, ..Job::default() }
            } else {
                segment_sum(&step.features[member], gradients[member], dim, inputs)
            };
            rounds[0].push(Job { out, to: wire, scale, ..job });
        }
        rounds
    }
}

fn segment_sum(feature: &FeaturePlaces, gradient: Gradient, dim: u32, inputs: u64) -> Job {
    Job {
        rows: gradient.address,
        from: element(gradient.dtype),
        places: address(inputs, feature.csr_indices),
        map: address(inputs, feature.map),
        starts: address(inputs, feature.csr_offsets),
        weights: address(inputs, feature.csr_weights),
        divisors: address(inputs, feature.divisors),
        sums: feature.unique as u32,
        dim,
        ..Job::default()
    }
}
