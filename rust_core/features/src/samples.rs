//! [`Samples`]: what a transform makes of rows.

use std::ops::Range;
use std::sync::Arc;

use crate::report::Report;

/// The names of what a transform makes, in the order of the declarations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Names {
    /// Of the features with an embedding.
    pub slots: Vec<String>,
    /// Of the dense columns.
    pub dense: Vec<String>,
    /// Of the labels.
    pub labels: Vec<String>,
}

/// The ids of one feature for every row.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ids {
    /// All ids, row after row.
    pub ids: Vec<u64>,
    /// Row `i` has `ids[offsets[i]..offsets[i + 1]]`; None means one id in every row, which the declaration decides, not
    /// the data.
    pub offsets: Option<Vec<u32>>,
    /// One for each id; None means 1 for all.
    pub weights: Option<Vec<f32>>,
}

impl Ids {
    pub(crate) fn new(single: bool, weighted: bool) -> Self {
        let offsets = if single { None } else { Some(vec![0]) };
        Self { ids: Vec::new(), offsets, weights: weighted.then(Vec::new) }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.offsets.as_ref().map_or(self.ids.len(), |offsets| offsets.len() - 1)
    }

    /// The places in `ids` of a row's.
    #[inline]
    pub fn bounds(&self, row: usize) -> Range<usize> {
        match &self.offsets {
            None => row..row + 1,
            Some(offsets) => offsets[row] as usize..offsets[row + 1] as usize,
        }
    }

    /// A row with this id, or without any. With one id in every row, `id` is given.
    #[inline]
    pub(crate) fn push(&mut self, id: Option<u64>) {
        self.ids.extend(id);
        self.end_row();
    }

    /// The row is whole.
    #[inline]
    pub(crate) fn end_row(&mut self) {
        if let Some(offsets) = &mut self.offsets {
            // The engine refuses more ids than a u32 counts: offsets that do not ascend.
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

/// Ids, floats and labels of rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples {
    pub(crate) rows: usize,
    pub(crate) names: Arc<Names>,
    /// In the order of the slots' names.
    pub(crate) ids: Vec<Ids>,
    /// Row-major, a column for each dense name.
    pub(crate) dense: Vec<f32>,
    /// In the order of the labels' names; empty without labels.
    pub(crate) labels: Vec<Vec<f32>>,
    pub(crate) report: Report,
}

impl Samples {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The names of its parts.
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

    /// Each label, in the order of the names; empty if labels were not asked for.
    pub fn labels(&self) -> &[Vec<f32>] {
        &self.labels
    }

    /// What was unusual about the rows. Parts of samples have an empty one.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The rows at these places, in this order; None if a place is not below the number of rows.
    pub fn take(&self, places: &[usize]) -> Option<Self> {
        places.iter().all(|place| *place < self.rows).then(|| {
            let mut taken = self.without_rows();
            taken.append(self, places.iter().copied());
            taken
        })
    }

    /// The rows of a range; None if it is not inside the rows.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        (range.start <= range.end && range.end <= self.rows).then(|| {
            let mut part = self.without_rows();
            part.append(self, range);
            part
        })
    }

    /// Append all rows of other samples; false if they have other parts.
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
