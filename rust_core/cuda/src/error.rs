//! The errors of a device. Each message states what failed, where, why, and what to do.

/// An error of CUDA.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The library libcuda is missing.
    #[error(
        "CUDA device {ordinal} is requested, but the NVIDIA driver is not found (libcuda.so.1); install the driver and \
         run: nvidia-smi; in a container, use docker-compose.gpu.yaml; or omit device_id to train on the CPU"
    )]
    NoDriver {
        /// The requested device.
        ordinal: i32,
    },
    /// The driver cannot read the kernels.
    #[error(
        "CUDA device {ordinal}: the NVIDIA driver supports CUDA {}.{}, the kernels need {}.{} (driver 525 or later); \
         update the driver, then run: nvidia-smi", .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    DriverTooOld {
        /// The requested device.
        ordinal: i32,
        /// The driver's version, as 1000 * major + 10 * minor.
        found: i32,
        /// The version of the kernels.
        needed: i32,
    },
    /// The device number does not exist.
    #[error(
        "CUDA device {ordinal} is requested, but {} (CUDA_VISIBLE_DEVICES: {visible}); run: nvidia-smi -L",
        describe_count(*.count)
    )]
    NoDevice {
        /// The requested device.
        ordinal: i32,
        /// The number of devices that the driver reports.
        count: i32,
        /// The value of the environment variable CUDA_VISIBLE_DEVICES.
        visible: String,
    },
    /// The kernels cannot run on the device.
    #[error(
        "CUDA device {ordinal} has compute capability {}.{}, the kernels need {}.{} (A100 or later); choose another \
         device: nvidia-smi -L", .found.0, .found.1, .needed.0, .needed.1
    )]
    DeviceTooOld {
        /// The requested device.
        ordinal: i32,
        /// The compute capability of the device.
        found: (i32, i32),
        /// The compute capability that the kernels need.
        needed: (i32, i32),
    },
    /// The device has no free memory.
    #[error(
        "CUDA device {ordinal}: out of memory for {bytes} bytes of {what}, {free} of {total} bytes are free; use smaller \
         batches or a lower staleness, or list the processes that use the device: nvidia-smi"
    )]
    OutOfMemory {
        /// The device.
        ordinal: i32,
        /// The purpose of the memory.
        what: &'static str,
        /// The requested size, in bytes.
        bytes: usize,
        /// The free memory of the device, in bytes.
        free: usize,
        /// The total memory of the device, in bytes.
        total: usize,
    },
    /// Page-locked memory could not be allocated.
    #[error(
        "CUDA device {ordinal}: {bytes} bytes of page-locked memory cannot be allocated ({code}); use smaller batches \
         or a lower staleness, and check: free -m; ulimit -l"
    )]
    NoPinnedMemory {
        /// The device.
        ordinal: i32,
        /// The requested size, in bytes.
        bytes: usize,
        /// The error that the driver returned.
        code: String,
    },
    /// A call failed for any other reason.
    #[error(
        "CUDA device {ordinal}: {what} failed with {code}; restart the process; if the error recurs, find the kernel with: \
         CUDA_LAUNCH_BLOCKING=1 compute-sanitizer python SCRIPT"
    )]
    Failed {
        /// The device.
        ordinal: i32,
        /// The name of the call.
        what: &'static str,
        /// The driver's name and description of the error.
        code: String,
    },
    /// The library of the driver lacks a function.
    #[error(
        "CUDA device {ordinal}: the NVIDIA driver is damaged or too old: {what}; update it, then run: nvidia-smi"
    )]
    BrokenDriver {
        /// The requested device.
        ordinal: i32,
        /// The missing function.
        what: String,
    },
    /// Gradients do not fit the step.
    #[error("{what}")]
    BadGradient {
        /// The gradient, and what was expected.
        what: String,
    },
}

fn describe_count(count: i32) -> String {
    match count {
        0 => "no device is visible".into(),
        1 => "one device is visible, number 0".into(),
        _ => format!("{count} devices are visible, numbers 0 to {}", count - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_says_where_and_what_to_do_next() {
        let (ordinal, what, code) = (3, "a copy", "CUDA_ERROR_UNKNOWN".to_owned());
        let visible = "0,1".to_owned();
        for (error, named) in [
            (CudaError::NoDriver { ordinal }, ["libcuda.so.1", "nvidia-smi"]),
            (
                CudaError::DriverTooOld { ordinal, found: 11_080, needed: 12_000 },
                ["CUDA 11.8", "12.0 (driver 525"],
            ),
            (
                CudaError::NoDevice { ordinal, count: 2, visible },
                ["2 devices are visible, numbers 0 to 1", "nvidia-smi -L"],
            ),
            (
                CudaError::DeviceTooOld { ordinal, found: (7, 5), needed: (8, 0) },
                ["capability 7.5", "need 8.0"],
            ),
            (
                CudaError::OutOfMemory { ordinal, what, bytes: 5, free: 1, total: 4 },
                ["5 bytes of a copy, 1 of 4 bytes", "smaller batches"],
            ),
            (CudaError::NoPinnedMemory { ordinal, bytes: 5, code: code.clone() }, ["5 bytes", "ulimit -l"]),
            (
                CudaError::Failed { ordinal, what, code },
                ["a copy failed with CUDA_ERROR_UNKNOWN", "compute-sanitizer"],
            ),
            (CudaError::BrokenDriver { ordinal, what: "no cuInit".into() }, ["no cuInit", "update it"]),
        ] {
            let text = error.to_string();
            assert!(text.contains("CUDA device 3"), "{text}");
            assert!(named.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}
