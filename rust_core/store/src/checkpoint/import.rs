//! [`Import`]: writes a checkpoint from rows that arrive in any order.

use std::path::{Path, PathBuf};

use persia_types::{TablesError, VIRTUAL_SHARDS, shard_of};

use super::disk::{self, Input};
use super::error::{CheckpointError, Result};
use super::manifest::{Head, Manifest};
use super::rows::{ShardRows, TableRows, check_sizes};
use super::saver::Saver;
use super::shard_file::write_shard;

/// The size of the rows in memory, in bytes, at which they are moved to files.
const MAX_BUFFERED: usize = 64 << 20;
/// The size of a record without its weights: id and row number, in bytes.
const RECORD_HEAD: usize = 16;
/// The maximum number of rows with a repeated id that are reported for each table.
const SHOWN: usize = 5;
/// The last use of an imported row, as if the first step had pushed it.
const FIRST_STEP: u64 = 1;

/// A row with the id of an earlier row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duplicate {
    /// The repeated id.
    pub id: u64,
    /// The number of the first row with this id, counted from 0.
    pub first: u64,
    /// The number of the later row, counted from 0.
    pub again: u64,
}

/// The ids of a table that occur more than once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Duplicates {
    /// The number of rows that have the id of an earlier row.
    pub count: u64,
    /// The first few of these rows, in row order.
    pub shown: Vec<Duplicate>,
}

impl Duplicates {
    fn add(&mut self, duplicate: Duplicate) {
        self.count += 1;
        let place = self.shown.partition_point(|shown| shown.again < duplicate.again);
        self.shown.insert(place, duplicate);
        self.shown.truncate(SHOWN);
    }
}

/// The rows of one table. Rows that exceed the memory limit are in files of the staging directory, one for each
/// shard.
struct Table {
    name: String,
    dim: usize,
    /// The records of each shard that are not yet in its file: id, row number and weights, all little-endian.
    buffers: Vec<Vec<u8>>,
}

/// A checkpoint that is being written from rows without optimizer state. If it is dropped before [`Import::commit`],
/// it removes its files.
///
/// Rows are divided by shard as they are added. When the rows in memory exceed 64 MiB, they are moved to
/// files of the staging directory. At the end, each shard is sorted by id in memory and written.
pub struct Import {
    saver: Saver,
    tables: Vec<Table>,
    buffered: usize,
    /// The size of the rows in memory, in bytes, at which they are moved to files.
    limit: usize,
}

impl Import {
    /// Begin a checkpoint in `dir` with these tables, each given as name and dimension.
    ///
    /// # Errors
    /// `BadSave` for an invalid name or a dimension out of range; those of [`Saver::begin`].
    pub fn begin(dir: &Path, tables: &[(String, usize)]) -> Result<Self> {
        for (name, dim) in tables {
            check_sizes(name, *dim, 0, 0).map_err(|what| CheckpointError::bad_save(dir, what))?;
        }
        let table = |(name, dim): &(String, usize)| Table {
            name: name.clone(),
            dim: *dim,
            buffers: vec![Vec::new(); VIRTUAL_SHARDS],
        };
        let (saver, tables) = (Saver::begin(dir)?, tables.iter().map(table).collect());
        Ok(Self { saver, tables, buffered: 0, limit: MAX_BUFFERED })
    }

    /// Add rows to a table. `row` is the number of the first row, and `weights` has the shape `[ids.len(),
    /// dim]`.
    ///
    /// # Errors
    /// `BadSave` if the lengths do not match or the table does not exist; `Io` if a file cannot be written.
    pub fn add(&mut self, table: usize, row: u64, ids: &[u64], weights: &[f32]) -> Result<()> {
        let Some(Table { name, dim, buffers }) = self.tables.get_mut(table) else {
            return Err(CheckpointError::bad_save(
                self.saver.staging(),
                format!("there is no table with index {table}"),
            ));
        };
        if weights.len() != ids.len() * *dim {
            let what =
                format!("table {name:?}: {} weights for {} rows of dim {dim}", weights.len(), ids.len());
            return Err(CheckpointError::bad_save(self.saver.staging(), what));
        }
        for ((id, weights), row) in ids.iter().zip(weights.chunks_exact(*dim)).zip(row..) {
            let buffer = &mut buffers[shard_of(*id)];
            buffer.extend_from_slice(&id.to_le_bytes());
            buffer.extend_from_slice(&row.to_le_bytes());
            weights.iter().for_each(|weight| buffer.extend_from_slice(&weight.to_le_bytes()));
        }
        self.buffered += ids.len() * (RECORD_HEAD + 4 * *dim);
        if self.buffered > self.limit { self.spill() } else { Ok(()) }
    }

    /// Move the rows in memory to files.
    fn spill(&mut self) -> Result<()> {
        for (number, table) in self.tables.iter_mut().enumerate() {
            for (shard, buffer) in
                table.buffers.iter_mut().enumerate().filter(|(_, buffer)| !buffer.is_empty())
            {
                disk::append(&spilled(self.saver.staging(), number, shard), buffer)?;
                *buffer = Vec::new(); // unlike `clear`, this frees the memory
            }
        }
        self.buffered = 0;
        Ok(())
    }

    /// Write the shards. Returns the number of rows and the repeated ids of each table. If any id is repeated, the
    /// caller must not commit.
    ///
    /// # Errors
    /// `BadShape` if a shard has more rows than allowed; `Corrupt` if a file of rows was replaced; `Io`.
    pub fn stage(&mut self) -> std::result::Result<Vec<(u64, Duplicates)>, TablesError> {
        let mut found: Vec<(u64, Duplicates)> = vec![Default::default(); self.tables.len()];
        for shard in 0..VIRTUAL_SHARDS {
            let mut rows = ShardRows { shard, tables: Vec::new() };
            for (number, (count, duplicates)) in found.iter_mut().enumerate() {
                let sorted = self.take(number, shard, duplicates)?;
                *count += sorted.ids.len() as u64;
                rows.tables.extend(Some(sorted).filter(|table| !table.ids.is_empty()));
            }
            // After the first repeated id, the other files are read only to find more repeated ids.
            if !rows.tables.is_empty() && found.iter().all(|(_, duplicates)| duplicates.count == 0) {
                let entry = write_shard(self.saver.staging(), &rows)?;
                self.saver.add(entry)?;
            }
        }
        Ok(found)
    }

    /// The rows of a table in a shard, sorted by id. Of several rows with one id, the first is returned, and
    /// the others are added to `duplicates`.
    fn take(&mut self, number: usize, shard: usize, duplicates: &mut Duplicates) -> Result<TableRows> {
        let path = spilled(self.saver.staging(), number, shard);
        let table = &mut self.tables[number];
        let mut records = Vec::new();
        if disk::kind(&path)?.is_some() {
            Input::open(&path)?.read_pieces(|piece| records.extend_from_slice(piece))?;
            disk::remove_file(&path)?;
        }
        records.append(&mut std::mem::take(&mut table.buffers[shard]));
        let mut sorted: Vec<(u64, u64, &[u8])> =
            records.chunks_exact(RECORD_HEAD + 4 * table.dim).filter_map(split).collect();
        sorted.sort_unstable_by_key(|(id, row, _)| (*id, *row));
        let mut rows = TableRows { name: table.name.clone(), dim: table.dim, ..TableRows::default() };
        rows.weights.reserve_exact(sorted.len() * table.dim);
        let mut first = 0;
        for (id, row, weights) in sorted {
            if rows.ids.last() == Some(&id) {
                duplicates.add(Duplicate { id, first, again: row });
                continue;
            }
            first = row;
            rows.ids.push(id);
            rows.weights.extend(weights.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
        rows.last_used = vec![FIRST_STEP; rows.ids.len()];
        Ok(rows)
    }

    /// Publish the checkpoint, after [`Self::stage`].
    ///
    /// # Errors
    /// Those of [`Saver::commit`].
    pub fn commit(self, head: Head) -> Result<Manifest> {
        self.saver.commit(head)
    }
}

/// The id, row number and weights of a record; None if it is too short.
fn split(record: &[u8]) -> Option<(u64, u64, &[u8])> {
    let (id, rest) = record.split_first_chunk()?;
    let (row, weights) = rest.split_first_chunk()?;
    Some((u64::from_le_bytes(*id), u64::from_le_bytes(*row), weights))
}

fn spilled(staging: &Path, table: usize, shard: usize) -> PathBuf {
    staging.join(format!("rows-{table}-{shard}.part"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use persia_types::Schema;
    use persia_types::tables::Run;

    use super::*;
    use crate::checkpoint::read_shard;

    const DIM: usize = 3;

    fn begin(dir: &Path, limit: usize) -> Import {
        let tables = [("user".to_owned(), DIM), ("item".to_owned(), 1)];
        Import { limit, ..Import::begin(dir, &tables).unwrap() }
    }

    fn weights(ids: &[u64]) -> Vec<f32> {
        ids.iter().flat_map(|id| [*id as f32, 0.5, -1.0]).collect()
    }

    fn head() -> Head {
        let run = serde_json::json!({
            "job": "", "generation": 0, "schema": Schema::default(), "seed": 0, "optimizer": null,
            "initializer": {"kind": "zero"}, "admit_probability": 1.0, "weight_bound": 0.0,
        });
        let run: Run = serde_json::from_value(run).unwrap();
        Head {
            step: 0,
            world_size: 1,
            run,
            rows: BTreeMap::new(),
            tokens: BTreeMap::new(),
            cursors: BTreeMap::new(),
            build: BTreeMap::new(),
            created_at: String::new(),
            inputs: None,
            tables: Vec::new(),
        }
    }

    /// Import 5,000 ids in descending order, 700 at a time, with all rows in memory or hardly any.
    #[test]
    fn rows_in_any_order_become_sorted_shards() {
        let ids: Vec<u64> = (0..5_000).rev().map(|id| id * 7_919).collect();
        for limit in [MAX_BUFFERED, 1_000] {
            let dir = tempfile::tempdir().unwrap();
            let mut import = begin(dir.path(), limit);
            for (piece, ids) in ids.chunks(700).enumerate() {
                import.add(0, 700 * piece as u64, ids, &weights(ids)).unwrap();
            }
            import.add(1, 0, &[7], &[0.25]).unwrap();
            let staged = import.stage().unwrap();
            assert_eq!(staged, [(5_000, Duplicates::default()), (1, Duplicates::default())]);
            let manifest = import.commit(head()).unwrap();
            manifest.verify(dir.path()).unwrap();
            let mut found: Vec<u64> = Vec::new();
            for file in manifest.shards() {
                for table in read_shard(dir.path(), &file).unwrap().tables {
                    let user = table.name == "user";
                    assert_eq!(table.weights, if user { weights(&table.ids) } else { vec![0.25] });
                    assert_eq!(table.last_used, vec![1; table.ids.len()]);
                    found.extend(table.ids.iter().filter(|_| user));
                }
            }
            found.sort_unstable();
            assert!(found.iter().eq(ids.iter().rev()), "limit {limit}");
            let left: Vec<_> =
                std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert!(left.iter().all(|name| !name.to_string_lossy().contains("part")), "{left:?}");
        }
    }

    #[test]
    fn repeated_ids_are_reported_by_row_and_leave_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("new");
        let mut import = begin(&dir, 100);
        let ids: Vec<u64> = (0..100).chain(40..50).chain([40]).collect();
        import.add(0, 1_000, &ids, &weights(&ids)).unwrap();
        let (rows, duplicates) = import.stage().unwrap()[0].clone();
        assert_eq!((rows, duplicates.count), (100, 11));
        let shown: Vec<_> =
            duplicates.shown.iter().map(|found| (found.id, found.first, found.again)).collect();
        let want: Vec<_> = (40..45).map(|id| (id, 1_000 + id, 1_060 + id)).collect();
        assert_eq!(shown, want);
        drop(import);
        assert!(!dir.exists());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let bad = |tables: &[(String, usize)]| Import::begin(dir.path(), tables).err().map(|e| e.to_string());
        assert!(bad(&[(String::new(), 1)]).unwrap().contains("the name of a table has 0 bytes"));
        assert!(bad(&[("user".to_owned(), 0)]).unwrap().contains("dim 0"));
        let mut import = begin(dir.path(), 100);
        let short = import.add(0, 0, &[1, 2], &[0.0; 5]).unwrap_err().to_string();
        assert!(short.contains("table \"user\": 5 weights for 2 rows of dim 3"), "{short}");
        assert!(import.add(2, 0, &[], &[]).is_err());
    }
}
