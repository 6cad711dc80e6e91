//! Dense tensors and labels as bytes.

use persia_types::limits::MAX_NAME_BYTES;

use crate::error::Error;

/// The element type of a [`Tensor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// One byte, 0 or 1.
    Bool = 0,
    /// Signed 8 bits.
    I8 = 1,
    /// Signed 16 bits.
    I16 = 2,
    /// Signed 32 bits.
    I32 = 3,
    /// Signed 64 bits.
    I64 = 4,
    /// Unsigned 8 bits.
    U8 = 5,
    /// IEEE 754 single precision.
    F32 = 6,
    /// IEEE 754 double precision.
    F64 = 7,
}

impl Dtype {
    const ALL: [Self; 8] =
        [Self::Bool, Self::I8, Self::I16, Self::I32, Self::I64, Self::U8, Self::F32, Self::F64];

    /// The size of one element, in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 => 1,
            Self::I16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The type with the given discriminant, if any.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Read one element as a number. `bytes` has exactly [`Self::size`] bytes. Large 64-bit integers are
    /// rounded.
    fn value(self, bytes: &[u8]) -> f64 {
        fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
            std::array::from_fn(|i| bytes[i])
        }
        match self {
            Self::Bool | Self::U8 => f64::from(bytes[0]),
            Self::I8 => f64::from(bytes[0] as i8),
            Self::I16 => f64::from(i16::from_le_bytes(array(bytes))),
            Self::I32 => f64::from(i32::from_le_bytes(array(bytes))),
            Self::I64 => i64::from_le_bytes(array(bytes)) as f64,
            Self::F32 => f64::from(f32::from_le_bytes(array(bytes))),
            Self::F64 => f64::from_le_bytes(array(bytes)),
        }
    }
}

impl std::fmt::Display for Dtype {
    /// The name of the type in NumPy and PyTorch.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Bool => "bool",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::F32 => "float32",
            Self::F64 => "float64",
        })
    }
}

/// The maximum number of axes of a tensor.
pub(crate) const MAX_AXES: usize = 8;

/// A contiguous tensor, whose first axis is the sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    name: Option<String>,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    /// Create a tensor from row-major, little-endian `bytes`.
    ///
    /// # Errors
    /// [`Error::BadTensor`] if the bytes do not fill the shape exactly, there is no axis or more than 8, a
    /// bool is neither 0 nor 1, or the name is too long.
    pub fn new(name: Option<String>, dtype: Dtype, shape: Vec<usize>, bytes: Vec<u8>) -> Result<Self, Error> {
        let tensor = Self { name, dtype, shape, bytes };
        let label = || match &tensor.name {
            Some(name) => format!("tensor {name:?}"),
            None => "a tensor without a name".into(),
        };
        let bad = |what: String| Err(Error::BadTensor { tensor: label(), what });
        if let Some(name) = tensor.name.as_ref().filter(|name| name.len() > MAX_NAME_BYTES) {
            return bad(format!("its name has {} bytes, allowed: at most {MAX_NAME_BYTES}", name.len()));
        }
        if tensor.shape.is_empty() || tensor.shape.len() > MAX_AXES {
            return bad(format!("the number of axes is {}, allowed: 1 to {MAX_AXES}", tensor.shape.len()));
        }
        let expected = tensor.shape.iter().try_fold(dtype.size(), |product, axis| product.checked_mul(*axis));
        if expected != Some(tensor.bytes.len()) {
            let (found, shape) = (tensor.bytes.len(), &tensor.shape);
            return bad(format!("{found} bytes do not match dtype {dtype} and shape {shape:?}"));
        }
        if dtype == Dtype::Bool && tensor.bytes.iter().any(|byte| *byte > 1) {
            return bad("found a bool that is neither 0 nor 1".into());
        }
        Ok(tensor)
    }

    /// The name, if any.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The shape. The first axis is the sample.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, in row-major order and little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The name for messages.
    pub(crate) fn label(&self, kind: &str, index: usize) -> String {
        match &self.name {
            Some(name) => format!("{kind} {name:?}"),
            None => format!("{kind} {index}"),
        }
    }

    /// The first element that is NaN or infinite: (row, column, value).
    pub(crate) fn first_nonfinite(&self) -> Option<(usize, usize, f64)> {
        // A fast pass detects such an element. Its position is searched only after that.
        let finite = match self.dtype {
            Dtype::F32 => all_finite::<4>(&self.bytes, |b| f32::from_le_bytes(b).is_finite()),
            Dtype::F64 => all_finite::<8>(&self.bytes, |b| f64::from_le_bytes(b).is_finite()),
            _ => true,
        };
        if finite { None } else { self.find(|value| !value.is_finite()) }
    }

    /// The first element that is neither 0 nor 1: (row, column, value).
    pub(crate) fn first_not_binary(&self) -> Option<(usize, usize, f64)> {
        self.find(|value| value != 0.0 && value != 1.0)
    }

    fn find(&self, wrong: impl Fn(f64) -> bool) -> Option<(usize, usize, f64)> {
        let columns = self.shape[1..].iter().product::<usize>().max(1);
        self.bytes
            .chunks_exact(self.dtype.size())
            .map(|bytes| self.dtype.value(bytes))
            .enumerate()
            .find(|(_, value)| wrong(*value))
            .map(|(place, value)| (place / columns, place % columns, value))
    }
}

fn all_finite<const N: usize>(bytes: &[u8], finite: impl Fn([u8; N]) -> bool) -> bool {
    let (elements, _) = bytes.as_chunks::<N>();
    elements.iter().fold(true, |all, element| all & finite(*element))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_must_fill_the_shape() {
        let error = Tensor::new(Some("x".into()), Dtype::F32, vec![2, 3], vec![0; 20]).unwrap_err();
        let text = error.to_string();
        assert_eq!(text, "tensor \"x\": 20 bytes do not match dtype float32 and shape [2, 3]");
        assert!(Tensor::new(None, Dtype::F64, vec![usize::MAX, 2], vec![]).is_err());
        assert!(Tensor::new(None, Dtype::U8, vec![], vec![]).is_err());
        assert!(Tensor::new(None, Dtype::Bool, vec![2], vec![0, 2]).is_err());
    }

    #[test]
    fn every_dtype_is_read_as_its_value() {
        let cases: [(Dtype, Vec<u8>, f64); 8] = [
            (Dtype::Bool, vec![1], 1.0),
            (Dtype::I8, vec![0xFE], -2.0),
            (Dtype::I16, (-3i16).to_le_bytes().to_vec(), -3.0),
            (Dtype::I32, (-4i32).to_le_bytes().to_vec(), -4.0),
            (Dtype::I64, (-5i64).to_le_bytes().to_vec(), -5.0),
            (Dtype::U8, vec![200], 200.0),
            (Dtype::F32, 0.5f32.to_le_bytes().to_vec(), 0.5),
            (Dtype::F64, 0.25f64.to_le_bytes().to_vec(), 0.25),
        ];
        for (code, (dtype, bytes, value)) in cases.into_iter().enumerate() {
            assert_eq!(Dtype::from_code(code as u8), Some(dtype));
            assert_eq!(dtype.value(&bytes), value);
        }
        assert_eq!(Dtype::from_code(8), None);
    }
}
