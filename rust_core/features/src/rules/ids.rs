//! Rules that convert a value to one id: id, bucket and date features, and crosses of ids.

use jiff::tz::TimeZone;
use persia_types::config::features::{DatePart, Epoch, IdColumn, IfEmpty, IfMissing, IfNull, ValueType};

use crate::hash::{IdHasher, hash_cross};
use crate::input::cell::{Cell, ReadCells};
use crate::report::{Tally, Unusual};
use crate::rules::numbers::{Number, number};
use crate::rules::time::{from_integer, needs_time, parse, part_of};
use crate::samples::Ids;

/// The rules for unusual values of features with ids.
#[derive(Debug, Clone)]
pub(crate) struct Exceptions {
    pub(crate) if_null: IfNull,
    pub(crate) if_missing: IfMissing,
}

impl Exceptions {
    /// Whether every null and every missing value has an id.
    pub(crate) fn give_ids(&self) -> bool {
        self.if_null == IfNull::Id && self.if_missing == IfMissing::Null
    }

    /// The id of a null, if nulls have one.
    #[inline]
    pub(crate) fn null(&self, hasher: &IdHasher) -> Option<u64> {
        (self.if_null == IfNull::Id).then(|| hasher.null())
    }

    #[inline]
    pub(crate) fn missing(&self, hasher: &IdHasher) -> Option<u64> {
        match self.if_missing {
            IfMissing::Null => self.null(hasher),
            IfMissing::Skip => None,
        }
    }
}

/// The rule by which a value becomes an id.
#[derive(Debug, Clone)]
pub(crate) struct IdRule {
    pub(crate) hasher: IdHasher,
    pub(crate) values: ValueType,
    pub(crate) exceptions: Exceptions,
    pub(crate) if_empty: IfEmpty,
}

impl IdRule {
    pub(crate) fn new(column: &IdColumn, values: ValueType) -> Self {
        Self {
            hasher: IdHasher::new(&column.prefix, column.lower),
            values,
            exceptions: Exceptions { if_null: column.if_null, if_missing: column.if_missing },
            if_empty: column.if_empty,
        }
    }

    /// Whether every row has an id.
    pub(crate) fn is_single(&self) -> bool {
        self.exceptions.give_ids() && self.if_empty != IfEmpty::Skip
    }

    /// The id of one value in `row`.
    #[inline]
    pub(crate) fn id(
        &self,
        cell: Cell<'_>,
        row: usize,
        tally: &mut Tally,
        scratch: &mut Vec<u8>,
    ) -> Option<u64> {
        match self.usual(cell, scratch) {
            Some(id) => Some(id),
            None => self.unusual(cell, row, tally, scratch),
        }
    }

    /// The id of a usual value; None for an unusual value.
    #[inline]
    fn usual(&self, cell: Cell<'_>, scratch: &mut Vec<u8>) -> Option<u64> {
        match (cell, self.values) {
            (Cell::Text(text), ValueType::String) if !text.is_empty() => {
                Some(self.hasher.text(text, scratch))
            }
            (Cell::Int(value), ValueType::Integer) => Some(self.hasher.int(value)),
            (Cell::Uint(value), ValueType::Integer) => Some(self.hasher.uint(value)),
            (Cell::Bool(value), ValueType::Integer) => Some(self.hasher.uint(value.into())),
            _ => None,
        }
    }

    fn unusual(&self, cell: Cell<'_>, row: usize, tally: &mut Tally, scratch: &mut Vec<u8>) -> Option<u64> {
        match cell {
            Cell::Text([]) if self.values == ValueType::String => self.empty(tally, scratch),
            Cell::Null => {
                tally.count(Unusual::Null);
                self.null()
            }
            Cell::Missing => {
                tally.count(Unusual::Missing);
                self.exceptions.missing(&self.hasher)
            }
            // pandas represents an integer column with missing values as floats.
            Cell::Float(value) if value.is_nan() => {
                tally.count(Unusual::NotFinite);
                self.null()
            }
            _ => {
                tally.wrong(row, || format!("found {}, allowed: {}", cell.found(), self.allowed()));
                self.null()
            }
        }
    }

    /// The id of an empty string, if empty strings have one.
    pub(crate) fn empty(&self, tally: &mut Tally, scratch: &mut Vec<u8>) -> Option<u64> {
        tally.count(Unusual::Empty);
        match (self.if_empty, self.values) {
            (IfEmpty::Value, ValueType::String) => Some(self.hasher.text(&[], scratch)),
            (IfEmpty::Null, _) => self.null(),
            _ => None,
        }
    }

    fn null(&self) -> Option<u64> {
        self.exceptions.null(&self.hasher)
    }

    pub(crate) fn allowed(&self) -> &'static str {
        match self.values {
            ValueType::Integer => "an integer, as declared or as in the training data",
            ValueType::String => "a string, as declared or as in the training data",
        }
    }
}

/// Reads the ids of an id feature.
pub(crate) struct ReadIds<'r> {
    pub(crate) rule: &'r IdRule,
    pub(crate) out: &'r mut Ids,
    pub(crate) tally: &'r mut Tally,
}

impl ReadCells for ReadIds<'_> {
    type Out = ();

    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) {
        let mut scratch = Vec::new();
        for row in 0..rows {
            let id = self.rule.id(cell(row), row, self.tally, &mut scratch);
            self.out.push(id);
        }
    }

    /// Hash each value of the dictionary only once, unless the dictionary has more values than rows.
    fn read_coded<'a>(
        self,
        rows: usize,
        values: usize,
        place: impl Fn(usize) -> Option<usize>,
        cell: impl Fn(usize) -> Cell<'a>,
    ) {
        if values > rows {
            return self.read(rows, |row| place(row).map_or(Cell::Null, &cell));
        }
        let mut scratch = Vec::new();
        let known: Vec<Option<u64>> =
            (0..values).map(|value| self.rule.usual(cell(value), &mut scratch)).collect();
        for row in 0..rows {
            let place = place(row);
            let id = place.and_then(|place| known[place]).or_else(|| {
                let cell = place.map_or(Cell::Null, &cell);
                self.rule.id(cell, row, self.tally, &mut scratch)
            });
            self.out.push(id);
        }
    }
}

/// The rule by which a number becomes the id of its interval.
#[derive(Debug, Clone)]
pub(crate) struct BucketRule {
    pub(crate) hasher: IdHasher,
    pub(crate) exceptions: Exceptions,
    pub(crate) boundaries: Vec<f32>,
    /// The smallest and largest number of the training data, if the boundaries are fitted.
    pub(crate) range: Option<(f32, f32)>,
}

/// Reads the ids of a bucket feature.
pub(crate) struct ReadBuckets<'r> {
    pub(crate) rule: &'r BucketRule,
    pub(crate) out: &'r mut Ids,
    pub(crate) tally: &'r mut Tally,
}

impl ReadCells for ReadBuckets<'_> {
    type Out = ();

    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) {
        let Self { rule, out, tally } = self;
        for row in 0..rows {
            let id = match number(cell(row)) {
                Number::Value(value) => {
                    if rule.range.is_some_and(|(low, high)| value < low || value > high) {
                        tally.count(Unusual::OutOfRange);
                    }
                    let below = rule.boundaries.partition_point(|boundary| *boundary < value);
                    Some(rule.hasher.uint(below as u64))
                }
                Number::Unusual(Unusual::Missing) => {
                    tally.count(Unusual::Missing);
                    rule.exceptions.missing(&rule.hasher)
                }
                Number::Unusual(what) => {
                    tally.count(what);
                    rule.exceptions.null(&rule.hasher)
                }
                Number::Wrong => {
                    tally.wrong(row, || format!("found {}, allowed: a number", cell(row).found()));
                    rule.exceptions.null(&rule.hasher)
                }
            };
            out.push(id);
        }
    }
}

/// The rule by which a part of a timestamp becomes an id.
#[derive(Debug, Clone)]
pub(crate) struct DateRule {
    pub(crate) hasher: IdHasher,
    pub(crate) exceptions: Exceptions,
    pub(crate) part: DatePart,
    pub(crate) zone: TimeZone,
    pub(crate) unit: Option<Epoch>,
}

impl DateRule {
    fn part(&self, cell: Cell<'_>) -> Option<i64> {
        let moment = match (cell, self.unit) {
            (Cell::Time(moment), _) => moment,
            (Cell::Text(text), _) => parse(text)?,
            (Cell::Int(value), Some(unit)) => from_integer(value, unit),
            (Cell::Uint(value), Some(unit)) => from_integer(i64::try_from(value).ok()?, unit),
            _ => return None,
        };
        part_of(moment, self.part, &self.zone)
    }
}

/// Reads the ids of a date feature.
pub(crate) struct ReadDates<'r> {
    pub(crate) rule: &'r DateRule,
    pub(crate) out: &'r mut Ids,
    pub(crate) tally: &'r mut Tally,
}

impl ReadCells for ReadDates<'_> {
    type Out = ();

    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) {
        let Self { rule, out, tally } = self;
        for row in 0..rows {
            let cell = cell(row);
            let unusual = match cell {
                Cell::Missing => Some(Unusual::Missing),
                Cell::Null => Some(Unusual::Null),
                Cell::Text([]) => Some(Unusual::Empty),
                Cell::Float(value) if value.is_nan() => Some(Unusual::NotFinite),
                _ => None,
            };
            let id = match (unusual, unusual.map_or_else(|| rule.part(cell), |_| None)) {
                (Some(what), _) => {
                    tally.count(what);
                    match what {
                        Unusual::Missing => rule.exceptions.missing(&rule.hasher),
                        _ => rule.exceptions.null(&rule.hasher),
                    }
                }
                (None, Some(part)) => Some(rule.hasher.int(part)),
                (None, None) => {
                    tally.wrong(row, || {
                        let time = if needs_time(rule.part) { " with a time of day" } else { "" };
                        format!(
                            "found {}, allowed: a timestamp{time}, such as 2024-05-01T10:00:00Z, or an integer if \
                             `unit` is set, in the years -9999 to 9999",
                            cell.found()
                        )
                    });
                    rule.exceptions.null(&rule.hasher)
                }
            };
            out.push(id);
        }
    }
}

/// Add the ids of a cross for `rows` rows, starting at `first`. A row has one id for each combination of the ids of
/// `parts`, and none if a part has no id.
pub(crate) fn cross(parts: &[&Ids], first: usize, rows: usize, out: &mut Ids) {
    let mut combination = vec![0; parts.len()];
    for row in first..first + rows {
        // At most one of the parts has several ids per row.
        let count = parts.iter().map(|part| part.bounds(row).len()).product::<usize>();
        for index in 0..count {
            for (id, part) in combination.iter_mut().zip(parts) {
                let bounds = part.bounds(row);
                *id = part.ids[bounds.start + if bounds.len() > 1 { index } else { 0 }];
            }
            out.ids.push(hash_cross(&combination));
        }
        out.end_row();
    }
}
