//! Run-time dispatch of whole loops to the widest vectors the processor has, and prefetching.
//!
//! The same source is compiled once per instruction set. It contains no fused multiply-add and no reduction over
//! lanes, so every path gives the same bits.
#![allow(unsafe_code)]

use crate::step::kernels::{Pool, SegmentSum, pool_body, scale_body, segment_sum_body};
use crate::step::weighted::{pool_weighted_body, segment_sum_weighted_body};

/// Compile `$body` for AVX-512, AVX2 and the baseline, and choose at run time.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) => $body:path) => {
        $(#[$doc])*
        $vis fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
                fn avx512($($arg: $ty),*) {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) {
                    $body($($arg),*)
                }
                if has_avx512() {
                    // SAFETY: the processor was just asked for every feature the function is compiled for.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}
dispatch! {
    /// Pool rows into `out`, `[samples, dim]`: sums in order of occurrence, then divided. An empty sample is zeros.
    pub fn pool(input: &Pool<'_>, out: &mut [f32]) => pool_body
}

dispatch! {
    /// Sum gradients per unique id into `out`, `[unique, dim]`, in batch order.
    pub fn segment_sum(input: &SegmentSum<'_>, out: &mut [f32]) => segment_sum_body
}

dispatch! {
    /// Multiply every float by `factor`.
    pub fn scale(values: &mut [f32], factor: f32) => scale_body
}

dispatch! {
    /// As [`pool`], every row multiplied by its occurrence's weight before it is added.
    pub(crate) fn pool_weighted(input: &Pool<'_>, weights: &[f32], out: &mut [f32]) => pool_weighted_body
}

dispatch! {
    /// As [`segment_sum`], every gradient multiplied by its occurrence's weight too.
    pub(crate) fn segment_sum_weighted(input: &SegmentSum<'_>, weights: &[f32], out: &mut [f32])
        => segment_sum_weighted_body
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bw")
}

/// Ask for `len` floats from `start` on to be brought near; a hint, wrong places do no harm.
#[inline(always)]
pub(crate) fn prefetch(floats: &[f32], start: usize, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let first = floats.as_ptr().wrapping_add(start);
        for line in (0..len).step_by(16) {
            // SAFETY: a prefetch reads nothing that the program can see and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (floats, start, len);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bodies called here are compiled for the baseline; the entry points choose the widest path there is.
    #[test]
    fn every_path_gives_the_same_bits() {
        let number = |i: usize| (persia_types::id::hash_id(i as u64) >> 40) as f32 / 1e5 - 80.0;
        let places: Vec<u32> = (0..500u32).map(|i| i * 7 % 50).collect();
        let offsets: Vec<u32> = (0..=100).map(|i| i * 5).collect();
        let divisors: Vec<f32> = (0..100).map(|i| number(i).abs() + 1.0).collect();
        for dim in [1, 4, 16, 19, 64, 128, 211] {
            let rows: Vec<f32> = (0..100 * dim).map(number).collect();
            let (offsets, divisors) = (Some(&offsets[..]), Some(&divisors[..]));
            let input = Pool { rows: &rows, dim, places: &places, offsets, divisors };
            let [mut wide, mut plain] = [(); 2].map(|()| vec![0.0; 100 * dim]);
            pool(&input, &mut wide);
            pool_body(&input, &mut plain);
            assert_eq!(bits(&wide), bits(&plain));
            let (starts, samples) = (offsets.unwrap(), &places[..]);
            let input = SegmentSum { gradients: &rows, dim, starts, samples, factors: divisors, map: None };
            segment_sum(&input, &mut wide);
            segment_sum_body(&input, &mut plain);
            assert_eq!(bits(&wide), bits(&plain));
            scale(&mut wide, 0.3);
            scale_body(&mut plain, 0.3);
            assert_eq!(bits(&wide), bits(&plain));
        }
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }
}
