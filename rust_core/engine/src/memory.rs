//! Memory that is reused, because page faults on newly allocated megabytes cost more than the work on them.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use persia_types::id::Id;

/// The minimum capacity of vectors that are reused. Smaller ones are left to the allocator.
const MIN_REUSED: usize = 1024;

/// Free vectors, by capacity. Their number is bounded.
#[derive(Debug)]
pub(crate) struct FreeList<T> {
    by_capacity: BTreeMap<usize, Vec<Vec<T>>>,
    count: usize,
    max: usize,
}

impl<T: Copy + Default> FreeList<T> {
    pub(crate) fn new(max: usize) -> Self {
        Self { by_capacity: BTreeMap::new(), count: 0, max }
    }

    /// Take a vector of `len` elements with unspecified content. This is the smallest free vector that fits.
    /// If that vector is more than twice as large as needed, a new one is allocated.
    pub(crate) fn take(&mut self, len: usize) -> Vec<T> {
        // Round up, so that vectors are reused if sizes differ slightly between batches.
        let wanted = len.next_multiple_of(MIN_REUSED);
        let found = self.by_capacity.range_mut(wanted..=wanted * 2).next();
        let mut vector = match found {
            None => Vec::with_capacity(if len < MIN_REUSED { len } else { wanted }),
            Some((&capacity, list)) => {
                let vector = list.pop().unwrap_or_default();
                if list.is_empty() {
                    self.by_capacity.remove(&capacity);
                }
                self.count -= 1;
                vector
            }
        };
        vector.resize(len, T::default());
        vector
    }

    /// Take back a vector for reuse. If there are too many free vectors, the smallest is dropped, because it is the
    /// cheapest to allocate.
    pub(crate) fn put(&mut self, vector: Vec<T>) {
        if vector.capacity() < MIN_REUSED || self.max == 0 {
            return;
        }
        if self.count == self.max {
            let Some(mut smallest) = self.by_capacity.first_entry() else { return };
            if *smallest.key() >= vector.capacity() {
                return;
            }
            smallest.get_mut().pop();
            if smallest.get().is_empty() {
                smallest.remove();
            }
            self.count -= 1;
        }
        self.by_capacity.entry(vector.capacity()).or_default().push(vector);
        self.count += 1;
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

/// The free vectors of id features.
#[derive(Debug)]
pub(crate) struct FeatureMemory {
    places: Mutex<FreeList<u32>>,
    ids: Mutex<FreeList<Id>>,
    weights: Mutex<FreeList<f32>>,
}

impl Default for FeatureMemory {
    /// Create lists with room for the vectors of several hundred features, or of about twenty large batches.
    fn default() -> Self {
        Self {
            places: Mutex::new(FreeList::new(4096)),
            ids: Mutex::new(FreeList::new(1024)),
            weights: Mutex::new(FreeList::new(2048)),
        }
    }
}

impl FeatureMemory {
    /// Take a vector of `len` indices with unspecified values.
    pub(crate) fn places(&self, len: usize) -> Vec<u32> {
        self.places.lock().take(len)
    }

    /// Copy `places` into a reused vector.
    pub(crate) fn copy_places(&self, places: &[u32]) -> Vec<u32> {
        let mut copy = self.places(places.len());
        copy.copy_from_slice(places);
        copy
    }

    /// Copy `ids` into a reused vector.
    pub(crate) fn copy_ids(&self, ids: &[Id]) -> Vec<Id> {
        let mut copy = self.ids.lock().take(ids.len());
        copy.copy_from_slice(ids);
        copy
    }

    /// Take a vector of `len` weights with unspecified values.
    pub(crate) fn weights(&self, len: usize) -> Vec<f32> {
        self.weights.lock().take(len)
    }

    pub(crate) fn put_places(&self, places: Vec<u32>) {
        self.places.lock().put(places);
    }

    pub(crate) fn put(
        &self,
        places: impl IntoIterator<Item = Vec<u32>>,
        ids: Vec<Id>,
        weights: impl IntoIterator<Item = Vec<f32>>,
    ) {
        self.ids.lock().put(ids);
        let mut free = self.places.lock();
        places.into_iter().for_each(|places| free.put(places));
        drop(free);
        let mut free = self.weights.lock();
        weights.into_iter().for_each(|weights| free.put(weights));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_come_back_if_they_fit() {
        let mut free = FreeList::<u32>::new(4);
        let vector = free.take(5000);
        let place = vector.as_ptr();
        free.put(vector);
        let small = free.take(2000); // less than half the size, so it is not reused
        assert_ne!(small.as_ptr(), place);
        let again = free.take(4900);
        assert_eq!((again.as_ptr(), again.len()), (place, 4900));
        assert_eq!(free.count(), 0);
    }

    #[test]
    fn the_number_of_free_vectors_is_bounded_and_the_largest_stay() {
        let mut free = FreeList::<u8>::new(2);
        for kilo in [3, 1, 9, 2, 7] {
            free.put(vec![0; kilo * 1024]);
        }
        free.put(vec![0; 10]);
        assert_eq!(free.count(), 2);
        assert_eq!(free.take(9 * 1024).capacity(), 9 * 1024);
        assert_eq!(free.take(7 * 1024).capacity(), 7 * 1024);
    }
}
