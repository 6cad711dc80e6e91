//! The engine of a trainer: everything between a user's batch and the rows in [`Tables`](persia_types::Tables).
//!
//! In the order of a training step:
//!
//! 1. [`Batch`]: id features deduplicated once, dense tensors, labels; checked when it is built
//! 2. [`Plan`]: which slot and table each feature belongs to; slots that share a table are merged
//! 3. [`Pipeline`]: feeds batches, looks them up ahead of time under K staleness permits, hands out [`PooledBatch`]
//! 4. [`PushTicket::push`]: gradients per feature become one summed gradient per unique id, pushed in the background
//!
//! ```no_run
//! # use persia_engine::{Batch, Engine, Error, Next, PushOptions};
//! # use std::time::Duration;
//! # fn train(engine: &Engine, batch: Batch, gradients: Vec<Option<persia_engine::Gradient>>) -> Result<(), Error> {
//! let pipeline = engine.pipeline()?;
//! pipeline.feed(batch, Duration::from_secs(1))?;
//! pipeline.end_of_data();
//! while let Next::Ready(looked) = pipeline.next(Duration::from_secs(60))? {
//!     // looked.outputs -> model -> gradients
//! #   let gradients = Vec::new();
//!     if let Some(ticket) = looked.ticket {
//!         ticket.push(gradients, PushOptions::default())?;
//!     }
//! }
//! engine.drain(Duration::from_secs(60))?;
//! # Ok(()) }
//! ```
//!
//! Nothing here knows of Python, the network or the disk; there is no async runtime, only two threads.

#[cfg(target_endian = "big")]
compile_error!(
    "tensors are kept as little-endian bytes and read in place: big-endian machines are not supported"
);

mod batch;
pub mod device;
mod engine;
mod error;
mod memory;
mod pipeline;
mod stats;
mod step;

pub use batch::feature::IdFeature;
pub use batch::tensor::{Dtype, Tensor};
pub use batch::{Batch, BatchParts};
pub use engine::{Drained, Engine, EngineOptions, EvalResult};
pub use error::Error;
pub use pipeline::push::{Gradient, PushOptions, PushTicket};
pub use pipeline::{Fed, Next, Pipeline, PooledBatch, Wait};
pub use stats::{EngineStats, SlotStats, StageTime};
pub use step::buffer::Buffer;
pub use step::forward::{Output, Raw};
pub use step::plan::Plan;
