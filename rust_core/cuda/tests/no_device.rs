//! Tests that, without a driver, requesting a device returns an error that says what to do. Nothing panics,
//! and nothing else fails.

use persia_cuda::{Cuda, CudaError, is_driver_present};

#[test]
fn without_a_driver_a_device_is_refused_with_what_to_do() {
    if is_driver_present() {
        return; // this machine has a driver: tests/device.rs tests it
    }
    for _ in 0..2 {
        let error = Cuda::device(0).unwrap_err();
        assert_eq!(error, CudaError::NoDriver { ordinal: 0 });
        assert!(error.to_string().contains("nvidia-smi"), "{error}");
    }
}
