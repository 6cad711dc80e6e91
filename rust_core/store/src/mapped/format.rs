//! [`RowFormat`]: how the weights of a row are encoded.

use persia_kernels::copy;
use persia_kernels::half::{F16, narrow, widen};

use crate::simd::{InstructionSet, Lanes, SimdLoop};

/// The largest magnitude of a value in an int8 row.
const INT8_MAX: f32 = 127.0;
/// The size of the scale that precedes the values of an int8 row.
const SCALE: usize = size_of::<f32>();

/// The encoding of a table's rows in a file. All numbers are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowFormat {
    /// `dim` f32 values: the exact weights.
    F32,
    /// `dim` IEEE 754 binary16 values, rounded to nearest. A magnitude above 65,504 becomes 65,504.
    F16,
    /// An f32 scale `s`, `dim` int8 values `q`, and padding to a multiple of 4 bytes. `s` is the largest
    /// magnitude in the row divided by 127. Each `q` is a weight divided by `s` and rounded to nearest. A
    /// weight is read as `s * q`, which differs from the exact weight by about `s / 2` at most, unless `s` is
    /// subnormal.
    Int8,
}

impl RowFormat {
    /// The format with this name, `f32`, `f16` or `int8`; None for any other name.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "f32" => Some(Self::F32),
            "f16" => Some(Self::F16),
            "int8" => Some(Self::Int8),
            _ => None,
        }
    }

    /// The number of bytes of a row of `dim` weights.
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            Self::F32 => 4 * dim,
            Self::F16 => 2 * dim,
            Self::Int8 => (SCALE + dim).next_multiple_of(4),
        }
    }

    /// Append a row of finite weights to `out`.
    pub(super) fn encode(self, row: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend_from_slice(bytemuck::cast_slice(row)),
            Self::F16 => InstructionSet::detect().run(Narrow { row, out }),
            Self::Int8 => {
                let largest = row.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
                let scale = largest / INT8_MAX;
                out.extend_from_slice(&scale.to_le_bytes());
                // A row of zeros has the scale 0, which must not be a divisor.
                let number = |weight: &f32| if scale == 0.0 { 0.0 } else { (weight / scale).round() };
                out.extend(row.iter().map(|weight| (number(weight) as i8).to_le_bytes()[0]));
                out.resize(out.len().next_multiple_of(4), 0);
            }
        }
    }

    /// Write the weights of a row to `out`, which has `dim` floats.
    #[inline(always)]
    pub(super) fn decode<L: Lanes>(self, row: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => copy(bytemuck::cast_slice(row), out),
            Self::F16 => widen::<L, F16>(bytemuck::cast_slice(row), out),
            Self::Int8 => {
                let (scale, numbers) = row.split_at(SCALE);
                let scale = bytemuck::cast_slice::<u8, f32>(scale)[0];
                for (weight, number) in out.iter_mut().zip(numbers) {
                    *weight = scale * f32::from(number.cast_signed());
                }
            }
        }
    }
}

struct Narrow<'a> {
    row: &'a [f32],
    out: &'a mut Vec<u8>,
}

impl SimdLoop for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let mut halves = vec![0u16; self.row.len()];
        narrow::<L, F16>(self.row, &mut halves);
        self.out.extend_from_slice(bytemuck::cast_slice(&halves));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    fn decoded(format: RowFormat, row: &[f32]) -> Vec<f32> {
        let mut bytes = Vec::new();
        format.encode(row, &mut bytes);
        assert_eq!(bytes.len(), format.row_bytes(row.len()));
        // As in a file, the row begins at a multiple of 4 bytes.
        let words: Vec<u32> = bytes
            .chunks(4)
            .map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
            .collect();
        let mut out = vec![f32::NAN; row.len()];
        format.decode::<Portable>(&bytemuck::cast_slice(&words)[..bytes.len()], &mut out);
        out
    }

    #[test]
    fn a_row_is_as_close_to_the_exact_one_as_its_format_says() {
        for dim in [1, 2, 3, 4, 5, 15, 16, 19, 64] {
            for scale in [1e-6f32, 1.0, 300.0] {
                let number = |at: usize| ((at * 7919 % 1000) as f32 / 500.0 - 1.0) * scale;
                let row: Vec<f32> = (0..dim).map(number).collect();
                assert_eq!(decoded(RowFormat::F32, &row), row);
                let largest = row.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
                for (exact, half) in row.iter().zip(decoded(RowFormat::F16, &row)) {
                    assert!(
                        (exact - half).abs() <= (exact.abs() / 2048.0).max(2.0f32.powi(-25)),
                        "{exact} {half}"
                    );
                }
                for (exact, byte) in row.iter().zip(decoded(RowFormat::Int8, &row)) {
                    assert!((exact - byte).abs() <= largest / 254.0 * 1.00001, "{exact} {byte} of {largest}");
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_and_the_largest_weight_is_exact() {
        for format in [RowFormat::F32, RowFormat::F16, RowFormat::Int8] {
            assert_eq!(decoded(format, &[0.0; 5]), [0.0; 5]);
            assert_eq!(decoded(format, &[0.0, -127.0, 64.0, 1.0]), [0.0, -127.0, 64.0, 1.0]);
        }
    }
}
