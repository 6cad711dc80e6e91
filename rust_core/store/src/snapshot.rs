//! All shards to files and back, by several threads.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use persia_types::TablesError;
use persia_types::tables::{FileEntry, Snapshot};

use crate::checkpoint::{ShardReader, ShardRows, write_shard};

/// Write what `export` says each of `shards` holds; those without rows get no file. Rows are counted per name in
/// `tables`.
pub(crate) fn save(
    dir: &Path,
    tables: &[&str],
    shards: Range<usize>,
    threads: usize,
    export: impl Fn(usize) -> ShardRows + Sync,
) -> Result<Snapshot, TablesError> {
    let counts: Vec<AtomicU64> = tables.iter().map(|_| AtomicU64::new(0)).collect();
    let files = in_parallel(shards.len(), threads, yield_to_training, |(), at| {
        let rows = export(shards.start + at);
        for table in &rows.tables {
            if let Some(place) = tables.iter().position(|name| *name == table.name) {
                counts[place].fetch_add(table.ids.len() as u64, Ordering::Relaxed);
            }
        }
        if rows.tables.is_empty() { Ok(None) } else { write_shard(dir, &rows).map(Some) }
    })?;
    // The files are durable; now their names.
    let io = |source| TablesError::Io { path: dir.to_owned(), source };
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io)?;
    let rows = counts.into_iter().map(AtomicU64::into_inner).collect();
    Ok(Snapshot { files: files.into_iter().flatten().collect(), rows })
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
    use super::*;

    #[test]
    fn results_keep_the_order_of_jobs() {
        let squares = in_parallel(100, 4, || (), |(), job| Ok::<_, ()>(job * job)).unwrap();
        assert!(squares.iter().enumerate().all(|(job, square)| *square == job * job));
        assert_eq!(in_parallel(0, 4, || (), |(), _| Ok::<(), ()>(())), Ok(vec![]));
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
