//! Reads numeric features: bucket and dense.

use super::MAX_BOUNDARIES;
use super::read::FeatureReader;
use super::rules::*;
use crate::config::reader::Section;
use crate::config::tree::{Node, Value};

/// The key for the boundaries of a bucket feature.
const GIVEN: &str = "boundaries";

pub(super) fn read_bucket(one: &mut FeatureReader<'_, '_>) -> Bucket {
    let boundaries = match (one.section.get(GIVEN), one.section.get("quantiles")) {
        (Some(_), Some(quantiles)) => {
            one.error(
                quantiles.place,
                "quantiles",
                "found together with `boundaries`; allowed: one of the two".into(),
            );
            None
        }
        (Some(node), None) => given_boundaries(one, node),
        (None, Some(_)) => {
            let range = 2..=MAX_BOUNDARIES as u64;
            let count = one.reader.integer(one.section, &one.at("quantiles"), range);
            count.map(|count| Boundaries::Quantiles(count as u32))
        }
        (None, None) => {
            let message =
                "missing: the ascending limits of its intervals, such as `[18, 25, 35]`, or `quantiles: 20`";
            one.error(one.section.place, GIVEN, message.into());
            None
        }
    };
    Bucket {
        column: one.column(),
        boundaries: boundaries.unwrap_or(Boundaries::Given(Vec::new())),
        prefix: one.prefix(),
        if_null: one.if_null(IfNull::Id),
        if_missing: one.if_missing(),
    }
}

fn given_boundaries(one: &mut FeatureReader<'_, '_>, node: &Node) -> Option<Boundaries> {
    let numbers: Option<Vec<f32>> = match &node.value {
        Value::Sequence(items) if (1..=MAX_BOUNDARIES).contains(&items.len()) => {
            items.iter().map(Node::as_number).collect()
        }
        _ => None,
    };
    let ascending = numbers.filter(|numbers| numbers.windows(2).all(|pair| pair[0] < pair[1]));
    if ascending.is_none() {
        let message = format!(
            "found {}, allowed: a list of 1 to {MAX_BOUNDARIES} numbers, each larger than the one before it",
            found_numbers(node)
        );
        one.error(node.place, GIVEN, message);
    }
    ascending.map(Boundaries::Given)
}

/// A list, shortened to six items, or another value as text for an error message.
fn found_numbers(node: &Node) -> String {
    let Value::Sequence(items) = &node.value else { return node.found() };
    let first: Vec<String> = items.iter().take(6).map(Node::found).collect();
    let more = if items.len() > 6 { ", ..." } else { "" };
    format!("[{}{more}]", first.join(", "))
}

pub(super) fn read_dense(one: &mut FeatureReader<'_, '_>) -> Dense {
    let log1p = one.reader.boolean(one.section, &one.at("log1p")).unwrap_or(false);
    let standardise = pair_or_fitted(one, "standardise", ["mean", "std"]);
    let min_max = pair_or_fitted(one, "min_max", ["min", "max"]);
    if let (Some(_), Some(_), Some(node)) = (standardise, min_max, one.section.get("min_max")) {
        one.error(node.place, "min_max", "found together with `standardise`; allowed: one of the two".into());
    }
    let scaling = match (standardise, min_max) {
        (Some(numbers), _) => Scaling::Standardise(numbers),
        (None, Some(numbers)) => Scaling::MinMax(numbers),
        (None, None) => Scaling::None,
    };
    Dense { column: one.column(), missing: missing(one), clip: clip(one), log1p, scaling }
}

/// Read a pair of numbers: `Some(None)` for `true`, which means fitted values, and `Some` with both numbers
/// for a mapping. Returns None for `false` and without a value. Any other value is recorded as an error, and
/// also gives None.
fn pair_or_fitted(one: &mut FeatureReader<'_, '_>, key: &str, keys: [&str; 2]) -> Option<Option<(f32, f32)>> {
    let node = one.section.get(key)?;
    match &node.value {
        Value::Scalar { text, quoted: false } if text == "true" => return Some(None),
        Value::Scalar { text, quoted: false } if text == "false" => return None,
        Value::Mapping(_) => {}
        _ => {
            let message = format!(
                "found {}, allowed: true, false, or {{{}: ..., {}: ...}}",
                node.found(),
                keys[0],
                keys[1]
            );
            one.error(node.place, key, message);
            return None;
        }
    }
    let path = one.at(key);
    let section = one.reader.section(node, &path, &keys);
    let [first, second] = keys.map(|name| required(one, &section, key, name));
    let (first, second) = (first?, second?);
    let (wrong, allowed) = match key {
        "standardise" => (second <= 0.0, "a number above 0"),
        _ => (second <= first, "a number above `min`"),
    };
    if wrong {
        let node = section.get(keys[1]).unwrap_or(node);
        one.error(
            node.place,
            &format!("{key}.{}", keys[1]),
            format!("found {}, allowed: {allowed}", node.found()),
        );
    }
    Some(Some((first, second)))
}

fn required(one: &mut FeatureReader<'_, '_>, section: &Section<'_>, parent: &str, key: &str) -> Option<f32> {
    let path = one.at(&format!("{parent}.{key}"));
    if section.get(key).is_none() {
        one.reader.error(section.place, &path, "missing, allowed: a number".into());
    }
    one.reader.number(section, &path, f32::MIN..=f32::MAX)
}

fn missing(one: &mut FeatureReader<'_, '_>) -> Missing {
    let Some(node) = one.section.get("missing") else { return Missing::Zero };
    if let Some(number) = node.as_number() {
        return Missing::Given(number);
    }
    match &node.value {
        Value::Scalar { text, .. } if text == "mean" => Missing::Mean,
        Value::Scalar { text, .. } if text == "median" => Missing::Median,
        _ => {
            one.error(
                node.place,
                "missing",
                format!("found {}, allowed: a number, mean, median", node.found()),
            );
            Missing::Zero
        }
    }
}

fn clip(one: &mut FeatureReader<'_, '_>) -> Clip {
    let Some(node) = one.section.get("clip") else { return Clip::None };
    let two = |node: &Node| match &node.value {
        Value::Sequence(items) if items.len() == 2 => {
            items[0].as_number().zip(items[1].as_number()).filter(|(low, high)| low < high)
        }
        _ => None,
    };
    if let Some((low, high)) = two(node) {
        return Clip::Given(low, high);
    }
    if matches!(node.value, Value::Mapping(_)) {
        let path = one.at("clip");
        let section = one.reader.section(node, &path, &["quantiles"]);
        let quantiles = section.get("quantiles").and_then(two);
        if let Some((low, high)) = quantiles.filter(|(low, high)| *low >= 0.0 && *high <= 1.0) {
            return Clip::Quantiles(low, high);
        }
    }
    let message = format!(
        "found {}, allowed: [low, high] with low < high, or {{quantiles: [low, high]}} with 0 <= low < high <= 1",
        found_numbers(node)
    );
    one.error(node.place, "clip", message);
    Clip::None
}
