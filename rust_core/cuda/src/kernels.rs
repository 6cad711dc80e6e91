//! The kernels of `kernels.cu` and their arguments. They are carried as PTX, which the driver compiles for its device.

use std::ffi::{CStr, CString};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUjit_option, CUresult};
use persia_types::Dtype;

use crate::driver::{Context, Stream, describe};
use crate::error::CudaError;
use crate::layout::Jobs;

/// The kernels, made by `tools/cuda_ptx.py`.
pub const PTX: &str = include_str!("kernels.ptx");

/// The version of CUDA whose compiler made [`PTX`], as drivers count: an older driver cannot read it.
pub const CUDA_VERSION: i32 = 12_000;

/// The oldest devices that [`PTX`] is for.
pub const COMPUTE_CAPABILITY: (i32, i32) = (8, 0);

/// Threads of a block.
const BLOCK: u32 = 256;
/// Bytes that are kept of the compiler's message in the driver.
const LOG_BYTES: usize = 4096;
/// The most columns that a block works on.
const COLUMNS: u32 = 32;

/// The computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Rows to samples.
    GatherPool,
    /// Rows to the places of a sequence, and a mask.
    GatherRaw,
    /// Gradients of samples to unique ids.
    SegmentSum,
}

impl Kernel {
    /// Its name in the source.
    pub const fn name(self) -> &'static CStr {
        match self {
            Self::GatherPool => c"gather_pool",
            Self::GatherRaw => c"gather_raw",
            Self::SegmentSum => c"segment_sum",
        }
    }
}

/// One feature's part of a launch. Fields are those of `Job` in `kernels.cu`, addresses of the device; 0 is null.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Job {
    /// The rows to be added: `[*, dim]`.
    pub rows: u64,
    /// Per use its row; null: use `i` has row `i`.
    pub places: u64,
    /// Maps places to rows, or sums to rows of `out`; null: identity.
    pub map: u64,
    /// Per sum where its uses start; null: one use each.
    pub starts: u64,
    /// Per use a factor; null: 1.
    pub weights: u64,
    /// Per sum (per row, of gradients) a divisor; null: 1.
    pub divisors: u64,
    /// `[sums, dim]`.
    pub out: u64,
    /// Of [`Kernel::GatherRaw`]: a byte for each sum.
    pub mask: u64,
    /// Of [`Kernel::SegmentSum`]: the factor of a sum.
    pub scale: f32,
    /// Number of sums.
    pub sums: u32,
    /// Columns.
    pub dim: u32,
    /// [`element`] of `rows`.
    pub from: u32,
    /// [`element`] of `out`.
    pub to: u32,
    /// Of [`Kernel::SegmentSum`]: 1 to add to the content of `out`, which is of f32.
    pub onto: u32,
    /// Set by [`lay_out`].
    pub width: u32,
    /// Set by [`lay_out`].
    pub lanes: u32,
    /// Set by [`lay_out`].
    pub first: u32,
    /// Nothing.
    pub padding: u32,
}

// SAFETY: all zeros are a valid, empty job.
unsafe impl bytemuck::Zeroable for Job {}
// SAFETY: the fields are numbers, `padding` included, and leave no gaps.
unsafe impl bytemuck::Pod for Job {}

/// A type of elements, as the kernels number them.
pub const fn element(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
    }
}

/// Bytes of an element.
pub const fn element_bytes(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        Dtype::F16 | Dtype::Bf16 => 2,
    }
}

impl Job {
    /// Whether a thread may read and write four columns at once.
    fn in_fours(&self) -> bool {
        let aligned = |address: u64, element: u32| address.is_multiple_of(if element == 0 { 16 } else { 8 });
        self.dim.is_multiple_of(4) && aligned(self.rows, self.from) && aligned(self.out, self.to)
    }
}

/// Divide jobs into blocks; returns their number.
pub fn lay_out(jobs: &mut [Job]) -> u32 {
    let mut blocks = 0;
    for job in jobs {
        job.width = if job.in_fours() { 4 } else { 1 };
        let threads = job.dim.div_ceil(job.width).clamp(1, COLUMNS / job.width);
        job.lanes = threads.next_power_of_two().trailing_zeros();
        let column_blocks = job.dim.div_ceil(job.width << job.lanes);
        job.first = blocks;
        blocks += job.sums.div_ceil(BLOCK >> job.lanes) * column_blocks;
    }
    blocks
}

/// The module, loaded on a device.
#[derive(Debug)]
pub(crate) struct Kernels {
    functions: [sys::CUfunction; 3],
    context: Arc<Context>,
}

// SAFETY: functions may be launched from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Have the driver compile the kernels; they stay until the process ends.
    pub(crate) fn load(context: &Arc<Context>) -> Result<Self, CudaError> {
        let failed =
            |code: String| CudaError::Failed { ordinal: context.ordinal(), what: "cuModuleLoadDataEx", code };
        let image = CString::new(PTX).map_err(|error| failed(error.to_string()))?;
        let mut module = std::ptr::null_mut();
        // The last byte is never written, so the text ends in 0.
        let mut log = [0u8; LOG_BYTES + 1];
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
        // SAFETY: a text that ends in NUL, as the driver wants PTX; two options, and a value for each.
        let code = unsafe {
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            sys::cuModuleLoadDataEx(&mut module, image.as_ptr().cast(), 2, options, values)
        };
        if code != CUresult::CUDA_SUCCESS {
            let log = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
            return Err(failed(format!("{} {}", describe(code), log.trim()).trim_end().into()));
        }
        let mut functions = [std::ptr::null_mut(); 3];
        for kernel in [Kernel::GatherPool, Kernel::GatherRaw, Kernel::SegmentSum] {
            let place = &mut functions[kernel as usize];
            // SAFETY: the module is loaded.
            let code = unsafe { sys::cuModuleGetFunction(place, module, kernel.name().as_ptr()) };
            context.check("cuModuleGetFunction", code)?;
        }
        Ok(Self { functions, context: Arc::clone(context) })
    }

    /// Queue the jobs in the block at address `block`; a sum of gradients that is not finite sets the word at
    /// address `flag`.
    ///
    /// # Safety
    /// Every address of the jobs has as much memory as the job says, until the stream has passed the launch.
    pub(crate) unsafe fn launch(
        &self,
        jobs: Jobs,
        block: u64,
        mut flag: u64,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let Jobs { kernel, place, mut count, blocks } = jobs;
        if blocks == 0 {
            return Ok(());
        }
        let mut jobs = block + place as u64;
        let arguments: [*mut u64; 3] = [&mut jobs, (&raw mut count).cast(), &mut flag];
        let mut arguments = arguments.map(<*mut u64>::cast);
        let function = self.functions[kernel as usize];
        let (stream, none) = (stream.handle(), std::ptr::null_mut());
        // SAFETY: the arguments have the kernel's types (only segment_sum reads the last one); the caller
        // ensures the rest.
        let code = unsafe {
            sys::cuLaunchKernel(function, blocks, 1, 1, BLOCK, 1, 1, 0, stream, arguments.as_mut_ptr(), none)
        };
        let what = match kernel {
            Kernel::GatherPool => "gather_pool",
            Kernel::GatherRaw => "gather_raw",
            Kernel::SegmentSum => "segment_sum",
        };
        self.context.check(what, code)
    }
}
