//! [`Report`]: counts of unusual values for each feature.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Serialize, Serializer};

/// The kind of an unusual value. Each kind is counted separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(usize)]
pub enum Unusual {
    /// The value is null.
    Null,
    /// The string is empty.
    Empty,
    /// The column or the key of a record is missing.
    Missing,
    /// The number or the scaled number is NaN, infinite, or beyond the range of f32.
    NotFinite,
    /// The type of the value differs from that of the feature.
    WrongType,
    /// The number is outside the range of the training data, or of a given `min_max`.
    OutOfRange,
    /// The row has more ids than the sequence keeps.
    Truncated,
    /// The id has no row, usually because it did not occur in training. The caller of the look-up counts
    /// these ids with [`Report::add_unseen`].
    Unseen,
}

impl Unusual {
    /// All kinds of unusual values.
    pub const ALL: [Self; 8] = [
        Self::Null,
        Self::Empty,
        Self::Missing,
        Self::NotFinite,
        Self::WrongType,
        Self::OutOfRange,
        Self::Truncated,
        Self::Unseen,
    ];

    /// The name of this kind in reports.
    pub fn word(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Empty => "empty",
            Self::Missing => "missing",
            Self::NotFinite => "not_finite",
            Self::WrongType => "wrong_type",
            Self::OutOfRange => "out_of_range",
            Self::Truncated => "truncated",
            Self::Unseen => "unseen",
        }
    }
}

/// One count for each kind of [`Unusual`].
pub(crate) type Counts = [u64; Unusual::ALL.len()];

/// The counts of unusual values for each feature and label.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    rows: u64,
    names: Arc<Vec<String>>,
    counts: Vec<Counts>,
}

impl Report {
    pub(crate) fn new(names: Arc<Vec<String>>) -> Self {
        let counts = vec![Counts::default(); names.len()];
        Self { rows: 0, names, counts }
    }

    /// The number of rows that were transformed.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The count of `what` for the feature or label `name`; 0 if neither exists.
    pub fn count(&self, name: &str, what: Unusual) -> u64 {
        self.index(name).map_or(0, |index| self.counts[index][what as usize])
    }

    /// The nonzero counts, by feature or label, and then by the name of the kind.
    pub fn counts(&self) -> BTreeMap<&str, BTreeMap<&'static str, u64>> {
        let above_zero = |counts: &Counts| -> BTreeMap<_, _> {
            let all = Unusual::ALL.into_iter().map(|what| (what.word(), counts[what as usize]));
            all.filter(|(_, count)| *count > 0).collect()
        };
        let all = self.names.iter().map(String::as_str).zip(self.counts.iter().map(above_zero));
        all.filter(|(_, counts)| !counts.is_empty()).collect()
    }

    /// Add the counts of another report. Names that this report does not have are added too.
    pub fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        for (position, (name, counts)) in other.names.iter().zip(&other.counts).enumerate() {
            let known = self.names.get(position).is_some_and(|known| known == name);
            let index = if known { Some(position) } else { self.index(name) };
            let index = index.unwrap_or_else(|| {
                Arc::make_mut(&mut self.names).push(name.clone());
                self.counts.push(Counts::default());
                self.counts.len() - 1
            });
            for (sum, count) in self.counts[index].iter_mut().zip(counts) {
                *sum += count;
            }
        }
    }

    /// Count the ids of a feature for which the look-up found no row. This has no effect if the feature is
    /// unknown.
    pub fn add_unseen(&mut self, name: &str, ids: u64) {
        if let Some(index) = self.index(name) {
            self.counts[index][Unusual::Unseen as usize] += ids;
        }
    }

    pub(crate) fn add_rows(&mut self, rows: usize) {
        self.rows += rows as u64;
    }

    pub(crate) fn add_counts(&mut self, index: usize, counts: &Counts) {
        for (sum, count) in self.counts[index].iter_mut().zip(counts) {
            *sum += count;
        }
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|known| known == name)
    }
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Fields<'a> {
            rows: u64,
            counts: BTreeMap<&'a str, BTreeMap<&'static str, u64>>,
        }
        Fields { rows: self.rows, counts: self.counts() }.serialize(serializer)
    }
}

/// The counts of one feature or label in one batch, and the first value that strict mode refuses.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) counts: Counts,
    /// The row in the batch and the error of the first value that strict mode refuses.
    pub(crate) first_wrong: Option<(usize, String)>,
}

impl Tally {
    #[inline]
    pub(crate) fn count(&mut self, what: Unusual) {
        self.counts[what as usize] += 1;
    }

    /// Add another tally. Its first wrong value is kept only if this tally has none.
    pub(crate) fn add(&mut self, other: Self) {
        for (sum, count) in self.counts.iter_mut().zip(other.counts) {
            *sum += count;
        }
        self.first_wrong = self.first_wrong.take().or(other.first_wrong);
    }

    /// Record a value that strict mode refuses.
    #[cold]
    pub(crate) fn wrong(&mut self, row: usize, message: impl FnOnce() -> String) {
        self.count(Unusual::WrongType);
        self.first_wrong.get_or_insert_with(|| (row, message()));
    }
}
