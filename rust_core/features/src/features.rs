//! [`Features`]: the declarations of features and labels, before anything is fitted.

use std::sync::Arc;

use persia_types::config::features::FeaturesConfig;
use persia_types::config::{ConfigErrors, EmbeddingConfig, Parsed};

use crate::error::TransformError;
use crate::fit::fitted::{Fitted, Needs};
use crate::rules::time;
use crate::transform::Transform;

/// The features and labels that a file declares.
#[derive(Debug, Clone, PartialEq)]
pub struct Features(pub(crate) Arc<FeaturesConfig>);

impl Features {
    /// Parse the blocks `features` and `labels` of a `persia.yml` with the given text.
    ///
    /// # Errors
    /// All errors in both blocks, with line and column.
    pub fn parse(text: &str, file: &str) -> Result<Parsed<Self>, ConfigErrors> {
        let parsed = FeaturesConfig::parse(text, file, &|name| time::zone(name).is_some())?;
        Ok(Parsed { config: Self(Arc::new(parsed.config)), warnings: parsed.warnings })
    }

    /// The declarations of the features and labels.
    pub fn config(&self) -> &FeaturesConfig {
        &self.0
    }

    /// The slots and tables of the features.
    pub fn embedding(&self) -> EmbeddingConfig {
        self.0.embedding()
    }

    /// Whether a fit must read rows. If not, it needs only the types of the columns.
    pub fn needs_rows(&self) -> bool {
        self.0.features.iter().any(|feature| Needs::of(&feature.rule).any())
    }

    /// Create the transform with these fitted values.
    ///
    /// # Errors
    /// [`TransformError::Unfitted`], with everything that is neither given nor fitted;
    /// [`TransformError::Contradiction`].
    pub fn transform(&self, fitted: Fitted) -> Result<Transform, TransformError> {
        Transform::new(self.clone(), fitted)
    }

    /// Load the JSON of a transform that was fitted for these features.
    ///
    /// # Errors
    /// [`TransformError::Invalid`] if the JSON is not a transform; [`TransformError::OtherFeatures`] if it was fitted
    /// for features that produce other ids, floats or labels; those of [`Self::transform`].
    pub fn load(&self, json: &str) -> Result<Transform, TransformError> {
        let stored = Transform::from_json(json)?;
        let differences = differences(&self.0, stored.features().config());
        if !differences.is_empty() {
            return Err(TransformError::OtherFeatures { differences });
        }
        self.transform(stored.fitted().clone())
    }
}

/// All differences that would change ids, floats or labels.
fn differences(file: &FeaturesConfig, stored: &FeaturesConfig) -> Vec<String> {
    let mut all = Vec::new();
    let names = |config: &FeaturesConfig| -> Vec<String> {
        let features = config.features.iter().map(|feature| feature.name.clone());
        features.chain(config.labels.iter().map(|label| label.name.clone())).collect()
    };
    for feature in &file.features {
        match stored.feature(&feature.name) {
            None => all.push(format!("`{}` is new", feature.name)),
            Some(known) if known.rule != feature.rule => all.push(format!("`{}` has changed", feature.name)),
            Some(known) if known.slot.is_some() != feature.slot.is_some() => {
                let change = if feature.slot.is_some() {
                    "has an embedding, but had none"
                } else {
                    "has no embedding, but had one"
                };
                all.push(format!("`{}` {change}", feature.name));
            }
            Some(_) => {}
        }
    }
    for label in &file.labels {
        match stored.labels.iter().find(|known| known.name == label.name) {
            None => all.push(format!("the label `{}` is new", label.name)),
            Some(known) if (&known.column, &known.target) != (&label.column, &label.target) => {
                all.push(format!("the label `{}` has changed", label.name));
            }
            Some(_) => {}
        }
    }
    let (here, there) = (names(file), names(stored));
    all.extend(there.iter().filter(|name| !here.contains(name)).map(|name| format!("`{name}` is missing")));
    if all.is_empty() && here != there {
        all.push("the order of the features or labels has changed".into());
    }
    all
}
