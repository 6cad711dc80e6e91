//! The memory limit: the same traffic with the place of every row known.

use crate::machine::{on_huge_pages, prefetch};

/// Rows in one array.
pub(crate) struct RawRows {
    values: Vec<f32>,
    stride: usize,
}

impl RawRows {
    pub(crate) fn new(rows: usize, stride: usize) -> Self {
        Self { values: on_huge_pages(rows * stride), stride }
    }

    fn row(&self, slot: u32) -> &[f32] {
        &self.values[slot as usize * self.stride..][..self.stride]
    }

    /// Copy the first `dim` floats of every slot's row.
    pub(crate) fn gather(&self, slots: &[u32], out: &mut [f32], dim: usize) {
        let ahead = ahead(dim);
        slots.iter().take(ahead).for_each(|slot| prefetch(&self.row(*slot)[..dim]));
        for (at, (slot, out)) in slots.iter().zip(out.chunks_exact_mut(dim)).enumerate() {
            if let Some(next) = slots.get(at + ahead) {
                prefetch(&self.row(*next)[..dim]);
            }
            for (out, block) in
                out.as_chunks_mut::<16>().0.iter_mut().zip(self.row(*slot)[..dim].as_chunks::<16>().0)
            {
                *out = *block;
            }
        }
    }

    /// Add a gradient to the weights, and to every part of the state as long as they are.
    pub(crate) fn update(&mut self, slots: &[u32], gradients: &[f32], dim: usize) {
        let ahead = ahead(self.stride) / 2;
        slots.iter().take(ahead).for_each(|slot| prefetch(self.row(*slot)));
        for (at, (slot, gradient)) in slots.iter().zip(gradients.chunks_exact(dim)).enumerate() {
            if let Some(next) = slots.get(at + ahead) {
                prefetch(self.row(*next));
            }
            let row = &mut self.values[*slot as usize * self.stride..][..self.stride];
            for part in row.chunks_mut(dim) {
                for (value, gradient) in part.iter_mut().zip(gradient) {
                    *value += *gradient;
                }
            }
        }
    }
}

/// Rows that are asked for in advance: 16 KiB of them.
fn ahead(floats: usize) -> usize {
    (4096 / floats).clamp(8, 64)
}
