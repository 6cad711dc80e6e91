//! The immutable context of look-ups and pushes.

use std::sync::Arc;

use persia_types::schema::Schema;
use persia_types::tables::Tables;
use persia_types::token::{JobId, Token};

use crate::buffer::BufferPool;
use crate::device::Device;
use crate::options::EngineOptions;

/// The tables, the memory and the token fields of one engine.
pub(crate) struct Context {
    pub(crate) tables: Arc<dyn Tables>,
    pub(crate) schema: Schema,
    pub(crate) buffers: Arc<BufferPool>,
    pub(crate) gradient_scale: f32,
    /// The device that pools instead of the CPU.
    pub(crate) device: Option<Arc<dyn Device>>,
    job: JobId,
    generation: u64,
    rank: u32,
}

impl Context {
    pub(crate) fn new(
        tables: Arc<dyn Tables>,
        schema: Schema,
        options: &EngineOptions,
        device: Option<Arc<dyn Device>>,
    ) -> Self {
        // A step uses buffers for the outputs and divisors of every slot, and for the rows of every table.
        let buffers = 2 * (options.staleness + 2) * schema.slots.len() + 4 * schema.tables.len();
        Self {
            tables,
            schema,
            buffers: BufferPool::new(buffers),
            gradient_scale: options.gradient_scale,
            device,
            job: JobId::from_name(&options.job),
            generation: options.generation,
            rank: options.rank,
        }
    }

    /// The rank's token of step `seq`.
    pub(crate) fn token(&self, seq: u64) -> Token {
        Token { job: self.job, generation: self.generation, rank: self.rank, seq }
    }

    /// The number of floats in a row of this table.
    pub(crate) fn dim(&self, table: usize) -> usize {
        self.schema.tables[table].dim
    }

    /// The number of floats in a row of this slot.
    pub(crate) fn dim_of_slot(&self, slot: usize) -> usize {
        self.dim(self.schema.slots[slot].table)
    }
}
