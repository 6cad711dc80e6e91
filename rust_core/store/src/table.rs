//! [`ShardTable`]: the rows of one table in one shard.
//!
//! The row of a slot lies at `slot * stride` of one region. Its id and its recency stand apart, so that a row never touches
//! a cache line more than it must, and apart from each other: a look-up only notes recency, and of that sixteen slots share
//! a line.

use persia_types::id::hash_id;
use persia_types::limits::MAX_ROWS_PER_SLAB;

use crate::frozen::Frozen;
use crate::index::{Index, NO_SLOT};
use crate::memory::{OutOfMemory, Region};
use crate::row::Layout;
use crate::simd::Lanes;

/// Recency of a free slot, as every id is a legal one.
pub(crate) const FREE: u32 = 0;

/// See the module's documentation.
pub(crate) struct ShardTable {
    layout: Layout,
    pub(crate) index: Index,
    rows: Region<f32>,
    /// Whose row each slot holds; of a free slot the next free one.
    ids: Region<u64>,
    /// Step of the last training look-up of each slot, from 1; [`FREE`] marks a free one.
    last_used: Region<u32>,
    /// Slots ever used; free ones among them are chained.
    used: u32,
    first_free: u32,
    /// Slots below this one lie in memory that is settled already.
    settled: u32,
    len: usize,
    /// Ids without a row that were asked for in training, each with the number of look-ups in place of a slot.
    pub(crate) waiting: Index,
    /// What a cut holds, while it is written.
    pub(crate) frozen: Option<Box<Frozen>>,
}

impl ShardTable {
    /// No rows, no memory.
    pub(crate) fn new(layout: Layout) -> Self {
        Self {
            layout,
            index: Index::new(),
            rows: Region::new(),
            ids: Region::new(),
            last_used: Region::new(),
            used: 0,
            first_free: NO_SLOT,
            settled: 0,
            len: 0,
            waiting: Index::new(),
            frozen: None,
        }
    }

    /// Keep rows in another way from now on; there are none.
    pub(crate) fn adopt(&mut self, layout: Layout) {
        debug_assert_eq!(self.len, 0);
        let waiting = std::mem::replace(&mut self.waiting, Index::new());
        let frozen = self.frozen.take();
        *self = Self { waiting, frozen, ..Self::new(layout) };
    }

    /// How rows are kept.
    #[inline(always)]
    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Rows held.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of weights and state held.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.len * self.layout.payload_bytes()
    }

    /// Bytes the system had to find for this table.
    pub(crate) fn memory_bytes(&self) -> usize {
        let used = self.used as usize;
        size_of::<Self>()
            + self.index.memory_bytes()
            + self.waiting.memory_bytes()
            + self.frozen.as_ref().map_or(0, |frozen| frozen.memory_bytes())
            + self.rows.resident_bytes(used * self.layout.stride())
            + self.ids.resident_bytes(used)
            + self.last_used.resident_bytes(used)
    }

    /// Slots that hold a row, or have held one.
    pub(crate) fn used_slots(&self) -> usize {
        self.used as usize
    }

    /// All rows one after another, for prefetching at `slot * stride`.
    #[inline(always)]
    pub(crate) fn rows(&self) -> &[f32] {
        &self.rows
    }

    /// Of each slot, for prefetching.
    #[inline(always)]
    pub(crate) fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// As [`ShardTable::ids`].
    #[inline(always)]
    pub(crate) fn last_used(&self) -> &[u32] {
        &self.last_used
    }

    /// The row in a slot: weights, then state.
    #[inline(always)]
    pub(crate) fn row(&self, slot: u32) -> &[f32] {
        let stride = self.layout.stride();
        &self.rows[slot as usize * stride..][..stride]
    }

    /// As [`ShardTable::row`], to change.
    #[inline(always)]
    pub(crate) fn row_mut(&mut self, slot: u32) -> &mut [f32] {
        let stride = self.layout.stride();
        &mut self.rows[slot as usize * stride..][..stride]
    }

    /// Whether `slot` holds the row of `id`, for a slot remembered from an earlier look-up.
    #[inline(always)]
    pub(crate) fn holds(&self, slot: u32, id: u64) -> bool {
        self.ids.get(slot as usize) == Some(&id) && self.last_used[slot as usize] != FREE
    }

    /// The slot of `id`, else [`NO_SLOT`].
    #[inline(always)]
    pub(crate) fn find<L: Lanes>(&self, id: u64) -> u32 {
        self.index.find::<L>(id, hash_id(id))
    }

    /// Whether the row in a slot, which holds one, was used at `oldest` or since.
    #[inline(always)]
    pub(crate) fn is_alive(&self, slot: u32, oldest: u32) -> bool {
        oldest == 0 || self.last_used[slot as usize] >= oldest
    }

    /// Note a use of `slot`. Steps of several ranks may arrive out of order; the latest counts.
    #[inline(always)]
    pub(crate) fn touch(&mut self, slot: u32, step: u32) {
        let last_used = &mut self.last_used[slot as usize];
        *last_used = step.max(*last_used);
    }

    /// Make room for `rows` more at once; they will all be added now.
    pub(crate) fn reserve(&mut self, rows: usize) -> Result<(), OutOfMemory> {
        let slots = self.used as usize + rows;
        self.index.reserve_for(self.len + rows)?;
        self.rows.grow_filled(slots * self.layout.stride())?;
        self.ids.grow_filled(slots)?;
        self.last_used.grow_filled(slots)?;
        self.settled = slots as u32;
        Ok(())
    }

    /// Add the row of an id that has none, as `fill` writes it. On failure nothing has changed.
    pub(crate) fn insert(
        &mut self,
        id: u64,
        last_used: u32,
        fill: impl FnOnce(&mut [f32]),
    ) -> Result<u32, OutOfMemory> {
        self.index.reserve()?;
        let slot = self.take_slot()?;
        fill(self.row_mut(slot));
        self.ids[slot as usize] = id;
        self.last_used[slot as usize] = last_used;
        self.index.insert(id, hash_id(id), slot);
        self.len += 1;
        Ok(slot)
    }

    /// Drop the row of `id`, which must have one.
    pub(crate) fn remove(&mut self, id: u64) {
        let slot = self.index.remove(id, hash_id(id));
        debug_assert!(self.holds(slot, id));
        if self.frozen.is_some() {
            self.keep(slot);
        }
        self.ids[slot as usize] = u64::from(self.first_free);
        self.last_used[slot as usize] = FREE;
        self.first_free = slot;
        self.len -= 1;
    }

    /// Every row's `(slot, id, last_used)`, in the order of slots.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u32, u64, u32)> {
        let used = self.ids[..self.used as usize].iter().zip(self.last_used.iter());
        (0..)
            .zip(used)
            .filter(|(_, (_, last_used))| **last_used != FREE)
            .map(|(slot, (id, last_used))| (slot, *id, *last_used))
    }

    fn take_slot(&mut self) -> Result<u32, OutOfMemory> {
        if self.first_free != NO_SLOT {
            let slot = self.first_free;
            self.first_free = self.ids[slot as usize] as u32;
            return Ok(slot);
        }
        let (slot, stride) = (self.used as usize, self.layout.stride());
        if slot >= MAX_ROWS_PER_SLAB {
            return Err(OutOfMemory { bytes: stride * size_of::<f32>() });
        }
        self.rows.grow((slot + 1) * stride)?;
        self.ids.grow(slot + 1)?;
        self.last_used.grow(slot + 1)?;
        if slot >= self.settled as usize {
            self.rows.settle(slot * stride, (slot + 1) * stride);
            self.ids.settle(slot, slot + 1);
            self.last_used.settle(slot, slot + 1);
        }
        self.used += 1;
        Ok(slot as u32)
    }
}

#[cfg(test)]
mod tests {
    use persia_types::Dtype;

    use super::*;
    use crate::simd::Portable;

    fn table() -> ShardTable {
        ShardTable::new(Layout { dim: 3, dtype: Dtype::F32, state_len: 2, ttl: None })
    }

    #[test]
    fn a_freed_slot_is_used_again_and_never_mistaken_for_the_old_row() {
        let mut table = table();
        for id in [5, 0, u64::MAX] {
            table.insert(id, 1, |row| row.fill(id as f32)).unwrap();
        }
        let slot = table.find::<Portable>(0);
        table.remove(0);
        assert!(!table.holds(slot, 0));
        assert_eq!(table.find::<Portable>(0), NO_SLOT);
        assert_eq!(table.insert(9, 2, |row| row.fill(9.0)).unwrap(), slot);
        assert!(table.holds(slot, 9) && !table.holds(slot, 0) && !table.holds(NO_SLOT, 9));
        assert_eq!(table.entries().map(|(_, id, _)| id).collect::<Vec<_>>(), [5, 9, u64::MAX]);
        assert_eq!(table.row(table.find::<Portable>(5)), [5.0; 5]);
    }

    #[test]
    fn a_chain_of_free_slots_is_taken_up_whole() {
        let mut table = table();
        for id in 0..100 {
            table.insert(id, 1, |row| row.fill(0.0)).unwrap();
        }
        for id in 0..100 {
            table.remove(id);
        }
        for id in 100..200 {
            table.insert(id, 1, |row| row.fill(id as f32)).unwrap();
        }
        assert_eq!((table.used, table.len()), (100, 100));
        assert!((100..200).all(|id| table.row(table.find::<Portable>(id)) == [id as f32; 5]));
    }

    #[test]
    fn a_late_look_up_does_not_make_a_row_older() {
        let mut table = table();
        let slot = table.insert(1, 8, |row| row.fill(0.0)).unwrap();
        table.touch(slot, 5);
        assert_eq!(table.entries().next().unwrap().2, 8);
    }
}
