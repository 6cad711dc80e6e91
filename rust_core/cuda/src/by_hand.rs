//! Memory and launches under manual control, for tests and measurements. An engine uses
//! [`CudaDevice`](crate::CudaDevice).

use std::time::{Duration, Instant};

use crate::Cuda;
use crate::error::CudaError;
use crate::kernels::{Job, Kernel, lay_out};
use crate::layout::Jobs;
use crate::memory::Block;

/// A buffer in the memory of a device.
#[derive(Debug)]
pub struct Buffer {
    block: Block,
    bytes: usize,
}

impl Buffer {
    /// The address of the first byte.
    pub fn address(&self) -> u64 {
        self.block.address()
    }
}

/// Jobs in the memory of a device.
#[derive(Debug)]
pub struct Launch {
    kernel: Kernel,
    jobs: Buffer,
    count: u32,
    blocks: u32,
    flag: Buffer,
}

impl Cuda {
    /// Copy `bytes` to the device.
    ///
    /// # Errors
    /// [`CudaError`] if there is no memory, or from the driver.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer, CudaError> {
        let _current = self.context.enter()?;
        let mut staging = self.pinned.take(bytes.len())?;
        staging.bytes_mut().copy_from_slice(bytes);
        let block = self.pool.take(bytes.len(), "a copy", &self.sums)?;
        staging.upload(block.address(), &self.sums)?;
        staging.give_back_after(self.sums.record()?);
        Ok(Buffer { block, bytes: bytes.len() })
    }

    /// Read the content of a buffer after all work queued so far.
    ///
    /// # Errors
    /// [`CudaError`] if there is no memory, or from the driver.
    pub fn download(&self, buffer: &Buffer) -> Result<Vec<u8>, CudaError> {
        let _current = self.context.enter()?;
        let mut staging = self.pinned.take(buffer.bytes)?;
        staging.download(buffer.address(), &self.sums)?;
        self.sums.record()?.synchronize()?;
        Ok(staging.bytes().to_vec())
    }

    /// Lay out jobs and copy them to the device.
    ///
    /// # Errors
    /// Those of [`Self::upload`].
    pub fn prepare(&self, kernel: Kernel, jobs: &mut [Job]) -> Result<Launch, CudaError> {
        let blocks = lay_out(jobs);
        let jobs_there = self.upload(bytemuck::cast_slice(jobs))?;
        let flag = self.upload(&0u32.to_le_bytes())?;
        Ok(Launch { kernel, jobs: jobs_there, count: jobs.len() as u32, blocks, flag })
    }

    /// Queue jobs.
    ///
    /// # Safety
    /// Every address in a job must have as much memory as the job states.
    ///
    /// # Errors
    /// [`CudaError`] from the driver.
    pub unsafe fn launch(&self, launch: &Launch) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        let Launch { kernel, count, blocks, .. } = *launch;
        let jobs = Jobs { kernel, place: 0, count, blocks };
        // SAFETY: the caller ensures that the addresses are valid.
        unsafe { self.kernels.launch(jobs, launch.jobs.address(), launch.flag.address(), &self.sums) }
    }

    /// Read the flag of jobs after all work queued so far.
    ///
    /// # Errors
    /// Those of [`Self::download`].
    pub fn flag(&self, launch: &Launch) -> Result<u32, CudaError> {
        Ok(bytemuck::pod_read_unaligned(&self.download(&launch.flag)?))
    }

    /// Queue a copy between two buffers of the same size.
    ///
    /// # Errors
    /// [`CudaError`] from the driver.
    pub fn copy(&self, from: &Buffer, to: &Buffer) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        to.block.copy_from(&from.block, from.bytes.min(to.bytes), &self.sums)
    }

    /// Return the mean time of `count` calls to `work`, including the time until the device has completed them.
    /// One warm-up call comes first and is not measured.
    ///
    /// # Errors
    /// [`CudaError`] from `work` or the driver.
    pub fn time(
        &self,
        count: u32,
        mut work: impl FnMut() -> Result<(), CudaError>,
    ) -> Result<Duration, CudaError> {
        let done = || {
            let current = self.context.enter()?;
            let event = self.sums.record()?;
            drop(current);
            event.synchronize()
        };
        work()?;
        done()?;
        let start = Instant::now();
        (0..count).try_for_each(|_| work())?;
        done()?;
        Ok(start.elapsed() / count.max(1))
    }
}
