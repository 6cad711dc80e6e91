//! All shards to files and back, by several threads.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use persia_types::TablesError;
use persia_types::tables::{FileEntry, Snapshot};

use crate::checkpoint::{ShardReader, ShardRows};

/// The file of a shard, and how many rows it has of tables of a number; None without any.
pub(crate) type Written = Option<(FileEntry, Vec<(usize, usize)>)>;

/// `write` each of `shards` to a file in `dir`, and count the rows of so many `tables`. While what is `trained` grows, threads
/// rest; None is a reason not to.
pub(crate) fn save(
    dir: &Path,
    tables: usize,
    shards: Range<usize>,
    threads: usize,
    trained: impl Fn() -> Option<u64> + Sync,
    write: impl Fn(usize) -> Result<Written, TablesError> + Sync,
) -> Result<Snapshot, TablesError> {
    let (rest, part) = (Rest::new(trained), rest_per_work(threads));
    let files = in_parallel(shards.len(), threads, yield_to_training, |(), at| {
        let last = at + 1 == shards.len();
        if last {
            rest.end();
        }
        let before = processor_time();
        let file = write(shards.start + at);
        if file.is_err() {
            rest.end();
        }
        rest.while_grows(processor_time().saturating_sub(before) * part);
        file
    })?;
    // The files are durable; now their names.
    let io = |source| TablesError::Io { path: dir.to_owned(), source };
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io)?;
    let mut snapshot = Snapshot { files: Vec::new(), rows: vec![0; tables] };
    for (file, counts) in files.into_iter().flatten() {
        snapshot.files.push(file);
        counts.into_iter().for_each(|(table, rows)| snapshot.rows[table] += rows as u64);
    }
    Ok(snapshot)
}

/// Read and check every file, and make of each what `import` does. By shard.
pub(crate) fn load<T: Send>(
    dir: &Path,
    files: &[FileEntry],
    threads: usize,
    import: impl Fn(&ShardRows, &Path) -> Result<T, TablesError> + Sync,
) -> Result<BTreeMap<usize, T>, TablesError> {
    let loaded = in_parallel(files.len(), threads, ShardReader::default, |reader, at| {
        let rows = reader.read(dir, &files[at])?;
        Ok::<_, TablesError>((rows.shard, import(rows, &dir.join(&files[at].name))?))
    })?;
    let mut shards = BTreeMap::new();
    for (at, (shard, content)) in loaded.into_iter().enumerate() {
        if shards.insert(shard, content).is_some() {
            let path = dir.join(&files[at].name);
            return Err(TablesError::Corrupt { path, what: format!("shard {shard} is named twice") });
        }
    }
    Ok(shards)
}

/// How many times its own processor time each of `threads` rests, for all of them to take half of one processor in four. What
/// a save takes from training is memory bandwidth, and that goes with what it does, not with waiting for a disk.
fn rest_per_work(threads: usize) -> u32 {
    const PROCESSORS_PER_HALF: usize = 4;
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let part = 2 * threads / processors.div_ceil(PROCESSORS_PER_HALF);
    u32::try_from(part.saturating_sub(1)).unwrap_or(u32::MAX)
}

/// What this thread has used of processors.
#[allow(unsafe_code)]
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a variable of this function. A clock that cannot be read stands at 0, and then nobody rests.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Where threads that write rest while there is training, until nothing is left for them.
struct Rest<T> {
    trained: T,
    seen: Mutex<Seen>,
    end: Condvar,
}

struct Seen {
    trained: Option<u64>,
    /// When that was found to have grown.
    grew: Option<Instant>,
    ended: bool,
}

impl<T: Fn() -> Option<u64>> Rest<T> {
    fn new(trained: T) -> Self {
        let seen = Seen { trained: trained(), grew: None, ended: false };
        Self { trained, seen: Mutex::new(seen), end: Condvar::new() }
    }

    fn end(&self) {
        self.seen.lock().ended = true;
        self.end.notify_all();
    }

    /// Return once `trained` has stood still for a time or is None, after `most`, or at the end.
    fn while_grows(&self, most: Duration) {
        /// Longer than a request.
        const STILL: Duration = Duration::from_millis(100);
        let began = Instant::now();
        let mut seen = self.seen.lock();
        while !seen.ended {
            let trained = (self.trained)();
            if trained.is_none() {
                return;
            }
            if trained != seen.trained {
                (seen.trained, seen.grew) = (trained, Some(Instant::now()));
            }
            let still = seen.grew.and_then(|grew| STILL.checked_sub(grew.elapsed()));
            let Some((still, left)) = still.zip(most.checked_sub(began.elapsed())) else { return };
            self.end.wait_for(&mut seen, still.min(left));
        }
    }
}

/// Let threads that train go first on processors that they share with this one.
#[allow(unsafe_code)]
fn yield_to_training() {
    const NICE: libc::c_int = 10;
    // SAFETY: a number for the calling thread's own scheduling. Where it is refused, files are written as fast as rows are
    // trained, which is right as well.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// `work` for each of `0..jobs`.
pub(crate) fn each(jobs: usize, threads: usize, work: impl Fn(usize) + Sync) {
    let Ok(_) = in_parallel(
        jobs,
        threads,
        || (),
        |(), job| {
            work(job);
            Ok::<(), Infallible>(())
        },
    );
}

/// `work(0..jobs)` in order of results, each with what its thread began with. The first error ends it.
fn in_parallel<S, T: Send, E: Send>(
    jobs: usize,
    threads: usize,
    begin: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(jobs));
    let failed = Mutex::new(None);
    let worker = || {
        let mut state = begin();
        while failed.lock().is_none() {
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= jobs {
                return;
            }
            match work(&mut state, job) {
                Ok(result) => done.lock().push((job, result)),
                Err(error) => drop(failed.lock().get_or_insert(error)),
            }
        }
    };
    // Never on the caller's thread: `begin` may change the one it is called on.
    std::thread::scope(|scope| {
        for _ in 0..threads.min(jobs) {
            scope.spawn(worker);
        }
    });
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let mut done = done.into_inner();
    done.sort_unstable_by_key(|(job, _)| *job);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn results_keep_the_order_of_jobs() {
        let squares = in_parallel(100, 4, || (), |(), job| Ok::<_, ()>(job * job)).unwrap();
        assert!(squares.iter().enumerate().all(|(job, square)| *square == job * job));
        assert_eq!(in_parallel(0, 4, || (), |(), _| Ok::<(), ()>(())), Ok(vec![]));
    }

    #[test]
    fn who_rests_goes_on_when_nothing_is_trained_and_at_the_end() {
        let trained = AtomicU64::new(0);
        let still = Rest::new(|| Some(7));
        let rest = Rest::new(|| Some(trained.fetch_add(1, Ordering::Relaxed)));
        let hurried =
            Rest::new(|| Some(trained.fetch_add(1, Ordering::Relaxed)).filter(|trained| *trained < 7));
        still.while_grows(Duration::MAX);
        std::thread::scope(|threads| {
            let resting = threads.spawn(|| rest.while_grows(Duration::MAX));
            while trained.load(Ordering::Relaxed) < 4 {
                assert!(!resting.is_finished());
                std::thread::yield_now();
            }
            rest.end();
        });
        rest.while_grows(Duration::MAX);
        hurried.while_grows(Duration::MAX);
        assert!(trained.into_inner() > 7);
    }

    #[test]
    fn an_error_is_returned_and_ends_the_work() {
        let started = AtomicUsize::new(0);
        let result = in_parallel(
            1_000_000,
            2,
            || (),
            |(), job| {
                started.fetch_add(1, Ordering::Relaxed);
                if job == 3 { Err("no") } else { Ok(()) }
            },
        );
        assert_eq!(result, Err("no"));
        assert!(started.into_inner() < 1_000_000);
    }
}
