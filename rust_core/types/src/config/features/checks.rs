//! Checks across features: the parts of crosses, and the tables that features share.

use std::collections::HashMap;

use super::read::Entry;
use super::rules::{Boundaries, Rule};
use crate::config::reader::{Reader, nearest};
use crate::config::settings::first_difference;
use crate::limits::MAX_DIM;

/// Check that the parts of crosses exist and can be combined, and that a feature with `dim: 0` is a part of a
/// cross.
pub(super) fn check_crosses(reader: &mut Reader, entries: &[Entry<'_>], names: &[&str]) {
    let by_name: HashMap<&str, &Entry<'_>> =
        entries.iter().map(|entry| (entry.feature.name.as_str(), entry)).collect();
    let mut used: Vec<&str> = Vec::new();
    for entry in entries {
        let Rule::Cross(cross) = &entry.feature.rule else { continue };
        let place = entry.section.get("features").map_or(entry.section.place, |node| node.place);
        let path = format!("{}.features", entry.path);
        let before = reader.error_count();
        let mut bags = 0;
        for (index, part) in cross.features.iter().enumerate() {
            used.push(part);
            let problem = match by_name.get(part.as_str()).map(|part| &part.feature.rule) {
                _ if cross.features[..index].contains(part) => Some("is named twice: remove one".to_owned()),
                None if names.contains(&part.as_str()) => None, // reported already
                None => {
                    let near = nearest(part, names.iter().copied());
                    let near = near.map(|near| format!(", did you mean `{near}`?")).unwrap_or_default();
                    Some(format!("is not a feature of this file{near}"))
                }
                Some(Rule::Cross(_)) => Some("is a cross: name its parts instead".to_owned()),
                Some(Rule::Dense(_)) => Some("is dense: declare it as a bucket to combine it".to_owned()),
                Some(Rule::Sequence(_)) => {
                    Some("is a sequence: declare it as a bag to combine it".to_owned())
                }
                Some(Rule::Bag(bag)) if bag.weights.is_some() => {
                    Some("has weights: declare it without weights to combine it".to_owned())
                }
                Some(Rule::Bag(_)) if std::mem::replace(&mut bags, 1) > 0 => {
                    Some("is another bag; a cross has at most one".to_owned())
                }
                Some(_) => None,
            };
            if let Some(problem) = problem {
                reader.error(place, &path, format!("`{part}` {problem}"));
            }
        }
        // A part for which an error has been reported may be a bag.
        let known = reader.error_count() == before;
        if let (true, 0, Some(node)) = (known, bags, entry.section.get("pooling")) {
            let message = "has no effect, because no part of this cross is a bag: remove it".into();
            reader.error(node.place, &format!("{}.pooling", entry.path), message);
        }
    }
    for entry in entries {
        let zero = entry.section.get("dim").filter(|node| node.as_number() == Some(0.0));
        if let Some(node) = zero.filter(|_| !used.contains(&entry.feature.name.as_str())) {
            let message = format!("found `0`, but no cross uses this feature; allowed: 1 to {MAX_DIM}");
            reader.error(node.place, &format!("{}.dim", entry.path), message);
        }
    }
}

/// Check that features that share a table agree on its settings, and that different values do not get the same id.
pub(super) fn check_tables(reader: &mut Reader, entries: &[Entry<'_>]) {
    let mut first: HashMap<&str, &Entry<'_>> = HashMap::new();
    for entry in entries {
        let Some(slot) = &entry.feature.slot else { continue };
        let one = *first.entry(&slot.table).or_insert(entry);
        let Some(known) = one.feature.slot.as_ref().filter(|_| one.key.place != entry.key.place) else {
            continue;
        };
        let (name, other) = (&entry.feature.name, &one.feature.name);
        let difference = if known.dim == slot.dim {
            first_difference(&known.settings, &slot.settings)
        } else {
            Some(("dim", known.dim.to_string(), slot.dim.to_string()))
        };
        let place = entry.section.get("table").map_or(entry.key.place, |node| node.place);
        let path = format!("{}.table", entry.path);
        if let Some((key, expected, found)) = difference {
            let message = format!(
                "`{name}` has {key} {found} and `{other}` has {key} {expected}; features of the table `{}` share its \
                 rows: set both to the same value",
                slot.table
            );
            reader.error(place, &path, message);
        }
        let (rule, shared) = (&entry.feature.rule, &one.feature.rule);
        if rule.prefix() == shared.prefix() && !equal_numbers(rule, shared) {
            let message = format!(
                "`{name}` and `{other}` share the table `{}`, but equal ids would mean different values: set a \
                 different `prefix` for each, or use separate tables",
                slot.table
            );
            reader.error(place, &path, message);
        }
    }
}

/// Whether, as far as the declarations show, equal ids of both features mean the same.
fn equal_numbers(one: &Rule, other: &Rule) -> bool {
    match (one, other) {
        (Rule::Bucket(one), Rule::Bucket(other)) => {
            one.boundaries == other.boundaries && matches!(one.boundaries, Boundaries::Given(_))
        }
        (Rule::Date(one), Rule::Date(other)) => one.part == other.part,
        _ => !matches!(
            (one, other),
            (Rule::Bucket(_) | Rule::Date(_), _) | (_, Rule::Bucket(_) | Rule::Date(_))
        ),
    }
}
