//! Checks that the slots of a run are compatible with the rows of a checkpoint.

use persia_types::schema::{HashStack, Pooling, Schema, Slot};
use persia_types::tables::Run;
use pyo3::prelude::*;

use crate::checkpoint::Checkpoint;
use crate::errors;

impl Checkpoint {
    /// The errors of the slots whose vectors would differ from those on which the model was trained, although
    /// the rows are the same.
    fn other_vectors(&self, now: &Schema) -> Vec<String> {
        let saved = &self.manifest.head.run.schema;
        let table =
            |schema: &Schema, slot: &Slot| schema.tables.get(slot.table).map(|table| table.name.clone());
        let word = |pooling: Pooling| format!("{pooling:?}").to_lowercase();
        let mut lines = Vec::new();
        for slot in &now.slots {
            let Some((_, before)) = saved.slot(&slot.name) else { continue };
            let pairs = [
                ("pooling", word(before.pooling), word(slot.pooling)),
                ("sqrt_scaling", before.sqrt_scaling.to_string(), slot.sqrt_scaling.to_string()),
                ("table", table(saved, before).unwrap_or_default(), table(now, slot).unwrap_or_default()),
            ];
            lines.extend(pairs.into_iter().filter(|(_, before, now)| before != now).map(|(key, before, now)| {
                format!(
                    "{} does not fit this run: slot {} was trained with {key} {before}, but this run has {now}, so \
                     the model would get other vectors; use the same {key}",
                    self.directory.display(),
                    slot.name,
                )
            }));
        }
        lines
    }

    /// Refuse rows that would have a different meaning in this run, because a slot has a different hash stack, or
    /// combines its rows differently.
    pub(crate) fn check_slots(&self, py: Python<'_>, now: &Run) -> PyResult<()> {
        let saved = &self.manifest.head.run.schema.slots;
        let pairs = now.schema.slots.iter().filter_map(|slot| {
            Some((saved.iter().find(|saved| saved.name == slot.name)?, slot))
                .filter(|(saved, slot)| saved.hash_stack != slot.hash_stack)
        });
        let described = |stack: Option<HashStack>| {
            stack.map_or("none".to_owned(), |stack| {
                format!("{{hash_stack_rounds: {}, embedding_size: {}}}", stack.rounds, stack.buckets)
            })
        };
        let mut lines: Vec<String> = pairs
            .map(|(saved, slot)| {
                format!(
                    "{} does not fit this run: ids of slot {} were saved with hash_stack_config {}, but this run has \
                     {}, so the rows would belong to other ids; use the same hash_stack_config",
                    self.directory.display(),
                    slot.name,
                    described(saved.hash_stack),
                    described(slot.hash_stack),
                )
            })
            .collect();
        lines.extend(self.other_vectors(&now.schema));
        if lines.is_empty() {
            Ok(())
        } else {
            Err(errors::raise(py, "ForeignCheckpointError", lines.join("\n")))
        }
    }
}
