//! Snapshots: several threads write all shards to files, or read them.

mod parallel;
mod rows;
mod throttle;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use parking_lot::Mutex;
use persia_types::TablesError;
use persia_types::tables::{FileEntry, Snapshot};

use crate::checkpoint::{ShardReader, ShardRows, discard, sync_names, without_staging};
pub(crate) use parallel::{for_each_job, run_jobs};
use rows::ShardFile;
pub(crate) use rows::{export, import, write_shard_snapshot};
use throttle::WriteThrottle;

/// Write `shards` to files in `dir`, a directory or a URL. `write` is called with each shard, and writes its
/// file. `tables` is the number of tables. Writing is throttled while `trained` returns a growing count, but
/// not while it returns None. `accept` is called when all files are written. After an error, including one
/// from `accept`, the files of this call are removed.
pub(crate) fn save(
    dir: &Path,
    tables: usize,
    shards: Range<usize>,
    threads: usize,
    trained: impl Fn() -> Option<u64> + Sync,
    write: impl Fn(usize) -> Result<ShardFile, TablesError> + Sync,
    accept: impl Fn() -> Result<(), TablesError>,
) -> Result<Snapshot, TablesError> {
    let throttle = WriteThrottle::new(threads, trained);
    let written = Mutex::new(Vec::new());
    let files = run_jobs(shards.len(), threads, throttle::yield_to_training, |(), at| {
        if at + 1 == shards.len() {
            throttle.lift();
        }
        let file = throttle.run(|| write(shards.start + at).inspect_err(|_| throttle.lift()))?;
        written.lock().extend(file.iter().map(|(file, _)| file.name.clone()));
        Ok::<_, TablesError>(file)
    });
    // The content of the files is durable. Make their names durable too.
    let synced = files.and_then(|files| {
        sync_names(dir).map_err(|source| TablesError::Io { path: without_staging(dir), source })?;
        accept().map(|()| files)
    });
    let files = synced.inspect_err(|_| discard(dir, &written.lock()))?;
    let mut snapshot = Snapshot { files: Vec::new(), rows: vec![0; tables] };
    for (file, counts) in files.into_iter().flatten() {
        snapshot.files.push(file);
        counts.into_iter().for_each(|(table, rows)| snapshot.rows[table] += rows as u64);
    }
    Ok(snapshot)
}

/// Read, check and import all files. Returns the results by shard.
pub(crate) fn load<T: Send>(
    dir: &Path,
    files: &[FileEntry],
    threads: usize,
    import: impl Fn(&ShardRows, &FileEntry, &Path) -> Result<T, TablesError> + Sync,
) -> Result<BTreeMap<usize, T>, TablesError> {
    let loaded = run_jobs(files.len(), threads, ShardReader::default, |reader, at| {
        let rows = reader.read(dir, &files[at])?;
        Ok::<_, TablesError>((
            rows.shard,
            import(rows, &files[at], &without_staging(&dir.join(&files[at].name)))?,
        ))
    })?;
    let mut shards = BTreeMap::new();
    for (at, (shard, content)) in loaded.into_iter().enumerate() {
        if shards.insert(shard, content).is_some() {
            let path = without_staging(&dir.join(&files[at].name));
            return Err(TablesError::Corrupt { path, what: format!("shard {shard} is listed twice") });
        }
    }
    Ok(shards)
}

#[cfg(test)]
mod tests {
    use std::{fs, io};

    use super::*;

    /// While the last file is written, another run may begin and drop rows that the files should contain.
    #[test]
    fn a_snapshot_that_is_not_accepted_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = |shard: usize| dir.path().join(format!("shard-{shard}"));
        let write = |shard: usize| {
            fs::write(path(shard), b"rows").unwrap();
            let entry = FileEntry { name: format!("shard-{shard}"), bytes: 4, blake3: "0".repeat(64) };
            Ok(Some((entry, vec![(0, 10)])))
        };
        let saved = |accepted: bool| {
            let accept = || {
                assert!((0..5).all(|shard| path(shard).exists()), "all files are written");
                let source = io::Error::other("cancelled");
                if accepted { Ok(()) } else { Err(TablesError::Io { path: dir.path().into(), source }) }
            };
            save(dir.path(), 2, 0..5, 2, || None, write, accept)
        };
        let snapshot = saved(true).unwrap();
        assert_eq!((snapshot.files.len(), snapshot.rows), (5, vec![50, 0]));
        let refused = saved(false).unwrap_err();
        assert!(refused.to_string().contains("cancelled"), "{refused}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
