//! The errors of a device. Each message about a device states what failed, where, why, and what to do.

/// An error of CUDA.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The library libcuda is missing.
    #[error(
        "CUDA device {ordinal} is requested, but the NVIDIA driver is not found (libcuda.so.1); install the driver and \
         run: nvidia-smi; in a container, use docker-compose.gpu.yaml; or omit device_id to train on the CPU"
    )]
    NoDriver {
        /// The number of the requested device.
        ordinal: i32,
    },
    /// The driver cannot read the kernels.
    #[error(
        "CUDA device {ordinal}: the NVIDIA driver supports CUDA {}.{}, but the kernels need {}.{} (driver 525 or \
         later); update the driver, then run: nvidia-smi",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    DriverTooOld {
        /// The number of the requested device.
        ordinal: i32,
        /// The driver's version, as 1000 * major + 10 * minor.
        found: i32,
        /// The CUDA version of the kernels, as 1000 * major + 10 * minor.
        needed: i32,
    },
    /// The device number does not exist.
    #[error(
        "CUDA device {ordinal} is requested, but {} (CUDA_VISIBLE_DEVICES: {visible}); run: nvidia-smi -L",
        describe_count(*.count)
    )]
    NoDevice {
        /// The number of the requested device.
        ordinal: i32,
        /// The number of devices that the driver reports.
        count: i32,
        /// The value of the environment variable CUDA_VISIBLE_DEVICES.
        visible: String,
    },
    /// The kernels cannot run on the device.
    #[error(
        "CUDA device {ordinal} has compute capability {}.{}, but the kernels need {}.{} (A100 or later); choose \
         another device: nvidia-smi -L", .found.0, .found.1, .needed.0, .needed.1
    )]
    DeviceTooOld {
        /// The number of the requested device.
        ordinal: i32,
        /// The compute capability of the device.
        found: (i32, i32),
        /// The compute capability that the kernels need.
        needed: (i32, i32),
    },
    /// The device does not have enough free memory.
    #[error(
        "CUDA device {ordinal}: out of memory for {bytes} bytes of {what}, {}; use smaller batches or a lower staleness, \
         or list the processes that use the device: nvidia-smi", describe_memory(.free_and_total)
    )]
    OutOfMemory {
        /// The number of the device.
        ordinal: i32,
        /// The purpose of the memory.
        what: &'static str,
        /// The requested size, in bytes.
        bytes: usize,
        /// The free memory and the total memory of the device, in bytes, or the error of the driver.
        free_and_total: Result<(usize, usize), String>,
    },
    /// Page-locked memory could not be allocated.
    #[error(
        "CUDA device {ordinal}: {bytes} bytes of page-locked memory cannot be allocated ({code}); use smaller batches \
         or a lower staleness, and check: free -m; ulimit -l"
    )]
    NoPinnedMemory {
        /// The number of the device.
        ordinal: i32,
        /// The requested size, in bytes.
        bytes: usize,
        /// The error that the driver returned.
        code: String,
    },
    /// A call failed for any other reason.
    #[error("CUDA device {ordinal}: {what} failed with {code}; {}", next_step(.what))]
    Failed {
        /// The number of the device.
        ordinal: i32,
        /// The name of the call.
        what: &'static str,
        /// The driver's name and description of the error.
        code: String,
    },
    /// The library of the driver lacks a function, or a call of it failed.
    #[error(
        "CUDA device {ordinal}: the NVIDIA driver is damaged or too old: {what}; update the driver, then run: \
         nvidia-smi"
    )]
    BrokenDriver {
        /// The number of the requested device.
        ordinal: i32,
        /// The message that names the missing function.
        what: String,
    },
    /// Gradients do not fit the step.
    #[error("{what}")]
    BadGradient {
        /// The gradient, and what was expected.
        what: String,
    },
}

/// The calls that open a device. No kernel runs before them.
const OPENING: [&str; 9] = [
    "cuDriverGetVersion",
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuMemPoolCreate",
];

fn next_step(what: &str) -> &'static str {
    if OPENING.contains(&what) {
        "check the device and its driver: nvidia-smi; if the error recurs, update the driver"
    } else {
        "restart the process; if the error recurs, find the kernel with: CUDA_LAUNCH_BLOCKING=1 compute-sanitizer python \
         SCRIPT"
    }
}

fn describe_count(count: i32) -> String {
    match count {
        0 => "no device is visible".into(),
        1 => "one device is visible, number 0".into(),
        _ => format!("{count} devices are visible, numbers 0 to {}", count - 1),
    }
}

fn describe_memory(free_and_total: &Result<(usize, usize), String>) -> String {
    match free_and_total {
        Ok((free, total)) => format!("{free} of {total} bytes are free"),
        Err(code) => format!("its free memory cannot be read ({code})"),
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
                CudaError::OutOfMemory { ordinal, what, bytes: 5, free_and_total: Ok((1, 4)) },
                ["5 bytes of a copy, 1 of 4 bytes are free;", "smaller batches"],
            ),
            (
                CudaError::OutOfMemory { ordinal, what, bytes: 5, free_and_total: Err(code.clone()) },
                [
                    "5 bytes of a copy, its free memory cannot be read (CUDA_ERROR_UNKNOWN);",
                    "smaller batches",
                ],
            ),
            (CudaError::NoPinnedMemory { ordinal, bytes: 5, code: code.clone() }, ["5 bytes", "ulimit -l"]),
            (
                CudaError::Failed { ordinal, what: "cuInit", code: code.clone() },
                ["cuInit failed with CUDA_ERROR_UNKNOWN; check the device", "update the driver"],
            ),
            (
                CudaError::Failed { ordinal, what, code },
                ["a copy failed with CUDA_ERROR_UNKNOWN", "compute-sanitizer"],
            ),
            (
                CudaError::BrokenDriver { ordinal, what: "no cuInit".into() },
                ["no cuInit", "update the driver"],
            ),
        ] {
            let text = error.to_string();
            assert!(text.contains("CUDA device 3"), "{text}");
            assert!(named.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}
