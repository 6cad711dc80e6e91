//! The same loop compiled for three instruction sets, chosen once at run time; and prefetching.
//!
//! Whole loops are compiled this way, not single operations: a call per row would cost more than it saves. The
//! loops themselves are ordinary code over blocks of [`LANES`] floats, so there is one text for all three, save
//! for the few operations of [`Lanes`]; and as no multiply-add is ever fused and reductions add fixed lanes in a
//! fixed order, the results are the same bits on all of them.

#![allow(unsafe_code)]

mod lanes;

#[cfg(target_arch = "x86_64")]
use lanes::{Avx2, Avx512};
pub(crate) use lanes::{LANES, Lanes, Portable};

/// Bytes of a cache line.
const LINE: usize = 64;

/// A loop to be compiled for every [`Level`]. `run` and what it calls must be `#[inline(always)]`.
pub(crate) trait Work {
    /// What the loop returns.
    type Output;
    /// The loop.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// What every processor of this architecture has.
    Portable,
    /// 8 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 16 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Those this processor has, the widest last.
    pub(crate) fn supported() -> Vec<Self> {
        #[allow(unused_mut, reason = "one level only on other architectures")]
        let mut levels = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
                levels.push(Self::Avx2);
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                levels.push(Self::Avx512);
            }
        }
        levels
    }

    /// The widest this processor has.
    pub(crate) fn detect() -> Self {
        Self::supported().pop().unwrap_or(Self::Portable)
    }

    /// Run `work` as compiled for this level.
    #[inline(always)]
    pub(crate) fn run<W: Work>(self, work: W) -> W::Output {
        match self {
            Self::Portable => portable(work),
            // SAFETY: `supported` is the only source of levels and asked the processor.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512(work) },
        }
    }
}

#[inline(never)]
fn portable<W: Work>(work: W) -> W::Output {
    work.run::<Portable>()
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2,f16c,bmi1,bmi2,lzcnt,popcnt")]
fn avx2<W: Work>(work: W) -> W::Output {
    work.run::<Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi1,bmi2,lzcnt,popcnt")]
fn avx512<W: Work>(work: W) -> W::Output {
    work.run::<Avx512>()
}

/// Ask for the cache lines of `values[from..from + len]`; what lies beyond the end does no harm.
#[inline(always)]
pub(crate) fn prefetch<T>(values: &[T], from: usize, len: usize) {
    let start = values.as_ptr().wrapping_add(from).cast::<u8>();
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
