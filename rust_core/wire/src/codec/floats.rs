//! [`RowFormat`]: the number of floats of a row or gradient, and their format on the wire.

use bytemuck::pod_read_unaligned;
use bytes::Bytes;
use persia_kernels::half::{Bf16, F16, Half};
use persia_kernels::simd::{InstructionSet, LANES, Lanes, SimdLoop};
use persia_types::Dtype;
use persia_types::limits::{MAX_GRADIENT, MAX_GRADIENT_EXPONENT};

use super::chunk::Width;

/// The number and the format of the floats of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowFormat {
    /// The number of floats in a row.
    pub dim: usize,
    /// The format of a float on the wire. 16-bit formats round to nearest, ties to even. A magnitude beyond the largest
    /// finite number becomes that number. An infinity and, in f16, a magnitude of at least [`MAX_GRADIENT`] become NaN,
    /// so that a server skips the gradient, as it would if the floats were sent as f32.
    pub dtype: Dtype,
}

impl RowFormat {
    /// The format of rows of `dim` 32-bit floats.
    pub fn f32(dim: usize) -> Self {
        Self { dim, dtype: Dtype::F32 }
    }

    /// The size of a row in bytes.
    pub fn width(self) -> Width {
        Width::new(self.dim * if self.dtype == Dtype::F32 { 4 } else { 2 })
    }

    /// Encode rows as bytes. 32-bit floats are not copied.
    pub(crate) fn encode(self, rows: Vec<f32>) -> Bytes {
        match self.dtype {
            Dtype::F32 => Bytes::from_owner(Floats(rows)),
            Dtype::F16 | Dtype::Bf16 => self.encode_copy(&rows),
        }
    }

    /// Encode a copy of rows as bytes.
    pub(crate) fn encode_copy(self, rows: &[f32]) -> Bytes {
        let half = match self.dtype {
            Dtype::F32 => return Bytes::copy_from_slice(bytemuck::cast_slice(rows)),
            Dtype::F16 => InstructionSet::detect().run(Encode::<F16>::new(rows)),
            Dtype::Bf16 => InstructionSet::detect().run(Encode::<Bf16>::new(rows)),
        };
        Bytes::from_owner(Halves(half))
    }

    /// Decode `bytes` into `rows`, which have the same number of floats.
    pub(crate) fn decode(self, bytes: &[u8], rows: &mut [f32]) {
        match self.dtype {
            Dtype::F32 => bytemuck::cast_slice_mut(rows).copy_from_slice(bytes),
            Dtype::F16 => InstructionSet::detect().run(Decode::<F16>::new(bytes, rows)),
            Dtype::Bf16 => InstructionSet::detect().run(Decode::<Bf16>::new(bytes, rows)),
        }
    }
}

/// Floats that [`Bytes`] can own as bytes.
struct Floats(Vec<f32>);

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

struct Halves(Vec<u16>);

impl AsRef<[u8]> for Halves {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

struct Encode<'a, H> {
    floats: &'a [f32],
    format: std::marker::PhantomData<H>,
}

impl<'a, H> Encode<'a, H> {
    fn new(floats: &'a [f32]) -> Self {
        Self { floats, format: std::marker::PhantomData }
    }
}

impl<H: Half> SimdLoop for Encode<'_, H> {
    type Output = Vec<u16>;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Vec<u16> {
        let mut halves = Vec::with_capacity(self.floats.len());
        let (blocks, rest) = self.floats.as_chunks::<LANES>();
        for block in blocks {
            halves.extend_from_slice(&narrow::<L, H>(*block));
        }
        let mut block = [0.0; LANES];
        block[..rest.len()].copy_from_slice(rest);
        halves.extend_from_slice(&narrow::<L, H>(block)[..rest.len()]);
        halves
    }
}

#[inline(always)]
fn narrow<L: Lanes, H: Half>(mut block: [f32; LANES]) -> [u16; LANES] {
    if !L::all_below(&block, MAX_GRADIENT_EXPONENT) {
        let is_kept =
            |value: f32| value.is_finite() && (value.abs() < MAX_GRADIENT || H::LARGEST >= MAX_GRADIENT);
        block = block.map(|value| if is_kept(value) { value } else { f32::NAN });
    }
    H::narrow::<L>(&block)
}

struct Decode<'a, H> {
    bytes: &'a [u8],
    floats: &'a mut [f32],
    format: std::marker::PhantomData<H>,
}

impl<'a, H> Decode<'a, H> {
    fn new(bytes: &'a [u8], floats: &'a mut [f32]) -> Self {
        debug_assert_eq!(bytes.len(), 2 * floats.len());
        Self { bytes, floats, format: std::marker::PhantomData }
    }
}

impl<H: Half> SimdLoop for Decode<'_, H> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        // The bytes of a message may not be aligned.
        let (blocks, rest) = self.bytes.as_chunks::<{ 2 * LANES }>();
        let (outs, out_rest) = self.floats.as_chunks_mut::<LANES>();
        for (block, out) in blocks.iter().zip(outs) {
            *out = H::widen::<L>(&pod_read_unaligned(block));
        }
        let mut block = [0; 2 * LANES];
        block[..rest.len()].copy_from_slice(rest);
        out_rest.copy_from_slice(&H::widen::<L>(&pod_read_unaligned(&block))[..out_rest.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(dtype: Dtype, floats: &[f32]) -> Vec<f32> {
        let format = RowFormat { dim: 1, dtype };
        let bytes = format.encode(floats.to_vec());
        assert_eq!(bytes, format.encode_copy(floats));
        // The data is shifted by one byte, so that nothing is aligned.
        let moved = [&[0], &bytes[..]].concat();
        let mut back = vec![f32::NAN; floats.len()];
        format.decode(&moved[1..], &mut back);
        back
    }

    #[test]
    fn representable_numbers_arrive_unchanged() {
        let floats: Vec<f32> = (0..37).map(|i| (i as f32 - 18.0) / 8.0).collect();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for length in [0, 1, 15, 16, 17, 32, 37] {
                assert_eq!(sent(dtype, &floats[..length]), floats[..length], "{dtype:?}");
            }
        }
    }

    #[test]
    fn other_numbers_are_rounded_or_bounded_and_non_finite_ones_stay_non_finite() {
        let third = 1.0f32 / 3.0;
        for (dtype, within) in [(Dtype::F16, 1.0 / 2048.0), (Dtype::Bf16, 1.0 / 256.0)] {
            let back = sent(dtype, &[third, f32::INFINITY, f32::NAN, 1.0]);
            assert!((back[0] - third).abs() <= third * within && back[0] != third);
            assert!(back[1].is_nan() && back[2].is_nan());
            assert_eq!(back[3], 1.0);
        }
        assert_eq!(sent(Dtype::F16, &[1e6, -MAX_GRADIENT.next_down()]), [65_504.0, -65_504.0]);
        assert_eq!(sent(Dtype::Bf16, &[f32::MAX, -f32::MAX]), [3.3895314e38, -3.3895314e38]);
    }

    /// The row of a gradient with a huge number must be skipped in every format.
    #[test]
    fn a_huge_number_does_not_become_an_acceptable_one() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for huge in [MAX_GRADIENT, -MAX_GRADIENT, 1e20, f32::MAX] {
                let back = sent(dtype, &[0.5, huge, 2.0]);
                assert!(
                    back[1].is_nan() || back[1].abs() >= MAX_GRADIENT,
                    "{dtype:?}: {huge} became {}",
                    back[1]
                );
                assert_eq!((back[0], back[2]), (0.5, 2.0));
            }
        }
    }
}
