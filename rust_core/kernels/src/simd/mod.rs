//! One loop compiled for three instruction sets, chosen at run time; and prefetching.
//!
//! Whole loops are compiled this way, because a call per row costs more than it saves. A loop is ordinary code over
//! blocks of [`LANES`] floats, the same for all three sets except for the operations of [`Lanes`]. No multiply-add is
//! fused, and reductions add fixed lanes in a fixed order, so all sets give bit-identical results.

#![allow(unsafe_code)]

mod lanes;

#[cfg(target_arch = "x86_64")]
use lanes::{Avx2, Avx512};
pub use lanes::{LANES, Lanes, Portable};

/// Bytes of a cache line.
const LINE: usize = 64;

/// A loop to be compiled for every [`InstructionSet`]. `run` and what it calls must be `#[inline(always)]`.
pub trait SimdLoop {
    /// The result of the loop.
    type Output;
    /// The loop.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// An instruction set that this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstructionSet(Width);

/// Private, so that a value can only be obtained by querying the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Width {
    Portable,
    /// 8 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 16 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($($feature:tt),+) => { $(is_x86_feature_detected!($feature))&&+ };
}

impl InstructionSet {
    /// The set that every processor of this architecture has.
    pub const PORTABLE: Self = Self(Width::Portable);

    /// The widest set of this processor.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if has!("avx2", "f16c", "bmi1", "bmi2", "lzcnt", "popcnt") {
            let wide = has!("avx512f", "avx512bw", "avx512dq", "avx512vl");
            return Self(if wide { Width::Avx512 } else { Width::Avx2 });
        }
        Self::PORTABLE
    }

    /// All sets of this processor, the widest last.
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
            // SAFETY: only `detect` and `supported` create this value, and only if the processor has the instruction
            // set.
            #[cfg(target_arch = "x86_64")]
            Width::Avx2 => unsafe { avx2(work) },
            // SAFETY: as above.
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

/// Prefetch the cache lines of `values[from..from + len]`, which may extend beyond the end.
#[inline(always)]
pub fn prefetch<T>(values: &[T], from: usize, len: usize) {
    prefetch_from(values.as_ptr().wrapping_add(from), len);
}

/// Prefetch `len` values from any address.
#[inline(always)]
pub fn prefetch_from<T>(start: *const T, len: usize) {
    let start = start.cast::<u8>();
    let end = start.wrapping_add(len * size_of::<T>());
    let mut line = start.wrapping_sub(start.addr() % LINE);
    while line < end {
        prefetch_line(line);
        line = line.wrapping_add(LINE);
    }
}

#[inline(always)]
fn prefetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it never faults, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
