//! Rows of embedding tables, in memory and on disk. Knows nothing of Python or the network.
//!
//! [`Store`] implements [`persia_types::Tables`]. From the outside in:
//!
//! * `store`: the run, its requests, and what may happen at the same time
//! * `request`, `run`: what is checked, before anything changes
//! * `tokens`, `memo`: what counts once, and what a push may expect to find where its look-up did
//! * `span`, `lookup`, `push`: a request cut into blocks, and what happens to a block
//! * `shard`, `table`: rows, budget, eviction, time to live; `index`, `memory`, `arena`: from ids to slots to bytes
//! * `row`: a row's weights in 32 or 16 bits
//! * `optimizer`, `initial`, `random`: the mathematics
//! * `export`, `snapshot`: to and from the files of [`checkpoint`]

pub mod checkpoint;

mod arena;
mod copies;
mod export;
mod frozen;
mod index;
mod initial;
mod lookup;
mod memo;
mod memory;
mod optimizer;
mod push;
mod random;
mod request;
mod row;
mod run;
mod shard;
mod snapshot;
mod span;
mod store;
mod table;
mod tokens;

use persia_kernels::simd;
pub use store::{Progress, Store, StoreOptions};
