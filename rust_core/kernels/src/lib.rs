//! The loops over floats that more than one part of Persia runs. No I/O, no threads, no memory of its own.
//!
//! * [`Bags`], [`pool()`]: rows of ids become vectors of samples
//! * [`Csr`], [`SegmentSum`], [`Gradients`]: gradients of samples become one gradient per unique id
//! * [`simd`]: one loop compiled for every instruction set
//! * [`mod@half`]: numbers of 16 bits
//!
//! Pooling and sums add in batch order, element by element, so the result depends on the input alone. They are the
//! reference for every device.

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

/// Refuse with what is wrong.
fn bad_shape<T>(what: String) -> Result<T, ShapeError> {
    Err(ShapeError(what))
}
