//! Tests that the results of the kernels on a device are bit-identical to those of the loops on the CPU. `make
//! test-gpu` runs these tests, which need a device.
#![allow(unsafe_code, clippy::unwrap_used)]

mod cases;

use std::sync::Arc;

use cases::{Case, Given};
use persia_cuda::by_hand::Buffer;
use persia_cuda::kernels::Job;
use persia_cuda::{Cuda, CudaError};

fn device() -> Arc<Cuda> {
    Cuda::device(0).unwrap_or_else(|error| panic!("{error}"))
}

/// The buffers of a case, on the device.
struct There {
    lists: Vec<Buffer>,
    out: Buffer,
    mask: Buffer,
    job: Job,
}

impl There {
    fn of(cuda: &Cuda, case: &Case) -> Result<Self, CudaError> {
        let mut lists = Vec::new();
        let mut put = |bytes: Option<&[u8]>| -> Result<u64, CudaError> {
            let Some(bytes) = bytes else { return Ok(0) };
            let buffer = cuda.upload(bytes)?;
            let address = buffer.address();
            lists.push(buffer);
            Ok(address)
        };
        fn bytes<T: bytemuck::NoUninit>(list: Option<&Vec<T>>) -> Option<&[u8]> {
            list.map(|list| bytemuck::cast_slice(list))
        }
        let job = Job {
            rows: put(Some(&case.rows))?,
            places: put(bytes(case.places.as_ref()))?,
            map: put(bytes(case.map.as_ref()))?,
            starts: put(bytes(case.starts.as_ref()))?,
            weights: put(bytes(case.weights.as_ref()))?,
            divisors: put(bytes(case.divisors.as_ref()))?,
            ..case.job
        };
        let (out, mask) = (cuda.upload(&case.out)?, cuda.upload(&case.mask)?);
        let job = Job { out: out.address(), mask: mask.address(), ..job };
        Ok(Self { lists, out, mask, job })
    }
}

fn run(cuda: &Cuda, case: &Case) {
    let there = There::of(cuda, case).unwrap();
    let launch = cuda.prepare(case.kernel, &mut [there.job]).unwrap();
    // SAFETY: the job points to the buffers of `there`, which have the sizes of the case.
    unsafe { cuda.launch(&launch).unwrap() };
    let (out, mask) = (cuda.download(&there.out).unwrap(), cuda.download(&there.mask).unwrap());
    let flag = cuda.flag(&launch).unwrap();
    assert!(!there.lists.is_empty());
    case.check(&Given { out, mask, flag });
}

#[test]
#[ignore = "needs a CUDA device: make test-gpu"]
fn every_kind_of_batch_gives_the_bits_of_the_cpu() {
    let cuda = device();
    cases::all().iter().for_each(|case| run(&cuda, case));
}

#[test]
#[ignore = "needs a CUDA device: make test-gpu"]
fn an_id_used_a_million_times_gives_the_bits_of_the_cpu() {
    let cuda = device();
    cases::hot().iter().for_each(|case| run(&cuda, case));
}

#[test]
#[ignore = "needs a CUDA device: make test-gpu"]
fn features_of_one_launch_do_not_disturb_each_other() {
    let cuda = device();
    let cases = cases::jobs_together();
    let there: Vec<There> = cases.iter().map(|case| There::of(&cuda, case).unwrap()).collect();
    let mut jobs: Vec<Job> = there.iter().map(|there| there.job).collect();
    let launch = cuda.prepare(cases[0].kernel, &mut jobs).unwrap();
    // SAFETY: as in `run`.
    unsafe { cuda.launch(&launch).unwrap() };
    for (there, case) in there.iter().zip(&cases) {
        let (out, mask) = (cuda.download(&there.out).unwrap(), cuda.download(&there.mask).unwrap());
        case.check(&Given { out, mask, flag: 0 });
    }
}

#[test]
#[ignore = "needs a CUDA device: make test-gpu"]
fn memory_is_used_again_and_given_back() {
    let cuda = device();
    let once = || {
        let buffer = cuda.upload(&vec![7; 1 << 20]).unwrap();
        assert_eq!(cuda.download(&buffer).unwrap()[1 << 19], 7);
    };
    (0..50).for_each(|_| once());
    let before = cuda.memory().unwrap();
    (0..1000).for_each(|_| once());
    let after = cuda.memory().unwrap();
    assert!(after.reserved <= before.reserved, "{before:?} to {after:?}");
    // The driver may keep the memory of a large buffer if it places smaller buffers there, but it takes no
    // more memory.
    drop(cuda.upload(&vec![7; 1 << 28]).unwrap());
    (0..4096).for_each(|_| once());
    let after = cuda.memory().unwrap();
    assert!(after.reserved <= before.reserved + (1 << 28), "{before:?} to {after:?}");
    cuda.trim().unwrap();
    assert_eq!(cuda.memory().unwrap().held, 0);
}

#[test]
#[ignore = "needs a CUDA device: make test-gpu"]
fn a_device_that_is_not_there_is_named() {
    device();
    let error = Cuda::device(999).unwrap_err().to_string();
    assert!(error.contains("device 999") && error.contains("nvidia-smi -L"), "{error}");
}
