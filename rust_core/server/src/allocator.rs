//! Settings of the allocator.
#![allow(unsafe_code)]

/// Let each arena of glibc's allocator keep up to `KEPT_BYTES` of freed memory, and allocate blocks up to `ARENA_BYTES`
/// from arenas. Requests have some megabytes and similar sizes. Without this, the system would return and clear the
/// same pages for each request. Other C libraries are not configured.
pub(crate) fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const ARENA_BYTES: libc::c_int = 256 << 20;
        const KEPT_BYTES: libc::c_int = 512 << 20;
        // SAFETY: sets two numbers of the allocator, before a second thread exists.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, ARENA_BYTES);
            libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        }
    }
}
