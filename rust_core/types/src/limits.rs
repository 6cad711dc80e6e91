//! Every limit, in one place.

/// Slots of one configuration.
pub const MAX_SLOTS: usize = 4096;
/// Largest embedding dimension of a slot.
pub const MAX_DIM: usize = 4096;
/// Positions of one sample in a raw feature.
pub const MAX_SAMPLE_FIXED_SIZE: u32 = 1 << 16;
/// Rounds of a hash stack.
pub const MAX_HASH_STACK_ROUNDS: u32 = 64;
/// Servers of one job: each holds at least one virtual shard.
pub const MAX_SERVERS: usize = crate::id::VIRTUAL_SHARDS;
/// Trainer ranks of one job.
pub const MAX_RANKS: u32 = 4096;
/// Bytes of data in one chunk of a stream.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;
/// Bytes of ids, rows or gradients in one request or reply.
pub const MAX_REQUEST_BYTES: u64 = 1 << 30;
/// Bytes that a server holds for its requests in flight, and a middleware for their samples, over all connections.
pub const MAX_IN_FLIGHT_BYTES: u64 = 4 << 30;
/// Connections that one server or middleware serves at a time.
pub const MAX_CONNECTIONS: usize = 256;
/// Requests that one connection may have in flight.
pub const MAX_STREAMS_PER_CONNECTION: u32 = 64;
/// Unique ids of one look-up or push, over all its tables.
pub const MAX_IDS_PER_REQUEST: usize = 2_000_000;
/// Occurrences of ids in one feature of one batch, so that `u32` positions never wrap.
pub const MAX_OCCURRENCES: usize = u32::MAX as usize - 1;
/// Samples in one batch.
pub const MAX_BATCH_SIZE: usize = 1 << 24;
/// Bytes of a slot, group or job name.
pub const MAX_NAME_BYTES: usize = 128;
/// Largest staleness K. The window of remembered tokens has space for it and for retries.
pub const MAX_STALENESS: usize = 64;
/// Rows of one table in one shard, so that `u32` slots never wrap.
pub const MAX_ROWS_PER_SLAB: usize = u32::MAX as usize - 1;
/// Largest number of pushes that admission may require until an id gets a row.
pub const MAX_MIN_COUNT: u32 = u16::MAX as u32;
/// A push skips a row if a number of its summed gradient, weight decay included, is 2 to this power or larger. Squares
/// of smaller ones, however many are summed, cannot turn finite optimizer state into infinity: 2^102 is less than half
/// of the last place of the largest f32.
pub const MAX_GRADIENT_EXPONENT: i32 = 50;
/// 2 to the power of [`MAX_GRADIENT_EXPONENT`].
pub const MAX_GRADIENT: f32 = (1u64 << MAX_GRADIENT_EXPONENT) as f32;
/// Largest mean of the Poisson initialiser, which draws about that many numbers for each weight.
pub const MAX_POISSON_MEAN: f32 = 500.0;
/// Range of the number of ids without a row whose pushes a shard counts. Within it, the number is twice the shard's
/// budget of rows.
pub const COUNTED_IDS_PER_SHARD: std::ops::RangeInclusive<usize> = 1 << 10..=1 << 18;
