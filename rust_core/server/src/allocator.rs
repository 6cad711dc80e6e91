//! What the allocator does with memory that was given back.
#![allow(unsafe_code)]

/// Keep up to `KEPT_BYTES` of what is freed at the end of each arena of the allocator (of which there are some per
/// processor), rather than let the system clear the same pages for every request anew; blocks up to `ARENA_BYTES` come
/// from arenas. Requests are of some megabytes and as large as the one before. Without the GNU C library its allocator
/// does as it likes.
pub(crate) fn keep_what_is_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const ARENA_BYTES: libc::c_int = 256 << 20;
        const KEPT_BYTES: libc::c_int = 512 << 20;
        // SAFETY: two numbers of the allocator, set before there is a second thread.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, ARENA_BYTES);
            libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        }
    }
}
