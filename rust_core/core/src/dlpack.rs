//! Tensors to and from Python without a copy, by the DLPack protocol (the struct layout of its version 0.8, which
//! every consumer still accepts as an unversioned capsule).
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors;

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

/// DLPack's element type: code (0 signed, 1 unsigned, 2 float, 6 bool), bits, lanes.
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

/// What an exported capsule keeps alive.
struct Exported {
    managed: Managed,
    shape: Vec<i64>,
    _owner: Arc<dyn Any + Send + Sync>,
}

/// A tensor on the CPU that Python takes over by `torch.from_dlpack(tensor)`.
#[pyclass(module = "persia_core.forward", frozen)]
pub(crate) struct Tensor {
    owner: Arc<dyn Any + Send + Sync>,
    data: *mut c_void,
    dtype: ElementType,
    shape: Vec<i64>,
}

// SAFETY: `data` points into `owner`, which is Send and Sync and outlives it; the pointer is only handed on.
unsafe impl Send for Tensor {}
// SAFETY: as above; no method writes through the pointer.
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
        Self { owner, data: bytes.as_ptr().cast_mut().cast(), dtype, shape }
    }
}

#[pymethods]
impl Tensor {
    /// The capsule; `stream` is ignored on the CPU.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<&Bound<'py, PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = (stream, max_version);
        if dl_device.is_some_and(|device| device != (CPU, 0)) || copy == Some(true) {
            return Err(PyBufferError::new_err(
                "persia tensors are on the CPU and are handed over without a copy",
            ));
        }
        let mut exported = Box::new(Exported {
            managed: Managed {
                tensor: DlTensor {
                    data: self.data,
                    device: Device { kind: CPU, id: 0 },
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
            _owner: self.owner.clone(),
        });
        exported.managed.tensor.shape = exported.shape.as_mut_ptr();
        let raw = Box::into_raw(exported);
        // SAFETY: `raw` is a live `Exported`; its `managed` is what the protocol wants in the capsule, and the
        // consumer (or `drop_capsule`, when there is none) gives it back through the deleter exactly once.
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

    /// `(1, 0)`: the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (CPU, 0)
    }

    /// The tensor's shape.
    #[getter]
    fn shape(&self) -> Vec<i64> {
        self.shape.clone()
    }
}

unsafe extern "C" fn release_exported(managed: *mut Managed) {
    // SAFETY: only `Tensor::__dlpack__` installs this deleter, with `context` set to its box.
    unsafe { drop(Box::from_raw((*managed).context.cast::<Exported>())) }
}

unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with a capsule made above; once consumed it has another name and is left alone.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<Managed>();
            release_exported(managed);
        }
    }
}

/// A float32 tensor of somebody else's, kept alive and readable from any thread.
///
/// The capsule stays its owner. A thread that is done with it must not call the tensor's deleter itself: PyTorch's waits for
/// the GIL, and ends the process where the interpreter is on its way out. Dropping a [`Py`] leaves that to the next
/// thread which has the GIL.
pub(crate) struct Borrowed {
    start: *const f32,
    len: usize,
    _capsule: Py<PyAny>,
}

// SAFETY: the floats live as long as the capsule and are only read.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl AsRef<[f32]> for Borrowed {
    fn as_ref(&self) -> &[f32] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: checked in `borrow_f32`: float32, on the CPU, aligned, row-major and contiguous, `len` elements.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// Take a contiguous float32 CPU tensor of shape `want` from any object with `__dlpack__`.
pub(crate) fn borrow_f32(object: &Bound<'_, PyAny>, what: &str, want: &[usize]) -> PyResult<Borrowed> {
    let py = object.py();
    let refuse = |text: String| Err(errors::feature_type(py, format!("{what}: {text}")));
    let capsule = object.call_method0("__dlpack__")?;
    // SAFETY: the name is checked before the pointer is taken; shape and strides have `ndim` elements by the protocol, and
    // all of it lives as long as the capsule.
    let (data, device, dtype, shape, strides) = unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) != 1 {
            return refuse("not a DLPack capsule".into());
        }
        let managed = ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()).cast::<Managed>();
        let tensor = &(*managed).tensor;
        let dims = tensor.ndim as usize;
        let shape = if dims == 0 { &[][..] } else { std::slice::from_raw_parts(tensor.shape, dims) };
        let strides = (!tensor.strides.is_null() && dims > 0)
            .then(|| std::slice::from_raw_parts(tensor.strides, dims).to_vec());
        let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize).cast::<f32>();
        (data, tensor.device, tensor.dtype, shape.to_vec(), strides)
    };
    if device.kind != CPU {
        return refuse("not on the CPU".into());
    }
    if dtype != ElementType::F32 {
        return refuse(format!("want float32, got DLPack type {} of {} bits", dtype.code, dtype.bits));
    }
    if shape.len() != want.len() || shape.iter().zip(want).any(|(&have, &want)| have != want as i64) {
        return refuse(format!("shape {shape:?}, want {want:?}"));
    }
    let len = want.iter().product();
    if len > 0 && !data.is_aligned() {
        return refuse("its data is not aligned to 4 bytes; make a copy".into());
    }
    if let Some(strides) = strides {
        let mut expected = 1;
        for (&size, &stride) in shape.iter().zip(&strides).rev() {
            if size != 1 && stride != expected {
                return refuse(format!("strides {strides:?} of shape {shape:?}: want contiguous"));
            }
            expected *= size;
        }
    }
    Ok(Borrowed { start: data, len, _capsule: capsule.unbind() })
}
