//! Rows of embedding tables, in memory and on disk. The crate does not depend on Python or the network.
//!
//! [`Store`] implements [`persia_types::Tables`]. From the outside in:
//!
//! * `store`: runs, requests and snapshots, and what may happen concurrently
//! * `run`: the settings of a run, checked
//! * `request`: a look-up or push, from its checks to the rows
//! * `snapshot`: all shards to the files of a [`checkpoint`] and back
//! * `shard`: rows, their memory, eviction and time to live
//! * [`mapped`]: rows of a serving bundle, in files that are mapped into memory
//! * `math`: optimizers, initialisers and random numbers

pub mod checkpoint;
pub mod mapped;

mod math;
mod request;
mod run;
mod shard;
mod snapshot;
mod store;

use persia_kernels::simd;
pub use store::{Progress, Store, StoreOptions, TransferStart};
