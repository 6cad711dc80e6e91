//! Test cases for the kernels: inputs of every kind, and the results of the loops on the CPU.

use persia_cuda::kernels::{Job, Kernel, element};
use persia_kernels::half::{Bf16, F16, narrow, widen};
use persia_kernels::simd::{InstructionSet, Lanes, SimdLoop};
use persia_kernels::{Bags, Csr, Pool, SegmentSum, pool, segment_sum, segment_sum_onto};
use persia_types::Dtype;
use persia_types::id::hash_id;

pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
pub(crate) const DIMS: [usize; 14] = [1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 100, 128, 1024];

/// One launch of one job, with all data to which it points. The addresses in the job are set before the
/// launch.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) kernel: Kernel,
    pub(crate) job: Job,
    pub(crate) rows: Vec<u8>,
    pub(crate) places: Option<Vec<u32>>,
    pub(crate) map: Option<Vec<u32>>,
    pub(crate) starts: Option<Vec<u32>>,
    pub(crate) weights: Option<Vec<f32>>,
    pub(crate) divisors: Option<Vec<f32>>,
    /// The content of the output before the launch.
    pub(crate) out: Vec<u8>,
    pub(crate) mask: Vec<u8>,
    pub(crate) expected: Vec<u8>,
    pub(crate) expected_mask: Vec<u8>,
    pub(crate) expected_flag: u32,
}

/// The result of a launch.
pub(crate) struct Given {
    pub(crate) out: Vec<u8>,
    pub(crate) mask: Vec<u8>,
    pub(crate) flag: u32,
}

impl Case {
    /// Check that the results are bit-identical. All NaNs count as equal.
    pub(crate) fn check(&self, given: &Given) {
        let dtype = DTYPES[self.job.to as usize];
        assert_eq!(given.out.len(), self.expected.len(), "{}", self.name);
        let (have, want) = (floats(&given.out, dtype), floats(&self.expected, dtype));
        let wrong = have
            .iter()
            .zip(&want)
            .position(|(have, want)| have.to_bits() != want.to_bits() && !(have.is_nan() && want.is_nan()));
        if let Some(at) = wrong {
            let (row, column) = (at / self.job.dim as usize, at % self.job.dim as usize);
            panic!("{}: row {row}, column {column}: {} instead of {}", self.name, have[at], want[at]);
        }
        assert_eq!(given.mask, self.expected_mask, "{}: mask", self.name);
        assert_eq!(given.flag, self.expected_flag, "{}: flag", self.name);
    }
}

/// A number that depends only on `i`. It may have either sign, and may or may not be exact in all types.
pub(crate) fn number(i: usize) -> f32 {
    let hash = hash_id(i as u64 + 1);
    ((hash >> 40) as f32 / 1e5 - 80.0) * if hash & 7 == 0 { 1e-4 } else { 1.0 }
}

fn numbers(seed: usize, len: usize) -> Vec<f32> {
    (seed..seed + len).map(number).collect()
}

fn below(seed: usize, len: usize, end: usize) -> Vec<u32> {
    (0..len).map(|i| (hash_id((seed * 7919 + i) as u64) % end as u64) as u32).collect()
}

struct Narrow<'a>(&'a [f32], Dtype, &'a mut [u16]);

impl SimdLoop for Narrow<'_> {
    type Output = ();
    fn run<L: Lanes>(self) {
        match self.1 {
            Dtype::F16 => narrow::<L, F16>(self.0, self.2),
            _ => narrow::<L, Bf16>(self.0, self.2),
        }
    }
}

struct Widen<'a>(&'a [u16], Dtype, &'a mut [f32]);

impl SimdLoop for Widen<'_> {
    type Output = ();
    fn run<L: Lanes>(self) {
        match self.1 {
            Dtype::F16 => widen::<L, F16>(self.0, self.2),
            _ => widen::<L, Bf16>(self.0, self.2),
        }
    }
}

/// The bytes that encode `values` in this storage type.
pub(crate) fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    if dtype == Dtype::F32 {
        return values.iter().flat_map(|value| value.to_le_bytes()).collect();
    }
    let mut halves = vec![0; values.len()];
    InstructionSet::detect().run(Narrow(values, dtype, &mut halves));
    halves.iter().flat_map(|half| half.to_le_bytes()).collect()
}

/// The numbers that `bytes` encode in this storage type.
pub(crate) fn floats(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    if dtype == Dtype::F32 {
        return bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    }
    let halves: Vec<u16> = bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    let mut values = vec![0.0; halves.len()];
    InstructionSet::detect().run(Widen(&halves, dtype, &mut values));
    values
}

/// The offsets of samples with no row, one row, or more rows than one iteration of a block adds.
fn offsets(samples: usize, long: usize) -> Vec<u32> {
    let mut at = 0;
    let mut offsets = vec![0];
    for sample in 0..samples {
        at += match sample {
            _ if sample == samples / 2 => long,
            _ if sample % 5 == 0 => 0,
            _ if sample % 5 == 1 => 1,
            _ => hash_id(sample as u64) as usize % 11,
        } as u32;
        offsets.push(at);
    }
    offsets
}

/// The inputs of a [`gather`] other than rows and places.
#[derive(Clone, Copy, Default)]
pub(crate) struct Gather {
    pub(crate) single: bool,
    pub(crate) weighted: bool,
    pub(crate) divided: bool,
    pub(crate) mapped: bool,
    pub(crate) long: usize,
}

pub(crate) fn gather(dim: usize, from: Dtype, to: Dtype, with: Gather) -> Case {
    let Gather { single, weighted, divided, mapped, long } = with;
    let (samples, unique) = (97, 50);
    let offsets = (!single).then(|| offsets(samples, long));
    let uses = offsets.as_ref().map_or(samples, |offsets| offsets[samples] as usize);
    let own = below(1, uses, unique);
    let map = mapped.then(|| below(2, unique, 2 * unique));
    let rows = floats(&bytes(&numbers(dim, 2 * unique * dim), from), from);
    let weights = weighted.then(|| numbers(9, uses));
    let divisors =
        divided.then(|| numbers(11, samples).iter().map(|value| value.abs() + 1.0).collect::<Vec<_>>());
    let composed: Vec<u32> =
        own.iter().map(|place| map.as_ref().map_or(*place, |map: &Vec<u32>| map[*place as usize])).collect();
    let bags = Bags {
        indices: &composed,
        offsets: offsets.as_deref(),
        per_sample_weights: weights.as_deref(),
        divisors: divisors.as_deref(),
    };
    let mut expected = vec![f32::NAN; samples * dim];
    pool(&Pool { rows: &rows, dim, bags }, &mut expected);
    let job =
        Job { sums: samples as u32, dim: dim as u32, from: element(from), to: element(to), ..Job::default() };
    Case {
        name: format!(
            "gather_pool dim {dim} {from:?} to {to:?} {with:?}",
            with = (single, weighted, divided, mapped, long)
        ),
        kernel: Kernel::GatherPool,
        job,
        rows: bytes(&rows, from),
        places: Some(own),
        map,
        starts: offsets,
        weights,
        divisors,
        out: bytes(&vec![0.5; samples * dim], to),
        mask: Vec::new(),
        expected: bytes(&expected, to),
        expected_mask: Vec::new(),
        expected_flag: 0,
    }
}

/// A sequence feature, whose positions have one id, `rounds` rows of a hash stack, or none.
pub(crate) fn raw(dim: usize, from: Dtype, to: Dtype, rounds: u32) -> Case {
    let places = 120u32;
    let starts: Vec<u32> = (0..=places).map(|place| (place * 2).div_ceil(3) * rounds).collect();
    let uses = *starts.last().unwrap() as usize;
    let case = gather(dim, from, to, Gather::default());
    let rows = floats(&case.rows, from);
    let own = below(5, uses, 50);
    let bags = Bags { indices: &own, offsets: Some(&starts), per_sample_weights: None, divisors: None };
    let mut expected = vec![f32::NAN; places as usize * dim];
    pool(&Pool { rows: &rows, dim, bags }, &mut expected);
    Case {
        name: format!("gather_raw dim {dim} {from:?} to {to:?}, {rounds} rounds"),
        kernel: Kernel::GatherRaw,
        job: Job { sums: places, ..case.job },
        places: Some(own),
        out: bytes(&vec![0.5; places as usize * dim], to),
        mask: vec![7; places as usize],
        expected: bytes(&expected, to),
        expected_mask: starts.windows(2).map(|bounds| u8::from(bounds[1] > bounds[0])).collect(),
        starts: Some(starts),
        ..case
    }
}

/// The inputs of [`sums`] other than gradients and lists.
#[derive(Clone, Copy, Default)]
pub(crate) struct Summed {
    pub(crate) weighted: bool,
    pub(crate) divided: bool,
    /// Whether the sums are added to existing content, in rows in a different order.
    pub(crate) onto: bool,
    /// The number of samples that use the id in the middle.
    pub(crate) long: usize,
    /// The value of a gradient that is not finite, if any.
    pub(crate) spoilt: Option<f32>,
    pub(crate) scale: f32,
}

pub(crate) fn sums(dim: usize, from: Dtype, to: Dtype, with: Summed) -> Case {
    let Summed { weighted, divided, onto, long, spoilt, scale } = with;
    let (unique, samples) = (61, 83);
    let starts = offsets(unique, long);
    let uses = starts[unique] as usize;
    let users = below(3, uses, samples);
    let mut gradients = floats(&bytes(&numbers(77, samples * dim), from), from);
    if let Some(spoilt) = spoilt {
        gradients[users[uses / 2] as usize * dim + dim / 2] = spoilt;
    }
    let weights = weighted.then(|| numbers(13, uses));
    let divisors =
        divided.then(|| numbers(17, samples).iter().map(|value| value.abs() + 1.0).collect::<Vec<_>>());
    let factors = divisors.as_ref().map(|divisors| divisors.iter().map(|d| 1.0 / d).collect::<Vec<f32>>());
    let input = SegmentSum {
        gradients: &gradients,
        dim,
        csr: Csr { offsets: &starts, indices: &users },
        factors: factors.as_deref(),
        per_sample_weights: weights.as_deref(),
        scale,
    };
    let map: Vec<u32> = (0..unique as u32).rev().collect();
    let before = numbers(31, unique * dim);
    let mut expected = before.clone();
    if onto {
        segment_sum_onto(&input, &map, &mut expected);
    } else {
        segment_sum(&input, 0, &mut expected);
    }
    let nonfinite = expected.iter().any(|value| !value.is_finite());
    // A sum that is not finite is not pushed, so its 16-bit value does not matter.
    assert!(spoilt.is_none() || to == Dtype::F32);
    let job = Job {
        scale,
        sums: unique as u32,
        dim: dim as u32,
        from: element(from),
        to: element(to),
        onto: u32::from(onto),
        ..Job::default()
    };
    Case {
        name: format!(
            "segment_sum dim {dim} {from:?} to {to:?} {:?}",
            (weighted, divided, onto, long, spoilt, scale)
        ),
        kernel: Kernel::SegmentSum,
        job,
        rows: bytes_of(&gradients, from, spoilt),
        places: Some(users),
        map: onto.then_some(map),
        starts: Some(starts),
        weights,
        divisors,
        out: bytes(&before, to),
        mask: Vec::new(),
        expected: bytes(&expected, to),
        expected_mask: Vec::new(),
        expected_flag: u32::from(nonfinite),
    }
}

/// Like [`bytes`], but an infinity stays infinite.
fn bytes_of(values: &[f32], dtype: Dtype, spoilt: Option<f32>) -> Vec<u8> {
    let mut stored = bytes(values, dtype);
    if let (Some(spoilt), Dtype::F16 | Dtype::Bf16) = (spoilt, dtype) {
        let infinity: u16 = if dtype == Dtype::F16 { 0x7C00 } else { 0x7F80 };
        let half = if spoilt.is_nan() { infinity | 1 } else { infinity };
        for (at, _) in values.iter().enumerate().filter(|(_, value)| !value.is_finite()) {
            stored[at * 2..at * 2 + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    stored
}

/// A launch that only scales and converts the existing content.
pub(crate) fn cast(dim: usize, from: Dtype, to: Dtype, scale: f32) -> Case {
    let case = sums(dim, from, to, Summed { scale, ..Summed::default() });
    let rows = floats(&case.rows, from);
    let expected: Vec<f32> = rows.iter().map(|value| (0.0 + value * 1.0) * scale).collect();
    let count = rows.len() / dim;
    Case {
        name: format!("cast dim {dim} {from:?} to {to:?} by {scale}"),
        job: Job { sums: count as u32, ..case.job },
        places: None,
        starts: None,
        out: bytes(&vec![0.5; rows.len()], to),
        expected: bytes(&expected, to),
        ..case
    }
}

/// All cases except the largest ones.
pub(crate) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for dim in DIMS {
        for from in DTYPES {
            for to in DTYPES {
                let pooled = Gather { long: 700, ..Gather::default() };
                cases.push(gather(dim, from, to, Gather { single: true, ..Gather::default() }));
                cases.push(gather(dim, from, to, pooled));
                cases.push(gather(dim, from, to, Gather { divided: true, ..pooled }));
                cases.push(gather(
                    dim,
                    from,
                    to,
                    Gather { mapped: true, weighted: true, divided: true, ..pooled },
                ));
                cases.push(gather(
                    dim,
                    from,
                    to,
                    Gather { single: true, weighted: true, ..Gather::default() },
                ));
                cases.push(raw(dim, from, to, 1));
                cases.push(raw(dim, from, to, 3));
                let plain = Summed { scale: 1.0, long: 700, ..Summed::default() };
                cases.push(sums(dim, from, to, plain));
                cases.push(sums(dim, from, to, Summed { scale: 1.0 / 1024.0, divided: true, ..plain }));
                cases.push(sums(
                    dim,
                    from,
                    to,
                    Summed { scale: 0.3, weighted: true, divided: true, ..plain },
                ));
                cases.push(cast(dim, from, to, 0.125));
            }
            let onto = Summed { onto: true, scale: 1.0, long: 700, divided: true, ..Summed::default() };
            cases.push(sums(dim, from, Dtype::F32, onto));
            for spoilt in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let spoilt = Summed { spoilt: Some(spoilt), scale: 0.5, long: 700, ..Summed::default() };
                if from == Dtype::F32 || spoilt.spoilt != Some(f32::NEG_INFINITY) {
                    cases.push(sums(dim, from, Dtype::F32, spoilt));
                }
            }
        }
    }
    cases
}

/// Cases in which one id occurs a million times in the batch.
pub(crate) fn hot() -> Vec<Case> {
    let long = 1_000_000;
    let summed = |scale| Summed { scale, long, divided: true, ..Summed::default() };
    vec![
        sums(32, Dtype::F32, Dtype::F32, summed(1.0)),
        sums(19, Dtype::F16, Dtype::F16, summed(1.0 / 65536.0)),
        gather(16, Dtype::F32, Dtype::Bf16, Gather { long, divided: true, ..Gather::default() }),
    ]
}

/// The jobs of several features of a batch, which run in one launch.
pub(crate) fn jobs_together() -> Vec<Case> {
    [4usize, 1, 64, 33, 8]
        .into_iter()
        .map(|dim| gather(dim, Dtype::F32, Dtype::F32, Gather { long: 300, ..Gather::default() }))
        .collect()
}
