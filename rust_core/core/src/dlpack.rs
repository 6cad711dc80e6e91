//! Passes tensors to and from Python without a copy, as unversioned capsules of DLPack 0.8, which every consumer
//! accepts.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors;

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;
/// DLPack's device type for CUDA memory.
pub(crate) const CUDA: i32 = 2;
/// DLPack's number for the default stream of CUDA.
const DEFAULT_STREAM: i64 = 1;
/// DLPack's stream number for a consumer that does its own synchronization.
const NO_ORDER: i64 = -1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

/// DLPack's element type: a code (0 signed, 1 unsigned, 2 float, 4 bfloat, 6 bool), bits and lanes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ElementType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    lanes: u16,
}

impl ElementType {
    pub(crate) const fn new(code: u8, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    pub(crate) const F32: Self = Self::new(2, 32);
}

impl std::fmt::Display for ElementType {
    /// The name of the type in PyTorch, such as `float64`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            5 => "complex",
            6 => return f.write_str("bool"),
            code => return write!(f, "DLPack type {code} of {} bits", self.bits),
        };
        write!(f, "{kind}{}", self.bits)
    }
}

/// IEEE binary16.
#[cfg(feature = "cuda")]
pub(crate) const F16: ElementType = ElementType::new(2, 16);
/// The upper half of a binary32.
#[cfg(feature = "cuda")]
pub(crate) const BF16: ElementType = ElementType::new(4, 16);

/// The kind of a step's tensor on a device.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a build without CUDA has no device to ask"))]
pub(crate) enum TensorKind {
    /// The vectors of an id feature.
    Vectors(usize),
    /// The mask of a raw feature.
    Mask(usize),
    /// A dense input or label.
    Given(usize),
}

/// Device memory whose uses are ordered by streams.
pub(crate) trait OnStream: Send + Sync {
    /// The type and number of the device in DLPack.
    fn device(&self) -> (i32, i32);
    /// Make work that is queued on `stream` later wait until the memory is written.
    fn hand_to(&self, stream: usize) -> Result<(), String>;
    /// Record that the work on `stream` so far uses the memory.
    fn used_on(&self, stream: usize);
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: ElementType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// The objects that an exported capsule keeps alive.
struct Exported {
    managed: Managed,
    shape: Vec<i64>,
    /// The device memory, and the stream of the consumer; None for a tensor on the CPU.
    stream: Option<(Arc<dyn OnStream>, usize)>,
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// A tensor for `torch.from_dlpack(tensor)`.
#[pyclass(module = "persia_core.forward", frozen)]
pub(crate) struct Tensor {
    /// The owner of the memory; None for a tensor on a device.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    device: Option<Arc<dyn OnStream>>,
    data: *mut c_void,
    dtype: ElementType,
    shape: Vec<i64>,
}

// SAFETY: `data` points into memory that `owner` or `device` keeps alive. Both are Send and Sync. The pointer is only
// passed on.
unsafe impl Send for Tensor {}
// SAFETY: as for `Send`. No method writes through the pointer.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Share `bytes`, which `owner` keeps alive, as a row-major tensor.
    pub(crate) fn new(
        owner: Arc<dyn Any + Send + Sync>,
        bytes: &[u8],
        dtype: ElementType,
        shape: &[usize],
    ) -> Self {
        debug_assert_eq!(
            bytes.len(),
            shape.iter().product::<usize>() * usize::from(dtype.bits).div_ceil(8),
            "shape and bytes agree"
        );
        let shape = shape.iter().map(|&n| n as i64).collect();
        Self { owner: Some(owner), device: None, data: bytes.as_ptr().cast_mut().cast(), dtype, shape }
    }

    /// Create a row-major tensor at a device address. `device` keeps the memory alive.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(
        device: Arc<dyn OnStream>,
        address: u64,
        dtype: ElementType,
        shape: &[usize],
    ) -> Self {
        let shape = shape.iter().map(|&n| n as i64).collect();
        Self { owner: None, device: Some(device), data: address as *mut c_void, dtype, shape }
    }

    fn place(&self) -> (i32, i32) {
        self.device.as_ref().map_or((CPU, 0), |device| device.device())
    }

    /// Make the consumer's stream wait for the tensor. Returns the device memory and the stream of the
    /// consumer; None for a tensor on the CPU.
    fn hand_over(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<(Arc<dyn OnStream>, usize)>> {
        let Some(device) = &self.device else { return Ok(None) };
        let stream: Option<i64> = stream.map(|stream| stream.extract()).transpose()?;
        let number = stream.filter(|stream| *stream > 0).unwrap_or(DEFAULT_STREAM) as usize;
        if stream != Some(NO_ORDER) {
            device.hand_to(number).map_err(|text| errors::raise(py, "DeviceError", text))?;
        }
        Ok(Some((Arc::clone(device), number)))
    }
}

#[pymethods]
impl Tensor {
    /// Return the capsule. On a device, the tensor is ready for work that is queued on `stream` from then on. The last
    /// use of the tensor must also be queued on this stream.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<&Bound<'py, PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = max_version;
        let (kind, id) = self.place();
        if dl_device.is_some_and(|device| device != (kind, id)) || copy == Some(true) {
            return Err(PyBufferError::new_err(
                "cannot export a persia tensor as a copy or to another device; copy it after the import",
            ));
        }
        let stream = self.hand_over(py, stream)?;
        let mut exported = Box::new(Exported {
            managed: Managed {
                tensor: DlTensor {
                    data: self.data,
                    device: Device { kind, id },
                    ndim: self.shape.len() as i32,
                    dtype: self.dtype,
                    shape: std::ptr::null_mut(),
                    strides: std::ptr::null_mut(),
                    byte_offset: 0,
                },
                context: std::ptr::null_mut(),
                deleter: Some(release_exported),
            },
            shape: self.shape.clone(),
            stream,
            _owner: self.owner.clone(),
        });
        exported.managed.tensor.shape = exported.shape.as_mut_ptr();
        let raw = Box::into_raw(exported);
        // SAFETY: `raw` is a live `Exported`; its `managed` is the content that the protocol requires in the capsule.
        // The consumer, or `drop_capsule` if there is no consumer, calls the deleter exactly once.
        unsafe {
            (*raw).managed.context = raw.cast();
            let capsule =
                ffi::PyCapsule_New((&raw mut (*raw).managed).cast(), NAME.as_ptr(), Some(drop_capsule));
            if capsule.is_null() {
                drop(Box::from_raw(raw));
            }
            Bound::from_owned_ptr_or_err(py, capsule)
        }
    }

    /// The device type and number: `(1, 0)` is the CPU, `(2, n)` is CUDA device n.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.place()
    }

    /// The shape of the tensor.
    #[getter]
    fn shape(&self) -> Vec<i64> {
        self.shape.clone()
    }
}

unsafe extern "C" fn release_exported(managed: *mut Managed) {
    // SAFETY: only `Tensor::__dlpack__` installs this deleter, with `context` set to its box.
    let exported = unsafe { Box::from_raw((*managed).context.cast::<Exported>()) };
    if let Some((device, stream)) = &exported.stream {
        device.used_on(*stream);
    }
}

unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with a capsule that `Tensor::__dlpack__` created. A consumed capsule has a different
    // name and is not changed.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<Managed>();
            release_exported(managed);
        }
    }
}

/// A float32 tensor that Python owns. It is kept alive and can be read from any thread.
///
/// The capsule remains the owner. A thread without the GIL must not call the tensor's deleter: PyTorch's deleter
/// waits for the GIL, and this wait ends the process while the interpreter shuts down. Dropping a [`Py`] defers the
/// call to a thread with the GIL.
pub(crate) struct Borrowed {
    start: *const f32,
    len: usize,
    _capsule: Py<PyAny>,
}

// SAFETY: the floats live as long as the capsule, and they are only read.
unsafe impl Send for Borrowed {}
// SAFETY: as for `Send`.
unsafe impl Sync for Borrowed {}

impl AsRef<[f32]> for Borrowed {
    fn as_ref(&self) -> &[f32] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `borrow_f32` checked that the tensor is float32, on the CPU, aligned, row-major and contiguous, and
        // has `len` elements.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// A tensor that Python owns.
pub(crate) struct Imported {
    pub(crate) data: *const c_void,
    pub(crate) dtype: ElementType,
    /// The owner of the tensor.
    pub(crate) capsule: Py<PyAny>,
}

/// Import a contiguous float32 CPU tensor of shape `want` from an object with `__dlpack__`.
pub(crate) fn borrow_f32(object: &Bound<'_, PyAny>, what: &str, want: &[usize]) -> PyResult<Borrowed> {
    let Imported { data, dtype, capsule } = borrow_from(object, what, want, (CPU, 0), None)?;
    let refuse = |text: String| Err(errors::feature_type(object.py(), format!("{what}: {text}")));
    if dtype != ElementType::F32 {
        return refuse(format!("expected float32, found {dtype}"));
    }
    let (len, start) = (want.iter().product(), data.cast::<f32>());
    if len > 0 && !start.is_aligned() {
        return refuse("its data is not aligned to 4 bytes; make a copy".into());
    }
    Ok(Borrowed { start, len, _capsule: capsule })
}

/// Import a contiguous tensor of shape `want` at `place` from an object with `__dlpack__`. On a device, it is ready for
/// later work on `stream`.
pub(crate) fn borrow_from(
    object: &Bound<'_, PyAny>,
    what: &str,
    want: &[usize],
    place: (i32, i32),
    stream: Option<usize>,
) -> PyResult<Imported> {
    let py = object.py();
    let refuse = |text: String| Err(errors::feature_type(py, format!("{what}: {text}")));
    let capsule = match stream {
        None => object.call_method0("__dlpack__")?,
        Some(stream) => {
            let arguments = PyDict::new(py);
            arguments.set_item("stream", stream)?;
            object.call_method("__dlpack__", (), Some(&arguments))?
        }
    };
    // SAFETY: the name is checked before the pointer is taken; by the protocol, shape and strides have `ndim` elements,
    // and all memory lives as long as the capsule.
    let (data, device, dtype, shape, strides) = unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) != 1 {
            return refuse("its __dlpack__() returned no DLPack capsule".into());
        }
        let managed = ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()).cast::<Managed>();
        let tensor = &(*managed).tensor;
        let dims = tensor.ndim as usize;
        let shape = if dims == 0 { &[][..] } else { std::slice::from_raw_parts(tensor.shape, dims) };
        let strides = (!tensor.strides.is_null() && dims > 0)
            .then(|| std::slice::from_raw_parts(tensor.strides, dims).to_vec());
        let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize).cast::<c_void>();
        (data, tensor.device, tensor.dtype, shape.to_vec(), strides)
    };
    if device.kind != place.0 || (place.0 != CPU && device.id != place.1) {
        let (wanted, found) = (device_name(place), device_name((device.kind, device.id)));
        return refuse(format!("expected a tensor on {wanted}, found one on {found}"));
    }
    if shape.len() != want.len() || shape.iter().zip(want).any(|(&have, &want)| have != want as i64) {
        return refuse(format!("found shape {shape:?}, expected {want:?}"));
    }
    if let Some(strides) = strides {
        let mut expected = 1;
        for (&size, &stride) in shape.iter().zip(&strides).rev() {
            if size != 1 && stride != expected {
                let found = format!("found strides {strides:?} for shape {shape:?}");
                return refuse(format!("{found}, expected a contiguous tensor; call contiguous()"));
            }
            expected *= size;
        }
    }
    Ok(Imported { data, dtype, capsule: capsule.unbind() })
}

fn device_name((kind, id): (i32, i32)) -> String {
    match kind {
        CPU => "the CPU".into(),
        CUDA => format!("CUDA device {id}"),
        _ => format!("device {id} of DLPack type {kind}"),
    }
}
