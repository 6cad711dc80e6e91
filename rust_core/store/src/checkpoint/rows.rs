//! The rows of one virtual shard, as they travel between memory and a checkpoint's file.

/// Rows of one table in one shard, sorted by id so that equal content gives equal files.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TableRows {
    /// The table's name.
    pub name: String,
    /// Weights per row.
    pub dim: usize,
    /// Floats of optimizer state per row.
    pub state_len: usize,
    /// Ascending.
    pub ids: Vec<u64>,
    /// Step of the last training look-up, per row.
    pub last_used: Vec<u64>,
    /// `[ids.len(), dim]`.
    pub weights: Vec<f32>,
    /// `[ids.len(), state_len]`.
    pub state: Vec<f32>,
}

/// Everything one virtual shard holds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ShardRows {
    /// Which.
    pub shard: usize,
    /// In the schema's order; tables without rows may be left out.
    pub tables: Vec<TableRows>,
}
