//! The engine of a rank. It connects the user's batches with the rows in [`Tables`](persia_types::Tables).
//!
//! A training step uses, in this order:
//!
//! 1. [`Batch`]: id features, dense tensors and labels. Ids are deduplicated once. A batch is checked when it is
//!    created.
//! 2. a plan: the slot and the table of each feature, and where its rows are pooled. Slots that share a table are
//!    merged.
//! 3. [`Pipeline`]: looks up batches ahead of time, while at most K - 1 pushes are unacknowledged, and returns
//!    [`PooledBatch`].
//! 4. [`PushTicket::push`]: queues the gradients, which the push thread pushes in the background. The
//!    gradients of each unique id are summed.
//!
//! ```no_run
//! # use persia_engine::{Batch, Engine, Error, Next, PushOptions};
//! # use std::time::Duration;
//! # fn train(engine: &Engine, batch: Batch, gradients: Vec<Option<persia_engine::Gradient>>) -> Result<(), Error> {
//! let pipeline = engine.pipeline()?;
//! pipeline.feed(batch, Duration::from_secs(1))?;
//! pipeline.end_of_data();
//! while let Next::Ready(pooled) = pipeline.next(Duration::from_secs(60))? {
//!     // pooled.outputs -> model -> gradients
//! #   let gradients = Vec::new();
//!     if let Some(ticket) = pooled.ticket {
//!         ticket.push(gradients, PushOptions::default())?;
//!     }
//! }
//! engine.drain(Duration::from_secs(60))?;
//! # Ok(()) }
//! ```
//!
//! The engine does not depend on Python, the network or the disk. It has no async runtime, only one look-up thread per
//! pipeline and one push thread.

#[cfg(target_endian = "big")]
compile_error!(
    "tensors are kept as little-endian bytes and read in place: big-endian machines are not supported"
);

mod batch;
mod buffer;
mod context;
pub mod device;
mod engine;
mod error;
mod memory;
mod options;
mod pipeline;
mod stats;
mod step;

pub use batch::feature::IdFeature;
pub use batch::tensor::{Dtype, Tensor};
pub use batch::{Batch, BatchParts};
pub use buffer::Buffer;
pub use engine::{DrainOutcome, Engine, EvalResult};
pub use error::Error;
pub use options::{EngineOptions, PushOptions};
pub use pipeline::ticket::{PooledBatch, PushTicket};
pub use pipeline::wait::Wait;
pub use pipeline::{FeedOutcome, Next, Pipeline};
pub use stats::{EngineStats, SlotStats, StageTime};
pub use step::gradients::Gradient;
pub use step::output::{Output, Raw};
