//! [`Samples`]: the output of a transform.

use std::ops::Range;
use std::sync::Arc;

use crate::report::Report;

/// The names of the outputs of a transform, in the order of the declarations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Names {
    /// The names of the features with an embedding.
    pub slots: Vec<String>,
    /// The names of the dense columns.
    pub dense: Vec<String>,
    /// The names of the labels.
    pub labels: Vec<String>,
}

/// The ids of one feature in all rows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ids {
    /// All ids, row by row.
    pub ids: Vec<u64>,
    /// The offsets of the rows in `ids`: row `i` has `ids[offsets[i]..offsets[i + 1]]`. None means one id in
    /// every row, as determined by the declaration and not by the data.
    pub offsets: Option<Vec<u32>>,
    /// The weight of each id; None means 1 for all.
    pub weights: Option<Vec<f32>>,
}

impl Ids {
    pub(crate) fn new(single: bool, weighted: bool) -> Self {
        let offsets = if single { None } else { Some(vec![0]) };
        Self { ids: Vec::new(), offsets, weights: weighted.then(Vec::new) }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.offsets.as_ref().map_or(self.ids.len(), |offsets| offsets.len() - 1)
    }

    /// The range in `ids` of a row's ids.
    #[inline]
    pub fn bounds(&self, row: usize) -> Range<usize> {
        match &self.offsets {
            None => row..row + 1,
            Some(offsets) => offsets[row] as usize..offsets[row + 1] as usize,
        }
    }

    /// Add a row with this id or, with None, without an id. If every row has one id, `id` must be given.
    #[inline]
    pub(crate) fn push(&mut self, id: Option<u64>) {
        self.ids.extend(id);
        self.end_row();
    }

    /// End the current row.
    #[inline]
    pub(crate) fn end_row(&mut self) {
        if let Some(offsets) = &mut self.offsets {
            // If there are more ids than a u32 can count, the offsets no longer ascend, and the engine refuses them.
            offsets.push(u32::try_from(self.ids.len()).unwrap_or(u32::MAX));
        }
    }

    fn append(&mut self, other: &Self, rows: impl Iterator<Item = usize>) {
        for row in rows {
            let bounds = other.bounds(row);
            self.ids.extend_from_slice(&other.ids[bounds.clone()]);
            if let (Some(to), Some(from)) = (&mut self.weights, &other.weights) {
                to.extend_from_slice(&from[bounds]);
            }
            self.end_row();
        }
    }
}

/// The ids, floats and labels of rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples {
    pub(crate) rows: usize,
    pub(crate) names: Arc<Names>,
    /// The ids of each slot, in the order of the names.
    pub(crate) ids: Vec<Ids>,
    /// The dense inputs, row-major, with a column for each dense name.
    pub(crate) dense: Vec<f32>,
    /// The labels, in the order of their names; empty if labels were not requested.
    pub(crate) labels: Vec<Vec<f32>>,
    pub(crate) report: Report,
}

impl Samples {
    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The names of the slots, dense columns and labels.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// The ids of each slot, in the order of the names.
    pub fn ids(&self) -> &[Ids] {
        &self.ids
    }

    /// The dense columns, row-major.
    pub fn dense(&self) -> &[f32] {
        &self.dense
    }

    /// The labels, in the order of their names; empty if labels were not requested.
    pub fn labels(&self) -> &[Vec<f32>] {
        &self.labels
    }

    /// The counts of unusual values in the rows. The report of a selection of rows is empty.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Select the rows at these positions, in this order. Returns None if a position is not below the number of rows.
    pub fn take(&self, places: &[usize]) -> Option<Self> {
        places.iter().all(|place| *place < self.rows).then(|| {
            let mut taken = self.without_rows();
            taken.append(self, places.iter().copied());
            taken
        })
    }

    /// Select a range of rows. Returns None if the range exceeds the number of rows.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        (range.start <= range.end && range.end <= self.rows).then(|| {
            let mut part = self.without_rows();
            part.append(self, range);
            part
        })
    }

    /// Append all rows of other samples. Returns false, and appends nothing, if the names differ, or if
    /// only one of them has labels.
    pub fn extend(&mut self, other: &Self) -> bool {
        let same = self.names == other.names && self.labels.len() == other.labels.len();
        if same {
            self.append(other, 0..other.rows);
            self.report.add(&other.report);
        }
        same
    }

    fn without_rows(&self) -> Self {
        Self {
            rows: 0,
            names: self.names.clone(),
            ids: self.ids.iter().map(|ids| Ids::new(ids.offsets.is_none(), ids.weights.is_some())).collect(),
            dense: Vec::new(),
            labels: vec![Vec::new(); self.labels.len()],
            report: Report::default(),
        }
    }

    fn append(&mut self, other: &Self, rows: impl Iterator<Item = usize> + Clone) {
        for (to, from) in self.ids.iter_mut().zip(&other.ids) {
            to.append(from, rows.clone());
        }
        let width = self.names.dense.len();
        for (to, from) in self.labels.iter_mut().zip(&other.labels) {
            to.extend(rows.clone().map(|row| from[row]));
        }
        for row in rows {
            self.dense.extend_from_slice(&other.dense[row * width..(row + 1) * width]);
            self.rows += 1;
        }
    }
}
