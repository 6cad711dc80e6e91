//! Compiles loops for several instruction sets: three on x86-64, of which one is chosen at run time, and one
//! on other architectures. This module also prefetches memory.
//!
//! Whole loops are compiled this way, because a call per row costs more than it saves. A loop is ordinary code over
//! blocks of [`LANES`] floats, which is the same for all sets except for the operations of [`Lanes`].
//! Multiply-adds are not fused, and reductions add fixed lanes in a fixed order, so all sets give bit-identical
//! results.

#![allow(unsafe_code)]

mod lanes;

#[cfg(target_arch = "x86_64")]
use lanes::{Avx2, Avx512};
pub use lanes::{LANES, Lanes, Portable};

/// The size of a cache line, in bytes.
const LINE: usize = 64;

/// A loop to be compiled for every [`InstructionSet`]. `run` and what it calls must be `#[inline(always)]`.
pub trait SimdLoop {
    /// The result of the loop.
    type Output;
    /// Run the loop.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// An instruction set that this processor supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstructionSet(Width);

/// The enum is private, so that AVX2 and AVX-512 can only be obtained by querying the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Width {
    Portable,
    /// AVX2, with 8 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512, with 16 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($($feature:tt),+) => { $(is_x86_feature_detected!($feature))&&+ };
}

impl InstructionSet {
    /// The instruction set that every processor of this architecture supports.
    pub const PORTABLE: Self = Self(Width::Portable);

    /// The widest instruction set for which loops are compiled and that this processor supports.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if has!("avx2", "f16c", "bmi1", "bmi2", "lzcnt", "popcnt") {
            let wide = has!("avx512f", "avx512bw", "avx512dq", "avx512vl");
            return Self(if wide { Width::Avx512 } else { Width::Avx2 });
        }
        Self::PORTABLE
    }

    /// All instruction sets for which loops are compiled and that this processor supports, the widest last.
    pub fn supported() -> Vec<Self> {
        let all = [
            Width::Portable,
            #[cfg(target_arch = "x86_64")]
            Width::Avx2,
            #[cfg(target_arch = "x86_64")]
            Width::Avx512,
        ];
        let Self(widest) = Self::detect();
        all.into_iter().filter(|width| *width <= widest).map(Self).collect()
    }

    /// Run `work` as compiled for this instruction set.
    #[inline(always)]
    pub fn run<W: SimdLoop>(self, work: W) -> W::Output {
        match self.0 {
            Width::Portable => portable(work),
            // SAFETY: only `detect` and `supported` create this value, and only if the processor supports
            // AVX2 and the other features of `avx2`.
            #[cfg(target_arch = "x86_64")]
            Width::Avx2 => unsafe { avx2(work) },
            // SAFETY: only `detect` and `supported` create this value, and only if the processor supports
            // AVX-512 and the other features of `avx512`.
            #[cfg(target_arch = "x86_64")]
            Width::Avx512 => unsafe { avx512(work) },
        }
    }
}

#[inline(never)]
fn portable<W: SimdLoop>(work: W) -> W::Output {
    work.run::<Portable>()
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2,f16c,bmi1,bmi2,lzcnt,popcnt")]
fn avx2<W: SimdLoop>(work: W) -> W::Output {
    work.run::<Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi1,bmi2,lzcnt,popcnt")]
fn avx512<W: SimdLoop>(work: W) -> W::Output {
    work.run::<Avx512>()
}

/// Prefetch into the first-level cache.
const FIRST_LEVEL: bool = true;
/// Prefetch into the second-level cache.
const SECOND_LEVEL: bool = false;
/// The size, in bytes, from which rows are prefetched into the second-level cache. The first-level cache
/// holds too few large rows: when they were prefetched into it, benchmark B3 took 7 to 23 % longer. Smaller
/// rows, index buckets and recency are faster in the first-level cache.
const LARGE_ROW: usize = 256;

/// Prefetch the cache lines of `values[from..from + len]` into the first-level cache. The range may extend
/// beyond the end of the slice.
#[inline(always)]
pub fn prefetch<T>(values: &[T], from: usize, len: usize) {
    prefetch_lines::<FIRST_LEVEL>(values.as_ptr().wrapping_add(from).cast(), len * size_of::<T>());
}

/// Prefetch the `len` values of one row, at any address: a large row into the second-level cache, any other
/// into the first-level cache.
#[inline(always)]
pub fn prefetch_row<T>(row: *const T, len: usize) {
    let bytes = len * size_of::<T>();
    if bytes < LARGE_ROW {
        prefetch_lines::<FIRST_LEVEL>(row.cast(), bytes);
    } else {
        prefetch_lines::<SECOND_LEVEL>(row.cast(), bytes);
    }
}

#[inline(always)]
fn prefetch_lines<const LEVEL: bool>(start: *const u8, bytes: usize) {
    let end = start.wrapping_add(bytes);
    let mut line = start.wrapping_sub(start.addr() % LINE);
    while line < end {
        prefetch_line::<LEVEL>(line);
        line = line.wrapping_add(LINE);
    }
}

#[inline(always)]
fn prefetch_line<const LEVEL: bool>(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch is a hint, and never faults, whatever the address.
        unsafe {
            if LEVEL == FIRST_LEVEL {
                _mm_prefetch::<_MM_HINT_T0>(address.cast());
            } else {
                _mm_prefetch::<_MM_HINT_T1>(address.cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
