//! [`SharedRows`]: a buffer of rows that several threads fill.

#![allow(unsafe_code)]

use std::marker::PhantomData;

/// A buffer of `[rows, dim]` floats. Different threads may write different rows.
pub(super) struct SharedRows<'a> {
    start: *mut f32,
    rows: usize,
    dim: usize,
    buffer: PhantomData<&'a mut [f32]>,
}

// SAFETY: this value stands for a `&mut [f32]`, which may be sent. Rows are floats without references.
unsafe impl Send for SharedRows<'_> {}
// SAFETY: a shared reference gives access to a row only through [`Self::row`], whose callers ensure that no
// two of them use the same row.
unsafe impl Sync for SharedRows<'_> {}

impl<'a> SharedRows<'a> {
    /// The rows of a buffer. Floats after the last whole row are not used.
    pub(super) fn new(buffer: &'a mut [f32], dim: usize) -> Self {
        Self { start: buffer.as_mut_ptr(), rows: buffer.len() / dim, dim, buffer: PhantomData }
    }

    /// The floats of row `at`.
    ///
    /// # Panics
    /// If there are fewer rows.
    ///
    /// # Safety
    /// While the result is in use, no other call may pass the same `at`.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "each row is used by one caller")]
    pub(super) unsafe fn row(&self, at: usize) -> &mut [f32] {
        assert!(at < self.rows, "row {at} of {}", self.rows);
        // SAFETY: the row is within the buffer, which outlives `self`. The caller ensures exclusive use.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at * self.dim), self.dim) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_fill_their_rows() {
        let mut buffer = vec![0.0; 12];
        let rows = SharedRows::new(&mut buffer, 3);
        std::thread::scope(|threads| {
            for at in 0..4 {
                let rows = &rows;
                // SAFETY: each thread has its own row.
                threads.spawn(move || unsafe { rows.row(at) }.fill(at as f32));
            }
        });
        assert_eq!(buffer, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]);
    }

    #[test]
    #[should_panic(expected = "row 2 of 2")]
    fn a_row_outside_of_the_buffer_is_refused() {
        // SAFETY: nothing else uses the row.
        unsafe { SharedRows::new(&mut [0.0; 7], 3).row(2) };
    }
}
