//! The loops over floats that more than one part of Persia uses. The crate does no I/O, starts no threads and allocates
//! no memory.
//!
//! * [`Bags`], [`pool()`]: rows of ids become vectors of samples
//! * [`Csr`], [`SegmentSum`], [`Gradients`]: gradients of samples become one gradient per unique id
//! * [`simd`]: one loop compiled for every instruction set
//! * [`mod@half`]: numbers of 16 bits
//!
//! Pooling and sums add in batch order, element by element, so the result depends on the input alone. These loops are
//! the reference for every device.

mod bags;
pub mod half;
mod pool;
mod segment_sum;
pub mod simd;

pub use bags::Bags;
pub use pool::{Pool, copy, pool, rows_ahead, scale};
pub use segment_sum::{Csr, Gradients, SegmentSum, segment_sum, segment_sum_onto};

/// Lists whose lengths or values do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ShapeError(pub String);

/// Return an error with the mistake.
fn bad_shape<T>(what: String) -> Result<T, ShapeError> {
    Err(ShapeError(what))
}
