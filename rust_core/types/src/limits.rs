//! The limits of configurations, requests, connections and rows.

/// The maximum number of slots in one configuration.
pub const MAX_SLOTS: usize = 4096;
/// The maximum embedding dimension of a slot.
pub const MAX_DIM: usize = 4096;
/// The maximum number of positions per sample in a raw feature.
pub const MAX_SAMPLE_FIXED_SIZE: u32 = 1 << 16;
/// The maximum number of rounds of a hash stack.
pub const MAX_HASH_STACK_ROUNDS: u32 = 64;
/// The maximum number of servers of one job. Each server holds at least one virtual shard.
pub const MAX_SERVERS: usize = crate::id::VIRTUAL_SHARDS;
/// The maximum number of ranks of one job.
pub const MAX_RANKS: u32 = 4096;
/// The maximum size of the data in one chunk of a stream, in bytes.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;
/// The maximum size of the rows or gradients of one request or reply, as f32, in bytes. It is also the
/// maximum size of the samples of one request, with their lists.
pub const MAX_REQUEST_BYTES: u64 = 1 << 30;
/// The maximum memory for requests in flight over all connections, in bytes. On a server, it limits all data of the
/// requests. On a middleware, it limits their samples.
pub const MAX_IN_FLIGHT_BYTES: u64 = 4 << 30;
/// The maximum number of connections that one server or middleware serves at a time.
pub const MAX_CONNECTIONS: usize = 256;
/// The maximum number of requests in flight on one connection.
pub const MAX_STREAMS_PER_CONNECTION: u32 = 64;
/// The maximum number of unique ids in one look-up or push, over all its tables.
pub const MAX_IDS_PER_REQUEST: usize = 2_000_000;
/// The maximum number of occurrences of ids in one feature of one batch. It ensures that `u32` positions
/// never wrap.
pub const MAX_OCCURRENCES: usize = u32::MAX as usize - 1;
/// The maximum number of samples in one batch.
pub const MAX_BATCH_SIZE: usize = 1 << 24;
/// The maximum length of a name in a configuration or a batch, in bytes. A job whose processes discover each
/// other needs a shorter name.
pub const MAX_NAME_BYTES: usize = 128;
/// The maximum staleness K. The window of recorded tokens has room for K steps and their retries.
pub const MAX_STALENESS: usize = 64;
/// The maximum number of rows of one table in one shard. It ensures that `u32` row indices never wrap.
pub const MAX_ROWS_PER_SLAB: usize = u32::MAX as usize - 1;
/// The maximum number of pushes that admission may require before an id gets a row.
pub const MAX_MIN_COUNT: u32 = u16::MAX as u32;
/// A push skips a row if an element of its summed gradient, or the weight decay of an element, has a magnitude of at
/// least 2 to this power. Their sum is therefore below 2^51 and its square below 2^102, which is less than half a unit in
/// the last place of the largest f32. However many such squares are added, finite optimizer state stays finite.
pub const MAX_GRADIENT_EXPONENT: i32 = 50;
/// 2 to the power of [`MAX_GRADIENT_EXPONENT`].
pub const MAX_GRADIENT: f32 = (1u64 << MAX_GRADIENT_EXPONENT) as f32;
/// The maximum mean of the Poisson initializer, which draws about that many random numbers for each weight.
pub const MAX_POISSON_MEAN: f32 = 500.0;
/// The range of the limit on ids with admission counts in one shard. The limit is twice the shard's budget of rows,
/// clamped to this range.
pub const COUNTED_IDS_PER_SHARD: std::ops::RangeInclusive<usize> = 1 << 10..=1 << 18;
