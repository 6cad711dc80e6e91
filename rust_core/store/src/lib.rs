//! The rows of embedding tables, in memory, on disk and in object stores. This crate does not depend on
//! Python, and uses the network only for object stores.
//!
//! [`Store`] implements [`persia_types::Tables`]. From the outside in:
//!
//! * `store`: runs, requests and snapshots, and which of them may run concurrently
//! * `run`: the checked settings of a run
//! * `request`: a look-up or push, from the checks of the request to the rows
//! * `snapshot`: writes all shards to the files of a [`checkpoint`], and reads them
//! * `shard`: rows, their memory, eviction and time to live
//! * [`mapped`]: the rows of a serving bundle, in memory-mapped files
//! * `math`: optimizers, initializers and random numbers

pub mod checkpoint;
pub mod mapped;

mod math;
mod request;
mod run;
mod shard;
mod snapshot;
mod store;

use persia_kernels::simd;
pub use request::threads::default_request_threads;
pub use run::slot_differences;
pub use store::{Progress, Store, StoreOptions, TransferStart};
