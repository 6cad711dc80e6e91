//! Measures the bytes per second of the kernels, as a fraction of those of a plain copy on the same device. Prints one
//! line of JSON for each case.
//!
//! `cargo run --release -p persia-cuda --example bench_kernels`, or `make bench-gpu`. The bytes of lists and of rows
//! that are read and written are counted. Repeated reads from the cache are not.
#![allow(unsafe_code, clippy::print_stdout, clippy::print_stderr)]

use std::sync::Arc;

use persia_cuda::kernels::{Job, Kernel, element, element_bytes};
use persia_cuda::{Cuda, CudaError};
use persia_types::Dtype;
use persia_types::id::hash_id;

const FEATURES: usize = 26;
const BATCH: usize = 4096;
const UNIQUE: usize = 100_000;
const TIMES: u32 = 50;
/// The size of the buffer that is copied. It is far larger than the caches.
const COPY: usize = 1 << 30;

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error}");
        std::process::exit(2);
    }
}

fn run() -> Result<(), CudaError> {
    let cuda = Cuda::device(0)?;
    let plain = plain_copy(&cuda)?;
    println!("{{\"id\": \"B8\", \"case\": \"copy\", \"gb_per_s\": {:.1}}}", plain / 1e9);
    for dim in [16, 32, 64, 128, 256] {
        for per_sample in [1, 10] {
            for dtype in [Dtype::F32, Dtype::F16] {
                for kernel in [Kernel::GatherPool, Kernel::SegmentSum] {
                    let rate = measure(&cuda, kernel, dim, per_sample, dtype)?;
                    let name = kernel.name().to_string_lossy();
                    println!(
                        "{{\"id\": \"B8\", \"case\": \"{name}\", \"dim\": {dim}, \"per_sample\": {per_sample}, \
                         \"dtype\": \"{dtype:?}\", \"gb_per_s\": {:.1}, \"share_of_copy\": {:.3}}}",
                        rate / 1e9,
                        rate / plain
                    );
                }
            }
        }
    }
    Ok(())
}

/// The bytes per second of a copy, counting both the bytes read and the bytes written.
fn plain_copy(cuda: &Arc<Cuda>) -> Result<f64, CudaError> {
    let bytes = vec![1; COPY];
    let (from, to) = (cuda.upload(&bytes)?, cuda.upload(&bytes)?);
    let time = cuda.time(TIMES, || cuda.copy(&from, &to))?;
    Ok(2.0 * COPY as f64 / time.as_secs_f64())
}

fn words(list: impl Iterator<Item = u32>) -> Vec<u8> {
    list.flat_map(u32::to_le_bytes).collect()
}

/// The bytes per second of one launch for all features of the workload W(dim, per_sample) with uniform ids.
fn measure(
    cuda: &Arc<Cuda>,
    kernel: Kernel,
    dim: usize,
    per_sample: usize,
    dtype: Dtype,
) -> Result<f64, CudaError> {
    let uses = BATCH * per_sample;
    let gathers = kernel == Kernel::GatherPool;
    let (mut jobs, mut kept, mut bytes) = (Vec::new(), Vec::new(), 0);
    for feature in 0..FEATURES {
        let draw = |i: usize, end: usize| (hash_id((feature * uses + i) as u64) % end as u64) as u32;
        // A gather reads from all rows of a look-up. A segment sum has as many sums as a batch has unique ids on
        // average.
        let sums = if gathers { BATCH } else { uses.min(UNIQUE) };
        let sources = if gathers { uses.min(UNIQUE) } else { BATCH };
        let rows = cuda.upload(&vec![0; sources * dim * element_bytes(dtype)])?;
        let places = cuda.upload(&words((0..uses).map(|i| draw(i, sources))))?;
        let step = uses / sums;
        let starts = cuda.upload(&words((0..=sums).map(|i| (i * step) as u32)))?;
        let out = cuda.upload(&vec![0; sums * dim * element_bytes(dtype)])?;
        jobs.push(Job {
            rows: rows.address(),
            places: places.address(),
            starts: starts.address(),
            out: out.address(),
            scale: 1.0,
            sums: sums as u32,
            dim: dim as u32,
            from: element(dtype),
            to: element(dtype),
            ..Job::default()
        });
        bytes += (uses + sums) * dim * element_bytes(dtype) + (uses + sums) * 4;
        kept.push([rows, places, starts, out]);
    }
    let launch = cuda.prepare(kernel, &mut jobs)?;
    // SAFETY: the jobs point to the buffers in `kept`, which have the sizes that the jobs state.
    let time = cuda.time(TIMES, || unsafe { cuda.launch(&launch) })?;
    drop(kept);
    Ok(bytes as f64 / time.as_secs_f64())
}
