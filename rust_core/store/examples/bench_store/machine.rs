//! Huge pages, prefetching and thread time, for which the standard library has no safe functions.
#![allow(unsafe_code)]

/// The CPU time of this thread, in nanoseconds.
pub(crate) fn cpu_ns() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live value of the right type.
    let read = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(read, 0, "the thread's clock can be read");
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Create a vector of `len` ones, on huge pages if the system supports them.
pub(crate) fn on_huge_pages(len: usize) -> Vec<f32> {
    let mut values: Vec<f32> = Vec::with_capacity(len);
    let start = values.as_mut_ptr().cast::<u8>();
    let aligned = start.align_offset(2 << 20);
    let bytes = (len * 4).saturating_sub(aligned);
    // SAFETY: the call only gives advice about memory that this vector owns. An error does no harm.
    unsafe { libc::madvise(start.wrapping_add(aligned).cast(), bytes, libc::MADV_HUGEPAGE) };
    values.resize(len, 1.0);
    values
}

/// Prefetch the cache lines of `values[from..from + len]` into the first-level cache.
#[inline(always)]
pub(crate) fn prefetch(values: &[f32], from: usize, len: usize) {
    each_line(values, from, len, |line| {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line);
        }
    });
}

/// Like [`prefetch`], into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_second(values: &[f32], from: usize, len: usize) {
    each_line(values, from, len, |line| {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line);
        }
    });
}

#[inline(always)]
fn each_line(values: &[f32], from: usize, len: usize, work: impl Fn(*const i8)) {
    let start = values.as_ptr().wrapping_add(from).cast::<u8>();
    let end = start.wrapping_add(len * 4);
    let mut line = start.wrapping_sub(start.addr() % 64);
    while line < end {
        work(line.cast());
        line = line.wrapping_add(64);
    }
}

/// Run `work`, compiled for the widest vector registers of this processor. `work` must be
/// `#[inline(always)]`.
pub(crate) fn widest<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the feature.
            return unsafe { avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the feature.
            return unsafe { avx2(work) };
        }
    }
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}
