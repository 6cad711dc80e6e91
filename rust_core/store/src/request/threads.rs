//! [`RequestThreads`]: divides a request among threads, by shards.
//!
//! Everything that a request does to a row depends only on the row's shard. Memory, evictions and admission counts
//! belong to the shard, and the ids of a request are in the order of shards. The result is therefore bit-identical for
//! every number of threads.

use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;

use persia_types::TablesError;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// The minimum average number of ids of the parts of a request. Waking a thread for fewer ids takes longer than
/// processing them.
const MIN_IDS: usize = 2_048;
/// The maximum number of parts for each thread. With several parts, no thread waits long for another one that was
/// interrupted.
const PARTS_PER_THREAD: usize = 4;

/// The number of threads that execute a request unless the configuration says otherwise: a quarter of the processors,
/// from 1 to 8. The other processors are for concurrent requests and for the dense model.
pub fn default_request_threads() -> usize {
    (std::thread::available_parallelism().map_or(1, NonZeroUsize::get) / 4).clamp(1, 8)
}

/// The threads that execute requests, and the shards among which requests are divided.
pub(crate) struct RequestThreads {
    /// None if the caller of a request executes it alone.
    pool: Option<ThreadPool>,
    /// The shards that the store holds.
    shards: Range<usize>,
}

impl RequestThreads {
    /// Start the threads. If `threads` is 1, none is started and callers execute their requests alone.
    ///
    /// # Errors
    /// `Io` if the operating system refuses a thread.
    pub(crate) fn start(threads: usize, shards: Range<usize>) -> Result<Self, TablesError> {
        let builder = ThreadPoolBuilder::new().num_threads(threads);
        let pool = match threads {
            1 => None,
            _ => match builder.thread_name(|number| format!("persia-store-{number}")).build() {
                Ok(pool) => Some(pool),
                Err(error) => return Err(refused(threads, &error)),
            },
        };
        Ok(Self { pool, shards })
    }

    /// The number of parts into which a request with this number of ids is divided.
    pub(crate) fn parts(&self, ids: usize) -> usize {
        let threads = self.pool.as_ref().map_or(1, ThreadPool::current_num_threads);
        let most = if threads == 1 { 1 } else { threads * PARTS_PER_THREAD };
        (ids / MIN_IDS).min(most).min(self.shards.len()).max(1)
    }

    /// Call `work` for each part of a request with this number of ids. A part is a range of shards. Together,
    /// the parts contain every shard of the store once. Returns the results in the order of shards.
    pub(crate) fn map<T: Send>(&self, ids: usize, work: impl Fn(Range<usize>) -> T + Sync) -> Vec<T> {
        let parts = self.parts(ids);
        let Range { start, end } = self.shards;
        let of = |part: usize| start + (end - start) * part / parts;
        let work = |part: usize| work(of(part)..of(part + 1));
        match &self.pool {
            Some(pool) if parts > 1 => pool.install(|| (0..parts).into_par_iter().map(work).collect()),
            _ => (0..parts).map(work).collect(),
        }
    }
}

/// The error for threads that the operating system does not start.
fn refused(threads: usize, error: &ThreadPoolBuildError) -> TablesError {
    let what = format!(
        "cannot start {threads} threads for requests: {error}; set \
         embedding_parameter_server_config.request_threads to a lower number, or raise the limit on threads of this \
         user and container"
    );
    TablesError::Io { path: "embedding store".into(), source: io::Error::other(what) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shards_of(threads: usize, held: Range<usize>, ids: usize) -> Vec<Range<usize>> {
        RequestThreads::start(threads, held).unwrap().map(ids, |shards| shards)
    }

    #[test]
    fn parts_contain_every_shard_once() {
        for (threads, held) in [(1, 0..256), (2, 0..256), (3, 0..256), (4, 85..171), (8, 3..5), (2, 9..10)] {
            for ids in [0, 1, 2 * MIN_IDS - 1, 2 * MIN_IDS, 5 * MIN_IDS, 1_000 * MIN_IDS] {
                let parts = shards_of(threads, held.clone(), ids);
                assert!(parts.iter().all(|part| !part.is_empty()));
                let all: Vec<usize> = parts.into_iter().flatten().collect();
                assert_eq!(all, held.clone().collect::<Vec<_>>(), "{threads} threads, {ids} ids");
            }
        }
    }

    #[test]
    fn only_large_requests_are_divided() {
        assert_eq!(shards_of(4, 0..256, 2 * MIN_IDS - 1).len(), 1);
        assert_eq!(shards_of(4, 0..256, 2 * MIN_IDS).len(), 2);
        assert_eq!(shards_of(4, 0..256, 1_000 * MIN_IDS).len(), 16);
        assert_eq!(shards_of(1, 0..256, 1_000 * MIN_IDS).len(), 1);
    }
}
