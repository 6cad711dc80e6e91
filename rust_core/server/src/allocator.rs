//! Configures the allocator.
#![allow(unsafe_code)]

/// Let each arena of glibc's allocator keep up to `KEPT_BYTES` of freed memory, and allocate blocks smaller
/// than `ARENA_BYTES` from arenas. (Only the main arena has space for blocks of more than 64 MiB.) Requests
/// are a few megabytes in size and similar to each other. With the default settings, the allocator returns
/// the same pages to the operating system after each request, and the system clears them again for the next
/// one. With other C libraries, this function does nothing.
pub(crate) fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const ARENA_BYTES: libc::c_int = 256 << 20;
        const KEPT_BYTES: libc::c_int = 512 << 20;
        // SAFETY: the calls set two parameters of the allocator, before a second thread exists.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, ARENA_BYTES);
            libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        }
    }
}
