//! [`Lanes`]: the operations on sixteen floats, or on the eight words of an index bucket, that the
//! compiler does not vectorize.

#![allow(unsafe_code)]

use crate::half::{f16_to_f32, f32_to_f16};

/// The number of floats that are computed in parallel. All reductions keep this many partial sums.
pub const LANES: usize = 16;

/// The operations, as implemented with one instruction set. The results are bit-identical for all sets.
pub trait Lanes {
    /// Compute `sums += (gradient + decay * weights)²`, lane by lane, and round after every operation.
    fn add_squares(sums: &mut [f32; LANES], weights: &[f32; LANES], gradient: &[f32; LANES], decay: f32);
    /// The sum of all lanes: the upper half is added to the lower half, first eight lanes, then four, two and one.
    fn fold(sums: &[f32; LANES]) -> f32;
    /// Whether every magnitude is below 2^`exponent`, where `exponent` is from -126 to 128. NaN and infinity
    /// are not below any limit.
    fn all_below(values: &[f32; LANES], exponent: i32) -> bool;
    /// A mask whose bit `i` is set if `words[i]` is `key`.
    fn equal(words: &[u64; 8], key: u64) -> u32;
    /// Convert binary16 to f32, which is exact.
    fn widen_f16(from: &[u16; LANES]) -> [f32; LANES];
    /// Convert f32 to the nearest binary16, ties to even. A magnitude above the largest finite number becomes
    /// that number. A NaN stays NaN.
    fn narrow_f16(from: &[f32; LANES]) -> [u16; LANES];
}

/// The bits of an f32's exponent.
const EXPONENT: i32 = 0x7F80_0000;

/// The bits of 2^`exponent`, or of infinity if `exponent` is 128.
#[inline(always)]
const fn exponent_bits(exponent: i32) -> i32 {
    (exponent + 127) << 23
}

/// The portable code, which runs on every processor.
pub struct Portable;

impl Lanes for Portable {
    #[inline(always)]
    fn add_squares(sums: &mut [f32; LANES], weights: &[f32; LANES], gradient: &[f32; LANES], decay: f32) {
        for lane in 0..LANES {
            let value = gradient[lane] + decay * weights[lane];
            sums[lane] += value * value;
        }
    }

    #[inline(always)]
    fn fold(sums: &[f32; LANES]) -> f32 {
        let mut sums = *sums;
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                sums[lane] += sums[lane + half];
            }
        }
        sums[0]
    }

    #[inline(always)]
    fn all_below(values: &[f32; LANES], exponent: i32) -> bool {
        values.iter().all(|value| value.to_bits().cast_signed() & EXPONENT < exponent_bits(exponent))
    }

    #[inline(always)]
    fn equal(words: &[u64; 8], key: u64) -> u32 {
        words.iter().enumerate().fold(0, |equal, (lane, word)| equal | u32::from(*word == key) << lane)
    }

    #[inline(always)]
    fn widen_f16(from: &[u16; LANES]) -> [f32; LANES] {
        from.map(f16_to_f32)
    }

    #[inline(always)]
    fn narrow_f16(from: &[f32; LANES]) -> [u16; LANES] {
        from.map(f32_to_f16)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{EXPONENT, LANES, Lanes, exponent_bits};

    /// The largest finite binary16.
    const F16_MAX: f32 = 65_504.0;

    /// Two registers of eight lanes. Only `avx2` of the parent module may name this type.
    pub(crate) struct Avx2;

    impl Lanes for Avx2 {
        #[inline(always)]
        fn add_squares(sums: &mut [f32; LANES], weights: &[f32; LANES], gradient: &[f32; LANES], decay: f32) {
            for half in [0, 8] {
                // SAFETY: only code for processors with AVX2 and F16C names this type; there are eight lanes
                // from `half` on.
                unsafe {
                    let decayed =
                        _mm256_mul_ps(_mm256_set1_ps(decay), _mm256_loadu_ps(weights.as_ptr().add(half)));
                    let value = _mm256_add_ps(_mm256_loadu_ps(gradient.as_ptr().add(half)), decayed);
                    let sum = _mm256_loadu_ps(sums.as_ptr().add(half));
                    let sum = _mm256_add_ps(sum, _mm256_mul_ps(value, value));
                    _mm256_storeu_ps(sums.as_mut_ptr().add(half), sum);
                }
            }
        }

        #[inline(always)]
        fn fold(sums: &[f32; LANES]) -> f32 {
            // SAFETY: only code for processors with AVX2 names this type; `sums` has sixteen lanes.
            unsafe {
                fold_8(_mm256_add_ps(_mm256_loadu_ps(sums.as_ptr()), _mm256_loadu_ps(sums.as_ptr().add(8))))
            }
        }

        #[inline(always)]
        fn all_below(values: &[f32; LANES], exponent: i32) -> bool {
            // SAFETY: only code for processors with AVX2 names this type; `values` has sixteen lanes.
            unsafe {
                let (mask, below) =
                    (_mm256_set1_epi32(EXPONENT), _mm256_set1_epi32(exponent_bits(exponent) - 1));
                let low = _mm256_and_si256(_mm256_loadu_si256(values.as_ptr().cast()), mask);
                let high = _mm256_and_si256(_mm256_loadu_si256(values.as_ptr().add(8).cast()), mask);
                let bad = _mm256_or_si256(_mm256_cmpgt_epi32(low, below), _mm256_cmpgt_epi32(high, below));
                _mm256_testz_si256(bad, bad) == 1
            }
        }

        #[inline(always)]
        fn equal(words: &[u64; 8], key: u64) -> u32 {
            // SAFETY: only code for processors with AVX2 names this type; `words` has eight words.
            unsafe {
                let key = _mm256_set1_epi64x(key.cast_signed());
                let low = _mm256_cmpeq_epi64(_mm256_loadu_si256(words.as_ptr().cast()), key);
                let high = _mm256_cmpeq_epi64(_mm256_loadu_si256(words.as_ptr().add(4).cast()), key);
                let [low, high] = [_mm256_castsi256_pd(low), _mm256_castsi256_pd(high)];
                (_mm256_movemask_pd(low) | _mm256_movemask_pd(high) << 4).cast_unsigned()
            }
        }

        #[inline(always)]
        fn widen_f16(from: &[u16; LANES]) -> [f32; LANES] {
            let mut to = [0.0; LANES];
            for half in [0, 8] {
                // SAFETY: only code for processors with F16C names this type; there are eight lanes from
                // `half` on in both arrays.
                unsafe {
                    let eight = _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(half).cast()));
                    _mm256_storeu_ps(to.as_mut_ptr().add(half), eight);
                }
            }
            to
        }

        #[inline(always)]
        fn narrow_f16(from: &[f32; LANES]) -> [u16; LANES] {
            let mut to = [0; LANES];
            for half in [0, 8] {
                // SAFETY: only code for processors with F16C names this type; there are eight lanes from
                // `half` on in both arrays. If an operand is NaN, `min` and `max` return the second operand,
                // here the NaN.
                unsafe {
                    let eight = _mm256_loadu_ps(from.as_ptr().add(half));
                    let eight = _mm256_max_ps(_mm256_set1_ps(-F16_MAX), eight);
                    let eight = _mm256_min_ps(_mm256_set1_ps(F16_MAX), eight);
                    let eight = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(eight);
                    _mm_storeu_si128(to.as_mut_ptr().add(half).cast(), eight);
                }
            }
            to
        }
    }

    /// Complete a fold of which eight lanes are left.
    ///
    /// # Safety
    /// The processor must support AVX2.
    #[inline(always)]
    unsafe fn fold_8(sums: __m256) -> f32 {
        // SAFETY: the caller ensures that the processor supports AVX2.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    /// One register of sixteen lanes. Only `avx512` of the parent module may name this type.
    pub(crate) struct Avx512;

    impl Lanes for Avx512 {
        #[inline(always)]
        fn add_squares(sums: &mut [f32; LANES], weights: &[f32; LANES], gradient: &[f32; LANES], decay: f32) {
            // SAFETY: only code for processors with AVX-512 names this type; all arrays have sixteen lanes.
            unsafe {
                let decayed = _mm512_mul_ps(_mm512_set1_ps(decay), _mm512_loadu_ps(weights.as_ptr()));
                let value = _mm512_add_ps(_mm512_loadu_ps(gradient.as_ptr()), decayed);
                let sum = _mm512_add_ps(_mm512_loadu_ps(sums.as_ptr()), _mm512_mul_ps(value, value));
                _mm512_storeu_ps(sums.as_mut_ptr(), sum);
            }
        }

        #[inline(always)]
        fn fold(sums: &[f32; LANES]) -> f32 {
            // SAFETY: only code for processors with AVX-512 names this type; `sums` has sixteen lanes.
            unsafe {
                let sums = _mm512_loadu_ps(sums.as_ptr());
                fold_8(_mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps::<1>(sums)))
            }
        }

        #[inline(always)]
        fn all_below(values: &[f32; LANES], exponent: i32) -> bool {
            // SAFETY: only code for processors with AVX-512 names this type; `values` has sixteen lanes.
            unsafe {
                let mask = _mm512_set1_epi32(EXPONENT);
                let bits = _mm512_and_si512(_mm512_loadu_si512(values.as_ptr().cast()), mask);
                _mm512_cmpge_epi32_mask(bits, _mm512_set1_epi32(exponent_bits(exponent))) == 0
            }
        }

        #[inline(always)]
        fn equal(words: &[u64; 8], key: u64) -> u32 {
            // SAFETY: only code for processors with AVX-512 names this type; `words` has eight words.
            unsafe {
                let words = _mm512_loadu_si512(words.as_ptr().cast());
                u32::from(_mm512_cmpeq_epi64_mask(words, _mm512_set1_epi64(key.cast_signed())))
            }
        }

        #[inline(always)]
        fn widen_f16(from: &[u16; LANES]) -> [f32; LANES] {
            let mut to = [0.0; LANES];
            // SAFETY: only code for processors with AVX-512 names this type; both arrays have sixteen lanes.
            unsafe {
                let wide = _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()));
                _mm512_storeu_ps(to.as_mut_ptr(), wide);
            }
            to
        }

        #[inline(always)]
        fn narrow_f16(from: &[f32; LANES]) -> [u16; LANES] {
            let mut to = [0; LANES];
            // SAFETY: only code for processors with AVX-512 names this type; both arrays have sixteen lanes.
            // If an operand is NaN, `min` and `max` return the second operand, here the NaN.
            unsafe {
                let wide = _mm512_max_ps(_mm512_set1_ps(-F16_MAX), _mm512_loadu_ps(from.as_ptr()));
                let wide = _mm512_min_ps(_mm512_set1_ps(F16_MAX), wide);
                _mm256_storeu_si256(
                    to.as_mut_ptr().cast(),
                    _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(wide),
                );
            }
            to
        }
    }
}
