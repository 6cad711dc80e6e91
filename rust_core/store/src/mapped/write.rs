//! Writes the rows of a checkpoint to the files of a bundle.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use persia_types::TablesError;
use persia_types::id::hash_id;
use persia_types::tables::FileEntry;

use super::format::RowFormat;
use crate::checkpoint::{ShardReader, TableRows, shard_of_entry};

/// The number of bytes that are buffered before they are written.
const BUFFER: usize = 1 << 20;

/// A table to be written, and its files.
#[derive(Debug, Clone)]
pub struct Target {
    /// The name of the table.
    pub name: String,
    /// The number of weights of a row.
    pub dim: usize,
    /// Rows last used before this step are expired and are not written; 0 if rows never expire.
    pub oldest_alive: u64,
    /// The encoding of the rows.
    pub format: RowFormat,
    /// The file of ids.
    pub ids: PathBuf,
    /// The file of rows.
    pub rows: PathBuf,
}

/// Write the rows of a checkpoint, shard by shard, and sync the files. Tables without a target are skipped.
/// Returns the number of rows of each target. Memory use is bounded by the size of the largest shard.
///
/// # Errors
/// `Corrupt` for a damaged checkpoint file or a weight that is not finite; `Foreign` for a table of a different
/// dimension; `Io`.
pub fn write_tables(
    checkpoint: &Path,
    shards: &[FileEntry],
    targets: &[Target],
) -> Result<Vec<u64>, TablesError> {
    let mut files = targets.iter().map(TableFiles::create).collect::<Result<Vec<_>, _>>()?;
    let place: HashMap<&str, usize> =
        targets.iter().enumerate().map(|(at, target)| (target.name.as_str(), at)).collect();
    let mut shards: Vec<&FileEntry> = shards.iter().collect();
    // The shard number is the first byte of the hash, so the rows of all shards, taken in order, ascend by
    // hash.
    shards.sort_by_key(|entry| shard_of_entry(&entry.name));
    let mut reader = ShardReader::default();
    for entry in shards {
        for table in &reader.read(checkpoint, entry)?.tables {
            if let Some(&at) = place.get(table.name.as_str()) {
                files[at].append(checkpoint, table)?;
            }
        }
    }
    files.into_iter().map(TableFiles::finish).collect()
}

struct TableFiles<'a> {
    target: &'a Target,
    ids: BufWriter<File>,
    rows: BufWriter<File>,
    count: u64,
    encoded: Vec<u8>,
}

impl<'a> TableFiles<'a> {
    fn create(target: &'a Target) -> Result<Self, TablesError> {
        let open = |path: &Path| {
            let file = File::create(path).map_err(|source| TablesError::Io { path: path.into(), source })?;
            Ok::<_, TablesError>(BufWriter::with_capacity(BUFFER, file))
        };
        Ok(Self { target, ids: open(&target.ids)?, rows: open(&target.rows)?, count: 0, encoded: Vec::new() })
    }

    fn append(&mut self, checkpoint: &Path, table: &TableRows) -> Result<(), TablesError> {
        let Target { dim, oldest_alive, format, .. } = *self.target;
        if table.dim != dim {
            let what = format!("its table {} has dim {}, but dim {dim} is configured", table.name, table.dim);
            return Err(TablesError::Foreign { path: checkpoint.into(), what });
        }
        let mut order: Vec<(u64, u64, usize)> =
            table.ids.iter().enumerate().map(|(at, id)| (hash_id(*id), *id, at)).collect();
        order.retain(|(_, _, at)| table.last_used[*at] >= oldest_alive);
        order.sort_unstable();
        for (_, id, at) in order {
            let row = &table.weights[at * dim..][..dim];
            if let Some(weight) = row.iter().find(|weight| !weight.is_finite()) {
                let what = format!(
                    "table {:?}: id {id} has the weight {weight}, which is not finite; use an older checkpoint",
                    table.name
                );
                return Err(TablesError::Corrupt { path: checkpoint.into(), what });
            }
            self.encoded.clear();
            format.encode(row, &mut self.encoded);
            let written = self.ids.write_all(&id.to_le_bytes());
            written.map_err(|source| TablesError::Io { path: self.target.ids.clone(), source })?;
            let written = self.rows.write_all(&self.encoded);
            written.map_err(|source| TablesError::Io { path: self.target.rows.clone(), source })?;
            self.count += 1;
        }
        Ok(())
    }

    fn finish(self) -> Result<u64, TablesError> {
        for (file, path) in [(self.ids, &self.target.ids), (self.rows, &self.target.rows)] {
            let file = file.into_inner().map_err(std::io::IntoInnerError::into_error);
            file.and_then(|file| file.sync_all())
                .map_err(|source| TablesError::Io { path: path.clone(), source })?;
        }
        Ok(self.count)
    }
}
