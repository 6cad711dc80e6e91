//! Reads the block `features`: first each feature separately, then the checks across features.

use super::checks::{check_crosses, check_tables};
use super::numbers::{read_bucket, read_dense};
use super::rules::*;
use super::{Feature, FeatureSlot, FeaturesConfig, MAX_CROSS_PARTS, labels};
use crate::config::reader::{Reader, Section, join, nearest};
use crate::config::settings::read_settings;
use crate::config::tree::{Key, Node, Place, Value};
use crate::limits::{MAX_DIM, MAX_SAMPLE_FIXED_SIZE, MAX_SLOTS};
use crate::schema::Pooling;

const PATH: &str = "features";
const EXAMPLE: &str = "name at least one feature, such as `user: {type: id, dim: 16}`";

const SLOT: &[&str] = &["dim", "table", "dtype", "rounding", "optimizer", "init", "admission", "ttl"];
const IDS: &[&str] = &["column", "values", "prefix", "lower", "if_null", "if_empty", "if_missing"];
const TYPES: &[(&str, Kind, &[&[&str]])] = &[
    ("id", Kind::Id, &[IDS, SLOT]),
    ("bag", Kind::Bag, &[IDS, &["separator", "weights", "pooling"], SLOT]),
    ("sequence", Kind::Sequence, &[IDS, &["separator", "last"], SLOT]),
    (
        "bucket",
        Kind::Bucket,
        &[&["column", "boundaries", "quantiles", "prefix", "if_null", "if_missing"], SLOT],
    ),
    ("cross", Kind::Cross, &[&["features", "pooling"], SLOT]),
    ("dense", Kind::Dense, &[&["column", "missing", "clip", "log1p", "standardise", "min_max"]]),
    ("date", Kind::Date, &[&["column", "part", "timezone", "unit", "prefix", "if_null", "if_missing"], SLOT]),
];
const VALUES: &[(&str, ValueType)] = &[("integer", ValueType::Integer), ("string", ValueType::String)];
const IF_NULL: &[(&str, IfNull)] = &[("id", IfNull::Id), ("skip", IfNull::Skip)];
const IF_EMPTY: &[(&str, IfEmpty)] =
    &[("value", IfEmpty::Value), ("null", IfEmpty::Null), ("skip", IfEmpty::Skip)];
const IF_MISSING: &[(&str, IfMissing)] = &[("null", IfMissing::Null), ("skip", IfMissing::Skip)];
const POOLINGS: &[(&str, Pooling)] = &[("sum", Pooling::Sum), ("mean", Pooling::Mean)];
const PARTS: &[(&str, DatePart)] = &[
    ("minute", DatePart::Minute),
    ("hour", DatePart::Hour),
    ("weekday", DatePart::Weekday),
    ("hour_of_week", DatePart::HourOfWeek),
    ("day", DatePart::Day),
    ("day_of_year", DatePart::DayOfYear),
    ("month", DatePart::Month),
    ("quarter", DatePart::Quarter),
    ("year", DatePart::Year),
];
const UNITS: &[(&str, Epoch)] = &[
    ("s", Epoch::Seconds),
    ("ms", Epoch::Milliseconds),
    ("us", Epoch::Microseconds),
    ("ns", Epoch::Nanoseconds),
];

#[derive(Clone, Copy)]
enum Kind {
    Id,
    Bag,
    Sequence,
    Bucket,
    Cross,
    Dense,
    Date,
}

/// A feature, and its positions in the file.
pub(super) struct Entry<'a> {
    pub(super) feature: Feature,
    pub(super) key: &'a Key,
    pub(super) section: Section<'a>,
    pub(super) path: String,
}

/// The block `name`. If it is missing or empty, this is recorded as an error.
pub(super) fn block<'a>(reader: &mut Reader, root: &'a Node, name: &str, example: &str) -> Option<&'a Node> {
    let whole = root.is_mapping();
    let root = reader.mapping(root, "");
    let node = root.get(name);
    match node {
        None if whole => {
            let others = root.entries().map(|(key, _)| key.text.as_str());
            let near = nearest(name, others).map(|near| format!("; is `{near}` meant to be this key?"));
            let message = format!("missing: {example}{}", near.unwrap_or_default());
            reader.error(root.place, name, message);
        }
        Some(node) if node.is_null() || matches!(&node.value, Value::Mapping(all) if all.is_empty()) => {
            reader.error(node.place, name, format!("found nothing: {example}"));
        }
        _ => {}
    }
    node
}

/// Read both blocks.
pub(super) fn read(reader: &mut Reader, root: &Node, is_time_zone: &dyn Fn(&str) -> bool) -> FeaturesConfig {
    let features = match block(reader, root, PATH, EXAMPLE) {
        Some(node) => read_features(reader, node, is_time_zone),
        None => Vec::new(),
    };
    // If the root is not a mapping, an error has been reported.
    let labels = if root.is_mapping() { labels::read(reader, root) } else { Vec::new() };
    FeaturesConfig { features, labels }
}

fn read_features(reader: &mut Reader, node: &Node, is_time_zone: &dyn Fn(&str) -> bool) -> Vec<Feature> {
    let before = reader.error_count();
    let block = reader.mapping(node, PATH);
    let entries: Vec<Entry<'_>> =
        block.entries().filter_map(|(key, node)| read_feature(reader, key, node, is_time_zone)).collect();
    if entries.len() > MAX_SLOTS {
        let message = format!("found {} features, allowed: at most {MAX_SLOTS}", entries.len());
        reader.error(node.place, PATH, message);
    }
    let names: Vec<&str> = block.entries().map(|(key, _)| key.text.as_str()).collect();
    check_crosses(reader, &entries, &names);
    check_tables(reader, &entries);
    let found = reader.error_count() == before && !entries.is_empty();
    if found && entries.iter().all(|entry| entry.feature.slot.is_none()) {
        let message = "no feature has an embedding: add a feature such as `user: {type: id, dim: 16}`".into();
        reader.error(node.place, PATH, message);
    }
    entries.into_iter().map(|entry| entry.feature).collect()
}

/// Read one feature. Returns None if its type is missing or unknown; that error has been recorded.
fn read_feature<'a>(
    reader: &mut Reader,
    key: &'a Key,
    node: &'a Node,
    is_time_zone: &dyn Fn(&str) -> bool,
) -> Option<Entry<'a>> {
    let path = join(PATH, &key.text);
    reader.check_name(&key.text, key.place, &path);
    let keys: Vec<(&str, Kind, Vec<&str>)> =
        TYPES.iter().map(|(word, kind, keys)| (*word, *kind, keys.concat())).collect();
    let keys: Vec<_> = keys.iter().map(|(word, kind, keys)| (*word, *kind, keys.as_slice())).collect();
    let (kind, section) = reader.tagged(node, &path, "type", &keys)?;
    let mut one = FeatureReader { reader, section: &section, path: &path, name: &key.text };
    let rule = match kind {
        Kind::Id => Rule::Id(one.ids(IfNull::Id)),
        Kind::Bag => Rule::Bag(one.bag()),
        Kind::Sequence => Rule::Sequence(one.sequence()),
        Kind::Bucket => Rule::Bucket(read_bucket(&mut one)),
        Kind::Cross => Rule::Cross(one.cross()),
        Kind::Dense => Rule::Dense(read_dense(&mut one)),
        Kind::Date => Rule::Date(one.date(is_time_zone)),
    };
    let slot = if matches!(kind, Kind::Dense) { None } else { one.slot() };
    let feature = Feature { name: key.text.clone(), line: key.place.line, rule, slot };
    Some(Entry { feature, key, section, path })
}

/// Reads the keys of one feature.
pub(super) struct FeatureReader<'r, 'a> {
    pub(super) reader: &'r mut Reader,
    pub(super) section: &'r Section<'a>,
    pub(super) path: &'r str,
    name: &'r str,
}

impl FeatureReader<'_, '_> {
    pub(super) fn at(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    pub(super) fn error(&mut self, place: Place, key: &str, message: String) {
        self.reader.error(place, &self.at(key), message);
    }

    fn text(&mut self, key: &str) -> Option<String> {
        self.reader.text(self.section, &self.at(key)).map(str::to_owned)
    }

    pub(super) fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Option<T> {
        self.reader.choice(self.section, &self.at(key), choices)
    }

    /// The column. Its default is the name of the feature.
    pub(super) fn column(&mut self) -> String {
        self.text("column").unwrap_or_else(|| self.name.into())
    }

    pub(super) fn prefix(&mut self) -> String {
        self.text("prefix").unwrap_or_default()
    }

    pub(super) fn if_null(&mut self, default: IfNull) -> IfNull {
        self.choice("if_null", IF_NULL).unwrap_or(default)
    }

    pub(super) fn if_missing(&mut self) -> IfMissing {
        self.choice("if_missing", IF_MISSING).unwrap_or(IfMissing::Null)
    }

    fn ids(&mut self, if_null: IfNull) -> IdColumn {
        let values = self.choice("values", VALUES);
        let lower = self.reader.boolean(self.section, &self.at("lower")).unwrap_or(false);
        if let (Some(ValueType::Integer), true, Some(node)) = (values, lower, self.section.get("lower")) {
            let message = "found `true` for integers; allowed: false, or `values: string`".into();
            self.error(node.place, "lower", message);
        }
        IdColumn {
            column: self.column(),
            values,
            prefix: self.prefix(),
            lower,
            if_null: self.if_null(if_null),
            if_empty: self.choice("if_empty", IF_EMPTY).unwrap_or(match if_null {
                IfNull::Id => IfEmpty::Value,
                IfNull::Skip => IfEmpty::Skip,
            }),
            if_missing: self.if_missing(),
        }
    }

    fn bag(&mut self) -> Bag {
        let ids = self.ids(IfNull::Skip);
        Bag { ids, separator: self.text("separator"), weights: self.text("weights") }
    }

    fn sequence(&mut self) -> Sequence {
        let range = 1..=u64::from(MAX_SAMPLE_FIXED_SIZE);
        if self.section.get("last").is_none() {
            let message = format!(
                "missing: the number of ids to keep from the end of the list, 1 to {MAX_SAMPLE_FIXED_SIZE}"
            );
            self.error(self.section.place, "last", message);
        }
        let last = self.reader.integer(self.section, &self.at("last"), range).unwrap_or(1) as u32;
        Sequence { ids: self.ids(IfNull::Skip), separator: self.text("separator"), last }
    }

    fn cross(&mut self) -> Cross {
        let parts = self.reader.texts(self.section, &self.at("features"));
        let place = self.section.get("features").map_or(self.section.place, |node| node.place);
        if let Some(parts) = &parts {
            if !(2..=MAX_CROSS_PARTS).contains(&parts.len()) {
                let message =
                    format!("the number of features is {}, allowed: 2 to {MAX_CROSS_PARTS}", parts.len());
                self.error(place, "features", message);
            }
        } else if self.section.get("features").is_none() {
            self.error(place, "features", "missing: the features to combine, such as `[user, item]`".into());
        }
        Cross { features: parts.unwrap_or_default() }
    }

    fn date(&mut self, is_time_zone: &dyn Fn(&str) -> bool) -> Date {
        if self.section.get("part").is_none() {
            let words: Vec<&str> = PARTS.iter().map(|(word, _)| *word).collect();
            self.error(self.section.place, "part", format!("missing, allowed: {}", words.join(", ")));
        }
        let timezone = self.text("timezone").unwrap_or_else(|| "UTC".into());
        if let Some(node) = self.section.get("timezone").filter(|_| !is_time_zone(&timezone)) {
            let message = format!(
                "found {}, allowed: a zone of the IANA database, such as Europe/Berlin",
                node.found()
            );
            self.error(node.place, "timezone", message);
        }
        Date {
            column: self.column(),
            part: self.choice("part", PARTS).unwrap_or(DatePart::Hour),
            timezone,
            unit: self.choice("unit", UNITS),
            prefix: self.prefix(),
            if_null: self.if_null(IfNull::Id),
            if_missing: self.if_missing(),
        }
    }

    /// Read the slot. Returns None with `dim: 0`, or after reporting a wrong setting.
    fn slot(&mut self) -> Option<FeatureSlot> {
        if self.section.get("dim").is_none() {
            let message = format!(
                "missing, allowed: a whole number from 1 to {MAX_DIM}, or 0 for a feature that is only a part of crosses"
            );
            self.error(self.section.place, "dim", message);
        }
        let dim = self.reader.integer(self.section, &self.at("dim"), 0..=MAX_DIM as u64);
        let pooling = self.choice("pooling", POOLINGS).unwrap_or(Pooling::Sum);
        if let (Pooling::Mean, Some(node), Some(_)) =
            (pooling, self.section.get("weights"), self.section.get("pooling"))
        {
            let message =
                "found together with `pooling: mean`; allowed: `pooling: sum`, or no weights".into();
            self.error(node.place, "weights", message);
        }
        let table = match self.reader.name(self.section, &self.at("table")) {
            Some(table) => table.to_owned(),
            None => self.name.into(),
        };
        let settings = read_settings(self.reader, self.section, self.path);
        if dim == Some(0) {
            let unused: Vec<&str> =
                SLOT[1..].iter().copied().filter(|key| self.section.get(key).is_some()).collect();
            if !unused.is_empty() {
                let message =
                    format!("found `0`, so this feature has no embedding: remove {}", unused.join(", "));
                self.error(self.section.place, "dim", message);
            }
        }
        let dim = dim.filter(|dim| *dim > 0)? as usize;
        Some(FeatureSlot { dim, table, pooling, settings: settings? })
    }
}
