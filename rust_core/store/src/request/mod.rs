//! The path of a request. The request is checked, its token is claimed, and it is applied batch by batch.

pub(crate) mod check;
pub(crate) mod lookup;
pub(crate) mod push;
mod reserve;
pub(crate) mod row_index_cache;
mod shard_batch;
mod shared_rows;
pub(crate) mod threads;
pub(crate) mod tokens;
