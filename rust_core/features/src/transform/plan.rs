//! [`Plan`]: the compiled declarations.

use std::sync::Arc;

use persia_types::config::features::{
    Boundaries, Clip, Dense, Feature, FeaturesConfig, Missing, Rule, Scaling, ValueType,
};

use crate::error::TransformError;
use crate::fit::fitted::{Fitted, FittedFeature};
use crate::hash::IdHasher;
use crate::input::cell::Source;
use crate::input::schema::id_column;
use crate::report::Tally;
use crate::rules::ids::{BucketRule, DateRule, Exceptions, IdRule, ReadBuckets, ReadDates, ReadIds};
use crate::rules::lists::{ListRule, ReadIdLists, ReadWeights};
use crate::rules::numbers::{DenseRule, given_clip};
use crate::rules::time;
use crate::samples::{Ids, Names};

/// The operations for each feature.
#[derive(Debug)]
pub(super) struct Plan {
    /// The operations, in the order of the features.
    pub(super) steps: Vec<Step>,
    /// Whether each feature is a slot.
    pub(super) is_slot: Vec<bool>,
    pub(super) names: Arc<Names>,
    /// The names of the features, followed by those of the labels.
    pub(super) reported: Arc<Vec<String>>,
}

#[derive(Debug)]
pub(super) enum Step {
    Ids(IdStep),
    /// A cross. The value lists the features that are its parts.
    Cross {
        parts: Vec<usize>,
    },
    /// A dense feature. `place` is the index of its dense column.
    Dense {
        column: String,
        rule: DenseRule,
        place: usize,
    },
}

/// The operation by which a column becomes ids.
#[derive(Debug)]
pub(super) struct IdStep {
    column: String,
    weights: Option<String>,
    rule: Values,
}

#[derive(Debug)]
enum Values {
    Id(IdRule),
    Bucket(BucketRule),
    Date(DateRule),
    List(ListRule),
}

impl Plan {
    /// Compile the declarations. `fitted` must be complete.
    pub(super) fn new(config: &FeaturesConfig, fitted: &Fitted) -> Result<Self, TransformError> {
        check_tables(config, fitted)?;
        let none = FittedFeature::default();
        let mut names = Names::default();
        let mut steps = Vec::new();
        for feature in &config.features {
            let fitted = fitted.features.get(&feature.name).unwrap_or(&none);
            steps.push(step(config, feature, fitted, names.dense.len())?);
            if feature.slot.is_some() {
                names.slots.push(feature.name.clone());
            }
            if let Rule::Dense(_) = feature.rule {
                names.dense.push(feature.name.clone());
            }
        }
        names.labels = config.labels.iter().map(|label| label.name.clone()).collect();
        let features = config.features.iter().map(|feature| feature.name.clone());
        let reported = Arc::new(features.chain(names.labels.iter().cloned()).collect());
        let is_slot = config.features.iter().map(|feature| feature.slot.is_some()).collect();
        Ok(Self { steps, is_slot, names: Arc::new(names), reported })
    }

    /// Create empty ids for all features.
    pub(super) fn empty_ids(&self) -> Vec<Ids> {
        let ids = |step: &Step| match step {
            Step::Ids(step) => Ids::new(step.is_single(), step.weights.is_some()),
            Step::Cross { parts } => {
                let single = |part: &usize| matches!(&self.steps[*part], Step::Ids(step) if step.is_single());
                Ids::new(parts.iter().all(single), false)
            }
            Step::Dense { .. } => Ids::new(true, false),
        };
        self.steps.iter().map(ids).collect()
    }
}

impl IdStep {
    /// Whether every row has one id.
    fn is_single(&self) -> bool {
        match &self.rule {
            Values::Id(rule) => rule.is_single(),
            Values::Bucket(rule) => rule.exceptions.give_ids(),
            Values::Date(rule) => rule.exceptions.give_ids(),
            Values::List(_) => false,
        }
    }

    pub(super) fn read(&self, source: &impl Source, out: &mut Ids, tally: &mut Tally) {
        let column = &self.column;
        match &self.rule {
            Values::Id(rule) => source.cells(column, ReadIds { rule, out, tally }),
            Values::Bucket(rule) => source.cells(column, ReadBuckets { rule, out, tally }),
            Values::Date(rule) => source.cells(column, ReadDates { rule, out, tally }),
            Values::List(rule) => {
                // The ids are read with their weights, but a wrong id is reported before a wrong weight.
                let mut of_weights = Tally::default();
                let weights = self.weights.as_ref().map(|weights| {
                    let reader = ReadWeights { separator: rule.separator.as_deref(), tally: &mut of_weights };
                    source.lists(weights, reader)
                });
                let reader = ReadIdLists { rule, weights: weights.as_ref(), out, tally: &mut *tally };
                source.lists(column, reader);
                tally.add(of_weights);
            }
        }
    }
}

fn step(
    config: &FeaturesConfig,
    feature: &Feature,
    fitted: &FittedFeature,
    place: usize,
) -> Result<Step, TransformError> {
    let ids = |column: &str, rule| Step::Ids(IdStep { column: column.into(), weights: None, rule });
    let list = |column, separator: &Option<String>, last: Option<u32>| {
        let ids = IdRule::new(column, values(feature, fitted));
        let separator = separator.as_ref().map(|separator| separator.as_bytes().to_vec());
        Values::List(ListRule { ids, separator, last: last.map(|last| last as usize) })
    };
    Ok(match &feature.rule {
        Rule::Id(id) => ids(&id.column, Values::Id(IdRule::new(id, values(feature, fitted)))),
        Rule::Bag(bag) => Step::Ids(IdStep {
            column: bag.ids.column.clone(),
            weights: bag.weights.clone(),
            rule: list(&bag.ids, &bag.separator, None),
        }),
        Rule::Sequence(sequence) => {
            ids(&sequence.ids.column, list(&sequence.ids, &sequence.separator, Some(sequence.last)))
        }
        Rule::Bucket(bucket) => {
            let boundaries = match &bucket.boundaries {
                Boundaries::Given(boundaries) => boundaries.clone(),
                Boundaries::Quantiles(_) => fitted.boundaries.clone().unwrap_or_default(),
            };
            let exceptions = Exceptions { if_null: bucket.if_null, if_missing: bucket.if_missing };
            let hasher = IdHasher::new(&bucket.prefix, false);
            ids(
                &bucket.column,
                Values::Bucket(BucketRule { hasher, exceptions, boundaries, range: fitted.range }),
            )
        }
        Rule::Date(date) => {
            let zone = time::zone(&date.timezone).ok_or_else(|| TransformError::Contradiction {
                what: format!(
                    "{}: the time zone {:?} is not in the database of this build",
                    feature.name, date.timezone
                ),
            })?;
            let exceptions = Exceptions { if_null: date.if_null, if_missing: date.if_missing };
            let hasher = IdHasher::new(&date.prefix, false);
            let (part, unit) = (date.part, date.unit);
            ids(&date.column, Values::Date(DateRule { hasher, exceptions, part, zone, unit }))
        }
        Rule::Cross(cross) => {
            let position = |name: &String| config.features.iter().position(|part| part.name == *name);
            let parts: Option<Vec<usize>> = cross.features.iter().map(position).collect();
            let what = format!("{}: a part of this cross is not a feature", feature.name);
            Step::Cross { parts: parts.ok_or(TransformError::Contradiction { what })? }
        }
        Rule::Dense(dense) => {
            Step::Dense { column: dense.column.clone(), rule: dense_rule(dense, fitted), place }
        }
    })
}

fn dense_rule(dense: &Dense, fitted: &FittedFeature) -> DenseRule {
    let wide = |(one, other): (f32, f32)| (f64::from(one), f64::from(other));
    let pair = match dense.scaling {
        Scaling::None => None,
        Scaling::Standardise(given) => given.map(wide).or(fitted.standardise),
        Scaling::MinMax(given) => given.or(fitted.min_max).map(wide),
    };
    let missing = match dense.missing {
        Missing::Zero => None,
        Missing::Given(number) => Some(number),
        Missing::Mean | Missing::Median => fitted.missing,
    };
    let clip = match dense.clip {
        Clip::Quantiles(..) => fitted.clip,
        clip => given_clip(clip),
    };
    DenseRule::new(dense, clip, pair, missing)
}

/// The declared type of the values or, if none is declared, the fitted one.
fn values(feature: &Feature, fitted: &FittedFeature) -> ValueType {
    let declared = id_column(&feature.rule).and_then(|column| column.values);
    declared.or(fitted.values).unwrap_or(ValueType::String)
}

/// Check that features that share a table and have the same prefix have values of one type. Otherwise they
/// would share no rows.
fn check_tables(config: &FeaturesConfig, fitted: &Fitted) -> Result<(), TransformError> {
    let none = FittedFeature::default();
    let mut all: Vec<(&str, &str, &Feature, ValueType)> = Vec::new();
    let mut problems = Vec::new();
    for (feature, slot) in config.slots() {
        let Some(column) = id_column(&feature.rule) else { continue };
        let values = values(feature, fitted.features.get(&feature.name).unwrap_or(&none));
        let shared =
            all.iter().find(|(table, prefix, ..)| (*table, *prefix) == (&*slot.table, &*column.prefix));
        if let Some((table, _, other, _)) = shared.filter(|(.., other)| *other != values) {
            problems.push(format!(
                "`{}` and `{}` share the table `{table}`, but one has integers and the other strings, so their ids \
                 differ: declare the same `values`, or use separate tables",
                feature.name, other.name
            ));
        }
        all.push((&slot.table, &column.prefix, feature, values));
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(TransformError::Contradiction { what: problems.join("; ") })
    }
}
