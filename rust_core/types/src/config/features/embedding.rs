//! The embedding configuration that features imply.

use super::{Feature, FeatureSlot, FeaturesConfig, Rule};
use crate::config::{ConfigErrors, EmbeddingConfig, Parsed};
use crate::schema::{Schema, Slot, Table};

impl FeaturesConfig {
    /// Parse the text of `file`, a `persia.yml`, and return the embedding configuration that its features imply.
    /// Servers and middlewares do not transform data, so they need only this configuration.
    ///
    /// # Errors
    /// All errors in the features and labels, except in the names of time zones.
    pub fn parse_embedding(text: &str, file: &str) -> Result<Parsed<EmbeddingConfig>, ConfigErrors> {
        let parsed = Self::parse(text, file, &|_| true)?;
        Ok(Parsed { config: parsed.config.embedding(), warnings: parsed.warnings })
    }

    /// The slots and tables of the features, in the order of the file, as an equivalent `embedding_config.yml` would
    /// define them.
    pub fn embedding(&self) -> EmbeddingConfig {
        let mut schema = Schema::default();
        for (feature, slot) in self.slots() {
            let known = schema.tables.iter().position(|table| table.name == slot.table);
            let table = known.unwrap_or(schema.tables.len());
            if known.is_none() {
                schema.tables.push(Table { settings: slot.settings, ..Table::new(&slot.table, slot.dim) });
            }
            let sample_fixed_size = match &feature.rule {
                Rule::Sequence(sequence) => Some(sequence.last),
                _ => None,
            };
            let name = feature.name.clone();
            schema.slots.push(Slot {
                name,
                table,
                pooling: slot.pooling,
                sample_fixed_size,
                ..Slot::default()
            });
        }
        // Ids keep all 64 bits, so there are no prefix bits to check.
        EmbeddingConfig { feature_index_prefix_bit: 0, schema }
    }

    /// The features that have a slot, each with its slot.
    pub fn slots(&self) -> impl Iterator<Item = (&Feature, &FeatureSlot)> {
        self.features.iter().filter_map(|feature| Some((feature, feature.slot.as_ref()?)))
    }
}
