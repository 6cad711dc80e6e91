//! The content of one virtual shard, as it is written to and read from a file.

use std::collections::HashSet;

use persia_types::limits::{COUNTED_IDS_PER_SHARD, MAX_DIM, MAX_NAME_BYTES, MAX_ROWS_PER_SLAB, MAX_SLOTS};
use persia_types::{VIRTUAL_SHARDS, shard_of};

/// The maximum number of floats of optimizer state per row: Adam has two floats per weight.
const MAX_STATE_LEN: usize = 2 * MAX_DIM;

/// The rows of one table in one shard, sorted by id so that equal content produces equal files.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TableRows {
    /// The table's name.
    pub name: String,
    /// The number of weights per row.
    pub dim: usize,
    /// The number of floats of optimizer state per row.
    pub state_len: usize,
    /// The ids, in ascending order.
    pub ids: Vec<u64>,
    /// The step of the last push of each row.
    pub last_used: Vec<u64>,
    /// The weights, with the shape `[ids.len(), dim]`.
    pub weights: Vec<f32>,
    /// The optimizer state, with the shape `[ids.len(), state_len]`.
    pub state: Vec<f32>,
    /// The ids without a row, in ascending order, each with its number of pushes, which is at least 1.
    pub admission_counts: Vec<(u64, u32)>,
}

/// All content of one virtual shard.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ShardRows {
    /// The number of the shard.
    pub shard: usize,
    /// The tables, in schema order. Empty tables may be omitted.
    pub tables: Vec<TableRows>,
}

impl ShardRows {
    /// Check the content, before it is written or after it was read.
    ///
    /// # Errors
    /// A message that says what is wrong, and where.
    pub fn check(&self) -> Result<(), String> {
        self.check_ids()?;
        self.tables.iter().try_for_each(TableRows::check_values)
    }

    /// Like [`Self::check`], but without weights and state.
    pub(super) fn check_ids(&self) -> Result<(), String> {
        if self.shard >= VIRTUAL_SHARDS {
            return Err(format!("the shard is {}, expected 0 to {}", self.shard, VIRTUAL_SHARDS - 1));
        }
        if self.tables.len() > MAX_SLOTS {
            return Err(format!(
                "the number of tables is {}, but the limit is {MAX_SLOTS}",
                self.tables.len()
            ));
        }
        let mut names = HashSet::new();
        for table in &self.tables {
            if !names.insert(table.name.as_str()) {
                return Err(format!("table {:?} occurs twice", table.name));
            }
            table.check_ids(self.shard)?;
        }
        Ok(())
    }
}

impl TableRows {
    /// Check the lengths of weights and state.
    fn check_values(&self) -> Result<(), String> {
        let rows = self.ids.len();
        self.check_length("weights", self.weights.len(), rows * self.dim)?;
        self.check_length("state", self.state.len(), rows * self.state_len)
    }

    fn check_length(&self, column: &str, length: usize, expected: usize) -> Result<(), String> {
        if length != expected {
            return Err(format!("table {:?}: {length} numbers in {column}, expected {expected}", self.name));
        }
        Ok(())
    }

    /// Check the sizes against the limits, and the ids.
    fn check_ids(&self, shard: usize) -> Result<(), String> {
        check_sizes(&self.name, self.dim, self.state_len, self.ids.len())?;
        check_counted(&self.name, self.admission_counts.len())?;
        self.check_length("last_used", self.last_used.len(), self.ids.len())?;
        if let Some(pair) = self.ids.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(format!(
                "table {:?}: ids must ascend, but id {} is before id {}",
                self.name, pair[0], pair[1]
            ));
        }
        let counted = self.admission_counts.iter().map(|(id, _)| id);
        if let Some(id) = self.ids.iter().chain(counted).find(|id| shard_of(**id) != shard) {
            let own = shard_of(*id);
            return Err(format!(
                "table {:?}: id {id} belongs to shard {own}, but is in shard {shard}",
                self.name
            ));
        }
        if let Some(pair) = self.admission_counts.windows(2).find(|pair| pair[0].0 >= pair[1].0) {
            return Err(format!(
                "table {:?}: the ids of admission counts must ascend, but id {} is before id {}",
                self.name, pair[0].0, pair[1].0
            ));
        }
        let has_row = |id: &u64| self.ids.binary_search(id).is_ok();
        if let Some((id, count)) = self.admission_counts.iter().find(|(id, count)| *count == 0 || has_row(id))
        {
            let expected = if has_row(id) { "none, because the id has a row" } else { "at least 1" };
            return Err(format!(
                "table {:?}: id {id} has the admission count {count}, expected {expected}",
                self.name
            ));
        }
        Ok(())
    }
}

/// Check the sizes of a table against the limits, before anything of that size is allocated.
pub(super) fn check_sizes(name: &str, dim: usize, state_len: usize, rows: usize) -> Result<(), String> {
    if !(1..=MAX_NAME_BYTES).contains(&name.len()) {
        return Err(format!("the name of a table has {} bytes, expected 1 to {MAX_NAME_BYTES}", name.len()));
    }
    if !(1..=MAX_DIM).contains(&dim) {
        return Err(format!("table {name:?}: dim {dim}, expected 1 to {MAX_DIM}"));
    }
    if state_len > MAX_STATE_LEN {
        return Err(format!("table {name:?}: {state_len} floats of state, but the limit is {MAX_STATE_LEN}"));
    }
    if rows > MAX_ROWS_PER_SLAB {
        return Err(format!("table {name:?}: {rows} rows, but the limit is {MAX_ROWS_PER_SLAB}"));
    }
    Ok(())
}

/// Check the number of admission counts, before anything of that size is allocated.
pub(super) fn check_counted(name: &str, counted: usize) -> Result<(), String> {
    let most = *COUNTED_IDS_PER_SHARD.end();
    if counted > most {
        return Err(format!("table {name:?}: {counted} admission counts, but the limit is {most}"));
    }
    Ok(())
}
