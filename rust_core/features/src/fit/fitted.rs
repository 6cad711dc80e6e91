//! The values that a fit computes.

use std::collections::BTreeMap;

use persia_types::config::features::{Boundaries, Clip, Dense, Feature, Missing, Rule, Scaling, ValueType};
use serde::{Deserialize, Serialize};

use crate::input::schema::id_column;

/// The fitted values of all features. Features that need none are omitted.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fitted {
    /// The fitted values by the name of the feature.
    pub features: BTreeMap<String, FittedFeature>,
}

/// The fitted values of one feature, without the values that are declared in the file.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FittedFeature {
    /// The type of the values that become ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<ValueType>,
    /// The boundaries of a bucket feature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boundaries: Option<Vec<f32>>,
    /// The smallest and the largest number of a bucket feature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<(f32, f32)>,
    /// The limits of `clip` of a dense feature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip: Option<(f32, f32)>,
    /// The number that replaces a missing number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<f32>,
    /// The mean and the standard deviation, after clip and log1p.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standardise: Option<(f64, f64)>,
    /// The smallest and largest number, after clip and log1p.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_max: Option<(f32, f32)>,
}

/// The statistics of the training data that a feature needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Needs {
    /// Whether the feature needs the mean, the standard deviation, and the smallest and largest number.
    pub(crate) moments: bool,
    /// Whether the feature needs quantiles.
    pub(crate) histogram: bool,
}

impl Needs {
    pub(crate) fn of(rule: &Rule) -> Self {
        match rule {
            Rule::Bucket(bucket) => {
                let fitted = matches!(bucket.boundaries, Boundaries::Quantiles(_));
                Self { moments: fitted, histogram: fitted }
            }
            Rule::Dense(dense) => {
                let clips = matches!(dense.clip, Clip::Quantiles(..));
                Self {
                    moments: clips || scales(dense) || dense.missing == Missing::Mean,
                    histogram: clips || dense.missing == Missing::Median,
                }
            }
            _ => Self::default(),
        }
    }

    pub(crate) fn any(self) -> bool {
        self.moments || self.histogram
    }
}

fn scales(dense: &Dense) -> bool {
    matches!(dense.scaling, Scaling::Standardise(None) | Scaling::MinMax(None))
}

impl FittedFeature {
    /// The names of the values that the feature lacks.
    pub(crate) fn lacks(&self, feature: &Feature) -> Vec<&'static str> {
        let mut lacks = Vec::new();
        let mut need = |needed: bool, found: bool, what| {
            if needed && !found {
                lacks.push(what);
            }
        };
        if let Some(column) = id_column(&feature.rule) {
            need(column.values.is_none(), self.values.is_some(), "`values` (integer or string)");
        }
        match &feature.rule {
            Rule::Bucket(bucket) => {
                let fitted = matches!(bucket.boundaries, Boundaries::Quantiles(_));
                need(fitted, self.boundaries.is_some() && self.range.is_some(), "quantiles");
            }
            Rule::Dense(dense) => {
                let missing = matches!(dense.missing, Missing::Mean | Missing::Median);
                need(missing, self.missing.is_some(), "value for missing numbers");
                need(matches!(dense.clip, Clip::Quantiles(..)), self.clip.is_some(), "quantiles of `clip`");
                let standardise = dense.scaling == Scaling::Standardise(None);
                need(standardise, self.standardise.is_some(), "mean and standard deviation");
                need(
                    dense.scaling == Scaling::MinMax(None),
                    self.min_max.is_some(),
                    "smallest and largest number",
                );
            }
            _ => {}
        }
        lacks
    }
}
