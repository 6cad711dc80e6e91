//! The export of rows from a table to a checkpoint.

use crate::checkpoint::{TableRows, Values};
use crate::shard::row::Layout;
use crate::simd::Portable;

/// The id, recency and row index of a row. The order is that of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowRef {
    pub(super) id: u64,
    pub(super) row_index: u32,
    pub(super) last_used: u32,
}

/// The rows of a table and its admission counts, in no particular order.
pub(crate) struct RowList {
    pub(super) layout: Layout,
    pub(super) rows: Vec<RowRef>,
    pub(super) admission_counts: Vec<(u64, u32)>,
}

impl RowList {
    /// Sort by id. The returned [`TableRows`] are complete except for weights and state.
    pub(crate) fn sorted(self, name: &str) -> (Vec<RowRef>, TableRows) {
        let Self { layout: Layout { dim, state_len, .. }, mut rows, mut admission_counts } = self;
        rows.sort_unstable();
        admission_counts.sort_unstable();
        let (ids, last_used) = rows.iter().map(|row| (row.id, u64::from(row.last_used))).unzip();
        let name = name.to_owned();
        let table =
            TableRows { name, dim, state_len, ids, last_used, admission_counts, ..TableRows::default() };
        (rows, table)
    }
}

impl Values {
    /// Create empty values with capacity for `rows` rows.
    pub(super) fn with_capacity(layout: Layout, rows: usize) -> Self {
        let Layout { dim, state_len, .. } = layout;
        Self { weights: Vec::with_capacity(rows * dim), state: Vec::with_capacity(rows * state_len) }
    }

    /// Append the weights of a row, as f32, and its state.
    pub(super) fn push(&mut self, layout: Layout, row: &[f32]) {
        let end = self.weights.len();
        self.weights.resize(end + layout.dim, 0.0);
        layout.read::<Portable>(row, &mut self.weights[end..]);
        self.state.extend_from_slice(&row[layout.weight_words()..]);
    }
}
