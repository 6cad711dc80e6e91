//! Rows on embedding servers: [`Tables`](persia_types::Tables) over gRPC, with deadlines and idempotent retries.

mod begin;
mod call;
mod lookup;
mod options;
mod pool;
mod push;
mod restore;
mod snapshot;
mod stats;
mod stream;
mod tables;

pub use self::options::{ClientOptions, Targets};
pub use self::tables::WireTables;
