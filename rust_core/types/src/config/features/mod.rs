//! The blocks `features` and `labels` of `persia.yml`: how columns of data become ids, floats and labels, and the slots
//! and tables of the ids.
//!
//! * [`FeaturesConfig`]: both blocks, parsed and validated
//! * [`Rule`]: how the column of a feature becomes ids or floats
//! * [`FeaturesConfig::embedding`]: the embedding configuration that the features imply
//!
//! The other blocks of the file are not checked here.

mod checks;
mod embedding;
mod labels;
mod numbers;
mod read;
mod rules;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::Parsed;
use super::error::ConfigErrors;
use super::reader::Reader;
use crate::schema::{Pooling, TableSettings};

pub use rules::{
    Bag, Boundaries, Bucket, Clip, Cross, Date, DatePart, Dense, Epoch, IdColumn, IfEmpty, IfMissing, IfNull,
    Label, Loss, Missing, Rule, Scaling, Sequence, Target, ValueType,
};

/// The maximum number of boundaries of a bucket feature.
pub const MAX_BOUNDARIES: usize = 65_536;
/// The maximum number of parts of a cross.
pub const MAX_CROSS_PARTS: usize = 8;

/// The features and labels of a valid `persia.yml`, in the order of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeaturesConfig {
    /// The features. At least one has a slot.
    pub features: Vec<Feature>,
    /// The labels. There is at least one.
    pub labels: Vec<Label>,
}

/// One feature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feature {
    /// The key in the file, which is the name of the slot or of the dense column.
    pub name: String,
    /// The line of the key; 0 if the feature was not read from a file.
    #[serde(skip)]
    pub line: usize,
    /// How the feature's column becomes ids or floats.
    pub rule: Rule,
    /// The slot of a feature with ids. None for a dense feature, and for a feature with `dim: 0`, which is only a part
    /// of crosses.
    pub slot: Option<FeatureSlot>,
}

/// The slot of a feature with ids, and the table of the slot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureSlot {
    /// The number of weights in a row.
    pub dim: usize,
    /// The name of the table. Features with equal names share rows.
    pub table: String,
    /// The pooling of a bag, or of a cross with a bag.
    pub pooling: Pooling,
    /// The settings of the table.
    pub settings: TableSettings,
}

impl FeaturesConfig {
    /// Read and validate the blocks `features` and `labels` of the text of `file`. `is_time_zone` returns whether a
    /// name is in the IANA database.
    ///
    /// # Errors
    /// All errors in both blocks.
    pub fn parse(
        text: &str,
        file: &str,
        is_time_zone: &dyn Fn(&str) -> bool,
    ) -> Result<Parsed<Self>, ConfigErrors> {
        Reader::read(text, file, |reader, root| read::read(reader, root, is_time_zone))
    }

    /// The feature called `name`.
    pub fn feature(&self, name: &str) -> Option<&Feature> {
        self.features.iter().find(|feature| feature.name == name)
    }

    /// The columns that the features need and, with `labels`, those that the labels need. Each column occurs once, in
    /// the order of the file.
    pub fn columns(&self, labels: bool) -> Vec<&str> {
        let labels = self.labels.iter().filter(|_| labels).map(|label| label.column.as_str());
        let mut seen = std::collections::HashSet::new();
        let columns = self.features.iter().flat_map(|feature| feature.rule.columns()).chain(labels);
        columns.filter(|column| seen.insert(*column)).collect()
    }
}
