//! [`Frozen`]: the rows of one table of a shard as they were at a cut, while training goes on and files are written.
//!
//! A cut copies recency and nothing else. From then on a row is copied before the first time it changes or leaves, unless it
//! was written to its file before. What came after the cut, or was not touched since, is not copied.

use std::sync::Arc;

use crate::checkpoint::{TableRows, Values};
use crate::copies::Copies;
use crate::row::Layout;
use crate::simd::Portable;
use crate::table::{FREE, ShardTable};

/// In [`Frozen::place`]: the row stands where it stood.
const UNTOUCHED: u32 = 0;
/// In [`Frozen::place`]: the row is written, or on its way.
const WRITTEN: u32 = u32::MAX;

/// See the module's documentation.
pub(crate) struct Frozen {
    layout: Layout,
    len: usize,
    /// Of each slot that was in use; [`FREE`] of those that held no row.
    last_used: Vec<u32>,
    /// Of each of those: [`UNTOUCHED`], [`WRITTEN`], or 1 + its row's number among `ids` and `rows`.
    place: Vec<u32>,
    ids: Vec<u64>,
    rows: Vec<f32>,
    /// Those of the cut, once they are to change.
    waiting: Option<Vec<(u64, u32)>>,
    /// Knows of what is kept here.
    copies: Arc<Copies>,
    kept_bytes: u64,
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.copies.remove(self.kept_bytes);
    }
}

/// A row of a cut: the id comes first, so that they sort by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    id: u64,
    slot: u32,
    last_used: u32,
}

/// Which rows a cut holds of one table of a shard.
pub(crate) struct FrozenEntries {
    layout: Layout,
    entries: Vec<Entry>,
    waiting: Vec<(u64, u32)>,
}

impl FrozenEntries {
    /// Sort them; also as a checkpoint has them, but for their values.
    pub(crate) fn sorted(mut self, name: &str) -> (Vec<Entry>, TableRows) {
        self.entries.sort_unstable();
        self.waiting.sort_unstable();
        let rows = ids(name, self.layout, &self.entries, self.waiting);
        (self.entries, rows)
    }
}

impl Frozen {
    /// Bytes taken.
    pub(crate) fn memory_bytes(&self) -> usize {
        let waiting = self.waiting.as_ref().map_or(0, Vec::capacity);
        (self.last_used.capacity() + self.place.capacity() + self.rows.capacity()) * size_of::<u32>()
            + self.ids.capacity() * size_of::<u64>()
            + waiting * size_of::<(u64, u32)>()
    }

    fn count(&mut self, bytes: usize) {
        self.kept_bytes += bytes as u64;
        self.copies.add(bytes as u64);
    }

    fn kept(&self, slot: u32) -> Option<usize> {
        match self.place[slot as usize] {
            UNTOUCHED | WRITTEN => None,
            place => Some(place as usize - 1),
        }
    }
}

impl ShardTable {
    /// Keep what is held now, until it is [thawed](Self::thaw).
    pub(crate) fn freeze(&mut self, copies: &Arc<Copies>) {
        let used = &self.last_used()[..self.used_slots()];
        self.frozen = (self.len() + self.waiting.len() > 0).then(|| {
            Box::new(Frozen {
                layout: self.layout(),
                len: self.len(),
                last_used: used.to_vec(),
                place: vec![UNTOUCHED; used.len()],
                ids: Vec::new(),
                rows: Vec::new(),
                waiting: None,
                copies: Arc::clone(copies),
                kept_bytes: 0,
            })
        });
    }

    /// Forget the cut; what was kept of it is to be dropped where nobody waits.
    pub(crate) fn thaw(&mut self) -> Option<Box<Frozen>> {
        self.frozen.take()
    }

    /// Copy the row in `slot`, which is about to change or leave, if a cut needs it as it is.
    #[cold]
    #[inline(never)]
    pub(crate) fn keep(&mut self, slot: u32) {
        let Some(mut frozen) = self.frozen.take() else { return };
        let at = slot as usize;
        if frozen.place.get(at) == Some(&UNTOUCHED) && frozen.last_used[at] != FREE {
            frozen.ids.push(self.ids()[at]);
            frozen.rows.extend_from_slice(self.row(slot));
            frozen.place[at] = frozen.ids.len() as u32;
            frozen.count(size_of::<u64>() + size_of_val(self.row(slot)));
        }
        self.frozen = Some(frozen);
    }

    /// Copy the counts of ids without row, which are about to change, if a cut needs them as they are.
    pub(crate) fn keep_waiting(&mut self) {
        if let Some(frozen) = &mut self.frozen
            && frozen.waiting.is_none()
        {
            let waiting: Vec<_> = self.waiting.entries().collect();
            frozen.count(size_of_val(waiting.as_slice()));
            frozen.waiting = Some(waiting);
        }
    }

    /// The rows of the cut, and its counts, neither sorted; None where it holds neither.
    pub(crate) fn frozen_entries(&self) -> Option<FrozenEntries> {
        let frozen = self.frozen.as_deref()?;
        let held = (0..).zip(&frozen.last_used).filter(|(_, last_used)| **last_used != FREE);
        let mut entries = Vec::with_capacity(frozen.len);
        entries.extend(held.map(|(slot, last_used)| {
            let id = frozen.kept(slot).map_or_else(|| self.ids()[slot as usize], |kept| frozen.ids[kept]);
            Entry { id, slot, last_used: *last_used }
        }));
        let waiting = frozen.waiting.clone().unwrap_or_else(|| self.waiting.entries().collect());
        Some(FrozenEntries { layout: frozen.layout, entries, waiting })
    }

    /// What rows of the cut hold; they may change from now on.
    pub(crate) fn take_frozen(&mut self, entries: &[Entry]) -> Values {
        let mut values = room(self.layout(), entries.len());
        let Some(mut frozen) = self.frozen.take() else { return values };
        for entry in entries {
            let row = match frozen.kept(entry.slot) {
                Some(kept) => &frozen.rows[kept * frozen.layout.stride()..][..frozen.layout.stride()],
                None => self.row(entry.slot),
            };
            append(&mut values, frozen.layout, row);
            frozen.place[entry.slot as usize] = WRITTEN;
        }
        self.frozen = Some(frozen);
        values
    }

    /// Every row as it is now, sorted by id, and the counts of ids without row; None without either.
    pub(crate) fn export(&self, name: &str) -> Option<TableRows> {
        if self.len() + self.waiting.len() == 0 {
            return None;
        }
        let mut entries: Vec<Entry> =
            self.entries().map(|(slot, id, last_used)| Entry { id, slot, last_used }).collect();
        entries.sort_unstable();
        let mut values = room(self.layout(), entries.len());
        entries.iter().for_each(|entry| append(&mut values, self.layout(), self.row(entry.slot)));
        let mut waiting: Vec<_> = self.waiting.entries().collect();
        waiting.sort_unstable();
        let Values { weights, state } = values;
        Some(TableRows { weights, state, ..ids(name, self.layout(), &entries, waiting) })
    }
}

/// Rows as a checkpoint has them, but for their values.
fn ids(name: &str, layout: Layout, entries: &[Entry], waiting: Vec<(u64, u32)>) -> TableRows {
    let Layout { dim, state_len, .. } = layout;
    let (ids, last_used) = entries.iter().map(|entry| (entry.id, u64::from(entry.last_used))).unzip();
    TableRows { name: name.to_owned(), dim, state_len, ids, last_used, waiting, ..TableRows::default() }
}

fn room(layout: Layout, rows: usize) -> Values {
    let Layout { dim, state_len, .. } = layout;
    Values { weights: Vec::with_capacity(rows * dim), state: Vec::with_capacity(rows * state_len) }
}

fn append(to: &mut Values, layout: Layout, row: &[f32]) {
    let end = to.weights.len();
    to.weights.resize(end + layout.dim, 0.0);
    layout.read::<Portable>(row, &mut to.weights[end..]);
    to.state.extend_from_slice(&row[layout.weight_words()..]);
}
