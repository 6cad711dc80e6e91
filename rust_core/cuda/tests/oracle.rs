//! Tests that the kernels' source, compiled for the CPU, gives results that are bit-identical to those of the loops
//! on the CPU.
#![allow(unsafe_code, clippy::unwrap_used)]

mod cases;
mod host;

use cases::{Case, Given};
use host::Shim;
use persia_cuda::kernels::{Job, Kernel, lay_out};

fn run(shim: &Shim, case: &Case) {
    let mut memory = Memory::of(case);
    let mut jobs = [memory.job(case)];
    let blocks = lay_out(&mut jobs);
    let flag = shim.launch(case.kernel, &jobs, blocks);
    case.check(&memory.given(flag));
}

/// Copies of a case's data, aligned for access to four numbers at a time.
struct Memory {
    rows: Vec<u128>,
    out: Vec<u128>,
    out_bytes: usize,
    mask: Vec<u8>,
}

impl Memory {
    fn of(case: &Case) -> Self {
        let copy = |bytes: &[u8]| {
            let mut words = vec![0u128; bytes.len().div_ceil(16) + 1];
            bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
            words
        };
        Self {
            rows: copy(&case.rows),
            out: copy(&case.out),
            out_bytes: case.out.len(),
            mask: case.mask.clone(),
        }
    }

    fn job(&mut self, case: &Case) -> Job {
        fn at<T>(list: Option<&Vec<T>>) -> u64 {
            list.map_or(0, |list| list.as_ptr() as u64)
        }
        Job {
            rows: self.rows.as_ptr() as u64,
            places: at(case.places.as_ref()),
            map: at(case.map.as_ref()),
            starts: at(case.starts.as_ref()),
            weights: at(case.weights.as_ref()),
            divisors: at(case.divisors.as_ref()),
            out: self.out.as_mut_ptr() as u64,
            mask: self.mask.as_mut_ptr() as u64,
            ..case.job
        }
    }

    fn given(&self, flag: u32) -> Given {
        let bytes: &[u8] = bytemuck::cast_slice(&self.out);
        Given { out: bytes[..self.out_bytes].to_vec(), mask: self.mask.clone(), flag }
    }
}

#[test]
fn a_job_is_as_large_in_both_languages() {
    let shim = Shim::compile();
    // SAFETY: the function has no arguments.
    let size = unsafe { shim.function::<unsafe extern "C" fn() -> u32>("size_of_job")() };
    assert_eq!(size as usize, size_of::<Job>());
}

#[test]
fn every_kind_of_batch_gives_the_bits_of_the_cpu() {
    let shim = Shim::compile();
    cases::all().iter().for_each(|case| run(&shim, case));
}

#[test]
fn an_id_used_a_million_times_gives_the_bits_of_the_cpu() {
    let shim = Shim::compile();
    cases::hot().iter().for_each(|case| run(&shim, case));
}

#[test]
fn features_of_one_launch_do_not_disturb_each_other() {
    let shim = Shim::compile();
    let cases = cases::jobs_together();
    let mut memories: Vec<Memory> = cases.iter().map(Memory::of).collect();
    let mut jobs: Vec<Job> = memories.iter_mut().zip(&cases).map(|(memory, case)| memory.job(case)).collect();
    let empty = Job { sums: 0, ..jobs[0] };
    jobs.insert(2, empty);
    jobs.push(empty);
    let blocks = lay_out(&mut jobs);
    let flag = shim.launch(Kernel::GatherPool, &jobs, blocks);
    memories.iter().zip(&cases).for_each(|(memory, case)| case.check(&memory.given(flag)));
}

#[test]
fn memory_that_starts_anywhere_is_read_one_by_one() {
    let mut aligned = Job { rows: 256, out: 512, dim: 8, sums: 5, ..Job::default() };
    let width = |job: &mut Job| {
        lay_out(std::slice::from_mut(job));
        job.width
    };
    assert_eq!(width(&mut aligned), 4);
    for odd in [Job { rows: 260, ..aligned }, Job { out: 520, ..aligned }, Job { dim: 9, ..aligned }] {
        assert_eq!(width(&mut odd.clone()), 1, "{odd:?}");
    }
    assert_eq!(width(&mut Job { rows: 264, from: 1, ..aligned }), 4, "four of sixteen bits need eight bytes");
}

#[test]
fn every_half_is_widened_and_every_rounding_made_as_the_cpu_does() {
    use persia_types::Dtype;
    let shim = Shim::compile();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        // Convert all 65,536 bit patterns except NaN, which `sums` covers, to f32 and back.
        let halves: Vec<u16> = (0..=u16::MAX).collect();
        let stored: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
        let base = cases::gather(16, dtype, Dtype::F32, cases::Gather { single: true, ..Default::default() });
        let places: Vec<u32> = (0..4096).collect();
        let widened = cases::floats(&stored, dtype);
        let case = Case {
            name: format!("every {dtype:?}"),
            job: Job { sums: 4096, ..base.job },
            rows: stored,
            places: Some(places.clone()),
            out: vec![0; 65536 * 4],
            expected: cases::bytes(&widened, Dtype::F32),
            ..base
        };
        run(&shim, &case);
        // Also convert f32 numbers between the 16-bit numbers, with every exponent.
        let between: Vec<f32> =
            (0..65536u32).map(|i| f32::from_bits(i << 16 | i.wrapping_mul(40_503) & 0xFFFF)).collect();
        let finite: Vec<f32> =
            between.iter().map(|value| if value.is_nan() { 1.0 } else { *value }).collect();
        let case = Case {
            name: format!("roundings to {dtype:?}"),
            job: Job { from: 0, to: persia_cuda::kernels::element(dtype), ..case.job },
            rows: cases::bytes(&finite, Dtype::F32),
            out: vec![0; 65536 * 2],
            expected: cases::bytes(&finite, dtype),
            ..case
        };
        run(&shim, &case);
    }
}
