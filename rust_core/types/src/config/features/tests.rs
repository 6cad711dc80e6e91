//! Tests of the allowed content of the blocks `features` and `labels`, and of the messages about errors.

use super::*;
use crate::config::tests::said;
use crate::schema::{Dtype, Optimizer};

const LABELS: &str = "\nlabels: {clicked: {}}";

fn is_time_zone(name: &str) -> bool {
    matches!(name, "UTC" | "Europe/Berlin")
}

fn parse(text: &str) -> Result<Parsed<FeaturesConfig>, ConfigErrors> {
    FeaturesConfig::parse(text, "persia.yml", &is_time_zone)
}

fn features(block: &str) -> FeaturesConfig {
    parse(&format!("features: {{{block}}}{LABELS}")).unwrap().config
}

/// The error messages for the features in this block, without positions.
fn refused(block: &str) -> Vec<String> {
    let lines = said(parse(&format!("features: {{{block}}}{LABELS}")));
    lines.iter().map(|line| line.split_once(": features").unwrap().1.to_owned()).collect()
}

fn only(block: &str) -> Rule {
    features(block).features[0].rule.clone()
}

#[test]
fn every_type_has_its_keys() {
    let Rule::Id(id) = only("user: {type: id, dim: 8}") else { panic!() };
    assert_eq!((id.column.as_str(), id.values, id.lower), ("user", None, false));
    assert_eq!((id.if_null, id.if_empty, id.if_missing), (IfNull::Id, IfEmpty::Value, IfMissing::Null));
    let Rule::Id(id) = only(
        "user: {type: id, dim: 8, column: u, values: string, prefix: 'u:', lower: true, if_null: skip, \
         if_empty: null, if_missing: skip}",
    ) else {
        panic!()
    };
    assert_eq!((id.column.as_str(), id.values, id.prefix.as_str()), ("u", Some(ValueType::String), "u:"));
    assert_eq!((id.if_null, id.if_empty, id.if_missing), (IfNull::Skip, IfEmpty::Null, IfMissing::Skip));
    let Rule::Bag(bag) = only("t: {type: bag, dim: 8, separator: '|', weights: w}") else { panic!() };
    assert_eq!((bag.separator.as_deref(), bag.weights.as_deref()), (Some("|"), Some("w")));
    assert_eq!((bag.ids.if_null, bag.ids.if_empty), (IfNull::Skip, IfEmpty::Skip));
    let Rule::Sequence(sequence) = only("s: {type: sequence, dim: 8, last: 50}") else { panic!() };
    assert_eq!(sequence.last, 50);
    let Rule::Bucket(bucket) = only("b: {type: bucket, dim: 8, boundaries: [-1, 0.5, 1e3]}") else {
        panic!()
    };
    assert_eq!(bucket.boundaries, Boundaries::Given(vec![-1.0, 0.5, 1000.0]));
    let Rule::Bucket(bucket) = only("b: {type: bucket, dim: 8, quantiles: 20}") else { panic!() };
    assert_eq!(bucket.boundaries, Boundaries::Quantiles(20));
    let Rule::Date(date) =
        only("d: {type: date, dim: 4, part: hour_of_week, timezone: Europe/Berlin, unit: ms}")
    else {
        panic!()
    };
    assert_eq!((date.part, date.timezone.as_str()), (DatePart::HourOfWeek, "Europe/Berlin"));
    assert_eq!(date.unit, Some(Epoch::Milliseconds));
}

#[test]
fn dense_has_its_operations() {
    let id = "u: {type: id, dim: 2}, ";
    let dense = |keys: &str| match &features(&format!("{id}x: {{type: dense{keys}}}")).features[1].rule {
        Rule::Dense(dense) => dense.clone(),
        _ => panic!(),
    };
    let plain = dense("");
    assert_eq!((plain.missing, plain.clip), (Missing::Zero, Clip::None));
    assert_eq!((plain.log1p, plain.scaling), (false, Scaling::None));
    let all = dense(", log1p: true, standardise: true, clip: {quantiles: [0.01, 0.99]}, missing: median");
    assert_eq!((all.log1p, all.scaling, all.missing), (true, Scaling::Standardise(None), Missing::Median));
    assert_eq!(all.clip, Clip::Quantiles(0.01, 0.99));
    let given = dense(", standardise: {mean: 3, std: 2}, clip: [-1, 10], missing: -7");
    assert_eq!(
        (given.scaling, given.clip),
        (Scaling::Standardise(Some((3.0, 2.0))), Clip::Given(-1.0, 10.0))
    );
    assert_eq!(given.missing, Missing::Given(-7.0));
    assert_eq!(dense(", min_max: {min: 0, max: 9}").scaling, Scaling::MinMax(Some((0.0, 9.0))));
    assert_eq!(dense(", min_max: false").scaling, Scaling::None);
}

#[test]
fn labels_have_their_targets() {
    let text = "features: {u: {type: id, dim: 2}}\nlabels:\n  clicked:\n  bought: {column: orders, greater_than: 0, \
                weight: 0.5}\n  rich: {equals: '50000+.'}\n  five: {equals: 5}\n  yes: {equals: true}\n  \
                rating: {loss: mse}\n";
    let labels = parse(text).unwrap().config.labels;
    let targets: Vec<_> = labels.iter().map(|label| label.target.clone()).collect();
    assert_eq!(
        targets,
        [
            Target::Value,
            Target::GreaterThan(0.0),
            Target::EqualsText("50000+.".into()),
            Target::EqualsNumber(5.0),
            Target::EqualsNumber(1.0),
            Target::Value
        ]
    );
    assert_eq!((labels[0].column.as_str(), labels[0].line), ("clicked", 3));
    assert_eq!((labels[1].column.as_str(), labels[1].weight, labels[1].loss), ("orders", 0.5, Loss::Bce));
    assert_eq!(labels[5].loss, Loss::Mse);
}

#[test]
fn other_blocks_are_not_looked_at() {
    let text = format!("data: {{train: x}}\nmodel: nonsense\nfeatures: {{u: {{type: id, dim: 2}}}}{LABELS}");
    assert_eq!(parse(&text).unwrap().config.features.len(), 1);
}

#[test]
fn all_mistakes_are_reported_at_once_with_their_places() {
    let text = "features:
  user: {type: idd, dim: 16}
  site: {type: id, dim: 16, prefx: x}
  tags: {type: bag, dim: 0}
  age: {type: bucket, dim: 4, boundaries: [3, 2]}
  hour: {type: date, dim: 4, timezone: Berlin}
  history: {type: sequence, dim: 8}
  price: {type: dense, dim: 4, clip: 3, standardise: {mean: 1}}
  pair: {type: cross, dim: 4, features: [usr, site, price]}
labels:
  clicked: {greater_then: 1}
";
    assert_eq!(
        said(parse(text)),
        [
            "line 2, column 16: features.user.type: found `idd`, allowed: id, bag, sequence, bucket, cross, dense, \
             date; did you mean `id`?",
            "line 3, column 29: features.site.prefx: unknown key, did you mean `prefix`?; allowed: type, column, \
             values, prefix, lower, if_null, if_empty, if_missing, dim, table, dtype, rounding, optimizer, init, \
             admission, ttl",
            "line 4, column 26: features.tags.dim: found `0`, but no cross uses this feature; allowed: 1 to 4096",
            "line 5, column 43: features.age.boundaries: found [`3`, `2`], allowed: a list of 1 to 65536 numbers, \
             each larger than the one before it",
            "line 6, column 9: features.hour.part: missing, allowed: minute, hour, weekday, hour_of_week, day, \
             day_of_year, month, quarter, year",
            "line 6, column 40: features.hour.timezone: found `Berlin`, allowed: a zone of the IANA database, such \
             as Europe/Berlin",
            "line 7, column 12: features.history.last: missing: the number of ids to keep from the end of the list, 1 to \
             65536",
            "line 8, column 24: features.price.dim: unknown key; allowed: type, column, \
             missing, clip, log1p, standardise, min_max",
            "line 8, column 38: features.price.clip: found `3`, allowed: [low, high] with low < high, or {quantiles: [low, high]} \
             with 0 <= low < high <= 1",
            "line 8, column 54: features.price.standardise.std: missing, allowed: a number",
            "line 9, column 41: features.pair.features: `usr` is not a feature of this file, did you mean `user`?",
            "line 9, column 41: features.pair.features: `price` is dense: declare it as a bucket to combine it",
            "line 11, column 13: labels.clicked.greater_then: unknown key, did you mean `greater_than`?; allowed: \
             column, greater_than, equals, weight, loss",
        ]
    );
}

#[test]
fn a_missing_block_is_named() {
    let said = said(parse("feature: {u: {type: id, dim: 2}}"));
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].contains("features: missing: name at least one feature"), "{said:?}");
    assert!(said[0].contains("is `feature` meant to be this key?"), "{said:?}");
    assert!(said[1].contains("labels: missing"), "{said:?}");
    assert!(refused("x: {type: dense}")[0].contains("no feature has an embedding"));
    assert!(
        super::super::tests::said(parse("features:\nlabels:\n"))
            .iter()
            .all(|line| line.contains("found nothing"))
    );
}

#[test]
fn contradictions_are_refused() {
    for (block, part) in [
        ("b: {type: bucket, dim: 2}", ".b.boundaries: missing"),
        ("b: {type: bucket, dim: 2, boundaries: [1], quantiles: 3}", ".b.quantiles: found together with"),
        ("u: {type: id, dim: 2, values: integer, lower: true}", ".u.lower: found `true` for integers"),
        (
            "t: {type: bag, dim: 2, weights: w, pooling: mean}",
            ".t.weights: found together with `pooling: mean`",
        ),
        (
            "u: {type: id, dim: 2}, c: {type: cross, dim: 2, features: [u]}",
            ".c.features: the number of features is 1, allowed: 2 to 8",
        ),
        ("u: {type: id, dim: 2}, c: {type: cross, dim: 2, features: [u, u]}", "`u` is named twice"),
        (
            "a: {type: bag, dim: 2}, b: {type: bag, dim: 2}, c: {type: cross, dim: 2, features: [a, b]}",
            "`b` is another bag",
        ),
        (
            "u: {type: id, dim: 2}, v: {type: id, dim: 3, table: u}",
            ".v.table: `v` has dim 3 and `u` has dim 2",
        ),
        (
            "u: {type: id, dim: 2}, v: {type: id, dim: 2, table: u, ttl: 5}",
            ".v.table: `v` has ttl 5 and `u` has ttl none",
        ),
        (
            "h: {type: date, part: hour, dim: 2}, w: {type: date, part: weekday, dim: 2, table: h}",
            ".w.table: `w` and `h` share the table `h`",
        ),
        ("x: {type: dense, standardise: {mean: 0, std: 0}}", ".x.standardise.std: found `0`, allowed"),
        (
            "x: {type: dense, min_max: true, standardise: true}",
            ".x.min_max: found together with `standardise`",
        ),
        ("u: {type: id}", ".u.dim: missing"),
        ("u: {dim: 3}", ".u.type: missing, allowed: id, bag"),
        ("u: {type: id, dim: 2}, u: {type: id, dim: 2}", ".u: appears twice"),
    ] {
        let said = refused(block);
        assert_eq!(said.len(), 1, "{block}: {said:?}");
        assert!(said[0].contains(part), "{block}: {said:?}");
    }
}

#[test]
fn tables_that_mean_the_same_are_shared() {
    let config = features(
        "user: {type: id, dim: 16, ttl: 100, dtype: f16}, author: {type: id, dim: 16, table: user, ttl: 100, dtype: f16}, \
         tags: {type: bag, dim: 4, pooling: mean, optimizer: {name: sgd, lr: 0.5}}, seen: {type: sequence, last: 7, dim: 4}, \
         price: {type: dense}, hour: {type: date, part: hour, dim: 0}, at: {type: cross, features: [user, hour], dim: 2}, \
         a: {type: bucket, boundaries: [1], dim: 2}, b: {type: bucket, boundaries: [1], dim: 2, table: a}, \
         c: {type: bucket, boundaries: [2], dim: 2, table: a, prefix: 'c'}",
    );
    let schema = config.embedding().schema;
    let slots: Vec<_> = schema.slots.iter().map(|slot| (slot.name.as_str(), slot.table)).collect();
    assert_eq!(
        slots,
        [("user", 0), ("author", 0), ("tags", 1), ("seen", 2), ("at", 3), ("a", 4), ("b", 4), ("c", 4)]
    );
    let tables: Vec<_> = schema.tables.iter().map(|table| (table.name.as_str(), table.dim)).collect();
    assert_eq!(tables, [("user", 16), ("tags", 4), ("seen", 4), ("at", 2), ("a", 2)]);
    assert_eq!((schema.tables[0].settings.dtype, schema.tables[0].settings.ttl), (Dtype::F16, Some(100)));
    assert!(matches!(schema.tables[1].settings.optimizer, Some(Optimizer::Sgd { .. })));
    assert_eq!(schema.slots[2].pooling, Pooling::Mean);
    assert_eq!(schema.slots[3].sample_fixed_size, Some(7));
    let text = format!("features: {{u: {{type: date, timezone: Mars/Olympus, part: hour, dim: 2}}}}{LABELS}");
    let slots = FeaturesConfig::parse_embedding(&text, "f").unwrap().config.schema.slots;
    assert_eq!(slots[0].name, "u");
    assert_eq!(
        config.columns(true),
        ["user", "author", "tags", "seen", "price", "hour", "a", "b", "c", "clicked"]
    );
    assert_eq!(config.columns(false).len(), 9);
}
