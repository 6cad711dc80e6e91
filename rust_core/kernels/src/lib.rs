//! The loops over floats that more than one part of Persia uses. This crate does no I/O and starts no
//! threads, and its loops allocate no memory.
//!
//! * [`Bags`], [`pool()`]: pool the rows of ids into vectors of samples
//! * [`Csr`], [`SegmentSum`], [`Gradients`]: sum the gradients of samples into one gradient per unique id
//! * [`simd`]: compiles a loop for several instruction sets
//! * [`mod@half`]: 16-bit floats
//!
//! Pooling and sums add in batch order, element by element, so the result depends only on the input. These loops are
//! the reference for every device.

mod bags;
pub mod half;
mod pool;
mod segment_sum;
pub mod simd;

pub use bags::Bags;
pub use pool::{Pool, copy, pool, scale};
pub use segment_sum::{Csr, Gradients, SegmentSum, segment_sum, segment_sum_onto};

/// The lengths or values of lists are inconsistent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ShapeError(pub String);

/// Return an error with this message.
fn bad_shape<T>(what: String) -> Result<T, ShapeError> {
    Err(ShapeError(what))
}
