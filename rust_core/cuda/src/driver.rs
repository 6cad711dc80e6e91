//! The driver's context, streams and events. Every driver call that needs a context is made within
//! [`Context::enter`], which restores the previous context afterwards, because PyTorch shares the thread and
//! the device's primary context.

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use crate::error::CudaError;
use crate::kernels::{COMPUTE_CAPABILITY, CUDA_VERSION};

/// Whether the driver's library can be opened.
pub fn is_driver_present() -> bool {
    // SAFETY: the call opens and closes a library by its name.
    unsafe { sys::is_culib_present() }
}

/// A device's primary context, which PyTorch also uses. It is kept until the process ends.
#[derive(Debug)]
pub(crate) struct Context {
    ordinal: i32,
    handle: sys::CUcontext,
}

// SAFETY: a context may be current on any number of threads. The handle is only passed to the driver.
unsafe impl Send for Context {}
// SAFETY: a shared context is only passed to the driver, which accepts calls from any thread.
unsafe impl Sync for Context {}

/// A context, while it is current on this thread.
pub(crate) struct Entered<'a> {
    _context: &'a Context,
    _of_this_thread: PhantomData<*const ()>,
}

impl Context {
    /// Open a device on which the kernels can run.
    pub(crate) fn open(ordinal: i32) -> Result<Arc<Self>, CudaError> {
        if !is_driver_present() {
            return Err(CudaError::NoDriver { ordinal });
        }
        let call = |what, code| check(ordinal, what, code);
        let (mut version, mut count, mut device): (c_int, c_int, _) = (0, 0, 0);
        let mut capability = (0, 0);
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is loaded, and all pointers point to local variables.
        unsafe {
            call("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
            if version < CUDA_VERSION {
                return Err(CudaError::DriverTooOld { ordinal, found: version, needed: CUDA_VERSION });
            }
            let none = CUresult::CUDA_ERROR_NO_DEVICE;
            match sys::cuInit(0) {
                code if code == none => {}
                code => {
                    call("cuInit", code)?;
                    call("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
                }
            }
            if !(0..count).contains(&ordinal) {
                let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "not set".into());
                return Err(CudaError::NoDevice { ordinal, count, visible });
            }
            call("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal))?;
            let (major, minor) = (
                sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            );
            call("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&mut capability.0, major, device))?;
            call("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&mut capability.1, minor, device))?;
            if capability < COMPUTE_CAPABILITY {
                return Err(CudaError::DeviceTooOld {
                    ordinal,
                    found: capability,
                    needed: COMPUTE_CAPABILITY,
                });
            }
            call("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut handle, device))?;
        }
        Ok(Arc::new(Self { ordinal, handle }))
    }

    pub(crate) fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Make the context current on this thread until the result is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        // SAFETY: the context is alive.
        self.check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.handle) })?;
        Ok(Entered { _context: self, _of_this_thread: PhantomData })
    }

    pub(crate) fn check(&self, what: &'static str, code: CUresult) -> Result<(), CudaError> {
        check(self.ordinal, what, code)
    }

    /// The free memory and the total memory of the device, in bytes. If they cannot be read, returns the name
    /// and the description of the driver's error.
    pub(crate) fn free_and_total(&self) -> Result<(usize, usize), String> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers point to local variables.
        let code = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        if code == CUresult::CUDA_SUCCESS { Ok((free, total)) } else { Err(describe(code)) }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: `enter` pushed the context on this thread.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
    }
}

fn check(ordinal: i32, what: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Failed { ordinal, what, code: describe(code) })
}

/// The driver's name and description of an error.
pub(crate) fn describe(code: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver returns a text that lives as long as its library, or null.
        unsafe {
            let known = get(code, &mut text) == CUresult::CUDA_SUCCESS && !text.is_null();
            known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(text)) => format!("{name}: {text}"),
        _ => format!("error {}", code as u32),
    }
}

/// A stream separate from PyTorch's. It is kept until the process ends.
#[derive(Debug)]
pub(crate) struct Stream {
    handle: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: the driver accepts calls for a stream from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver also accepts concurrent calls for a stream.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer points to a local variable.
        context.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(Self { handle, context: Arc::clone(context) })
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Make work that is queued on this stream later wait for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), CudaError> {
        event.let_wait(self.handle)
    }

    /// Record an event after all work queued so far.
    pub(crate) fn record(&self) -> Result<Event, CudaError> {
        let event = Event::new(&self.context)?;
        event.record(self.handle)?;
        Ok(event)
    }

    /// Begin to queue work that may fail halfway. Declare the result after the memory that the work uses, so that
    /// the result is dropped first.
    pub(crate) fn queue(&self) -> Queue<'_> {
        Queue(self)
    }
}

/// Waits for the device when it is dropped, because queued work may still use the memory that is dropped next.
pub(crate) struct Queue<'a>(&'a Stream);

impl Queue<'_> {
    /// Do not wait for the device: all work is queued, and events mark its end.
    pub(crate) fn finish(self) {
        std::mem::forget(self);
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        // SAFETY: the stream is alive. A failure here is ignored, because the first failure is reported.
        let _ = unsafe { sys::cuStreamSynchronize(self.0.handle) };
    }
}

/// An event: a point in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    handle: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver accepts calls for an event from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver also accepts concurrent calls for an event.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // A thread that waits for the event sleeps instead of spinning.
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        // SAFETY: the pointer points to a local variable.
        context.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, flags) })?;
        Ok(Self { handle, context: Arc::clone(context) })
    }

    /// Record the event after all work queued on `stream` so far.
    pub(crate) fn record(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: the event is alive; the stream is one of this crate or the one that the DLPack consumer named.
        self.context.check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream) })
    }

    /// Make work that is queued on `stream` later wait for the event.
    pub(crate) fn let_wait(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: as in `record`.
        self.context.check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, self.handle, 0) })
    }

    /// Whether the device has reached the event. False after an error.
    pub(crate) fn is_done(&self) -> bool {
        let Ok(_current) = self.context.enter() else { return false };
        // SAFETY: the event is alive.
        unsafe { sys::cuEventQuery(self.handle) == CUresult::CUDA_SUCCESS }
    }

    /// Wait until the device has reached the event.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: the event is alive.
        self.context.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: `new` created the event, and the driver keeps it as long as work waits for it.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
