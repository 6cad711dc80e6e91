//! [`CowSnapshot`]: the rows of one table of a shard at one point in time, by copy-on-write.
//!
//! The start of a snapshot copies only the recency of rows. From then on, a row is copied before its first
//! change or removal, unless it has already been taken for the snapshot's file. Rows that do not change, and
//! rows inserted later, are never copied.

use std::sync::Arc;

use crate::checkpoint::Values;
use crate::shard::copy_budget::CopyBudget;
use crate::shard::export::{RowList, RowRef};
use crate::shard::index::Index;
use crate::shard::row::{FREE, Layout};

/// A value in [`CowSnapshot::copies`]: the row is unchanged at its index.
const UNTOUCHED: u32 = 0;
/// A value in [`CowSnapshot::copies`]: the row has been taken for the snapshot's file.
const WRITTEN: u32 = u32::MAX;

/// The snapshot of one table of a shard.
pub(crate) struct CowSnapshot {
    layout: Layout,
    len: usize,
    /// The recency at each row index at the start of the snapshot; [`FREE`] for an index without a row.
    last_used: Vec<u32>,
    /// For each row index: [`UNTOUCHED`], [`WRITTEN`], or 1 + the position of the copy in `ids` and `rows`.
    copies: Vec<u32>,
    ids: Vec<u64>,
    rows: Vec<f32>,
    /// A copy of the admission counts, made before their first change; None until then.
    admission_counts: Option<Vec<(u64, u32)>>,
    budget: Arc<CopyBudget>,
    copied_bytes: u64,
}

impl Drop for CowSnapshot {
    fn drop(&mut self) {
        self.budget.release(self.copied_bytes);
    }
}

impl CowSnapshot {
    /// Begin a snapshot of a table with `len` rows. `last_used` is the recency at each row index.
    pub(super) fn begin(layout: Layout, len: usize, last_used: &[u32], budget: &Arc<CopyBudget>) -> Self {
        Self {
            layout,
            len,
            last_used: last_used.to_vec(),
            copies: vec![UNTOUCHED; last_used.len()],
            ids: Vec::new(),
            rows: Vec::new(),
            admission_counts: None,
            budget: Arc::clone(budget),
            copied_bytes: 0,
        }
    }

    /// The number of bytes allocated.
    pub(super) fn memory_bytes(&self) -> usize {
        let counts = self.admission_counts.as_ref().map_or(0, Vec::capacity);
        (self.last_used.capacity() + self.copies.capacity() + self.rows.capacity()) * size_of::<u32>()
            + self.ids.capacity() * size_of::<u64>()
            + counts * size_of::<(u64, u32)>()
    }

    /// Copy the row at `row_index`, which is about to change or be removed, if the snapshot needs it.
    pub(super) fn preserve(&mut self, row_index: u32, id: u64, row: &[f32]) {
        let at = row_index as usize;
        if self.copies.get(at) == Some(&UNTOUCHED) && self.last_used[at] != FREE {
            self.ids.push(id);
            self.rows.extend_from_slice(row);
            self.copies[at] = self.ids.len() as u32;
            self.charge(size_of::<u64>() + size_of_val(row));
        }
    }

    /// Copy the admission counts, which are about to change, if the snapshot needs them.
    pub(super) fn preserve_counts(&mut self, counts: &Index) {
        if self.admission_counts.is_none() {
            let copy: Vec<_> = counts.entries().collect();
            self.charge(size_of_val(copy.as_slice()));
            self.admission_counts = Some(copy);
        }
    }

    /// All rows of the snapshot. `ids` and `counts` are the table's current ones.
    pub(super) fn list(&self, ids: &[u64], counts: &Index) -> RowList {
        let held = (0..).zip(&self.last_used).filter(|(_, last_used)| **last_used != FREE);
        let mut rows = Vec::with_capacity(self.len);
        rows.extend(held.map(|(row_index, last_used)| {
            let id = self.copy_of(row_index).map_or_else(|| ids[row_index as usize], |copy| self.ids[copy]);
            RowRef { id, row_index, last_used: *last_used }
        }));
        let admission_counts = self.admission_counts.clone().unwrap_or_else(|| counts.entries().collect());
        RowList { layout: self.layout, rows, admission_counts }
    }

    /// Take the values of these rows, which may change from then on. `current` returns the current row at an
    /// index.
    pub(super) fn take<'a>(&mut self, rows: &[RowRef], current: impl Fn(u32) -> &'a [f32]) -> Values {
        let mut values = Values::with_capacity(self.layout, rows.len());
        let stride = self.layout.stride();
        for row in rows {
            match self.copy_of(row.row_index) {
                Some(copy) => values.push(self.layout, &self.rows[copy * stride..][..stride]),
                None => values.push(self.layout, current(row.row_index)),
            }
            self.copies[row.row_index as usize] = WRITTEN;
        }
        values
    }

    fn charge(&mut self, bytes: usize) {
        self.copied_bytes += bytes as u64;
        self.budget.charge(bytes as u64);
    }

    fn copy_of(&self, row_index: u32) -> Option<usize> {
        match self.copies[row_index as usize] {
            UNTOUCHED | WRITTEN => None,
            copy => Some(copy as usize - 1),
        }
    }
}
