//! Rules that convert a list to ids: bags and sequences, with the weights of bags.

use crate::input::cell::{Cell, Item, ReadLists};
use crate::report::{Tally, Unusual};
use crate::rules::ids::IdRule;
use crate::rules::numbers::{Number, number};
use crate::samples::Ids;
use persia_types::config::features::ValueType;

/// The rule by which a list becomes ids.
#[derive(Debug, Clone)]
pub(crate) struct ListRule {
    pub(crate) ids: IdRule,
    /// The separator that splits strings; None for lists.
    pub(crate) separator: Option<Vec<u8>>,
    /// The number of ids to keep, from the end; None keeps all.
    pub(crate) last: Option<usize>,
}

/// Reads the ids of a bag or a sequence.
pub(crate) struct ReadIdLists<'r> {
    pub(crate) rule: &'r ListRule,
    pub(crate) weights: Option<&'r Weights>,
    pub(crate) out: &'r mut Ids,
    pub(crate) tally: &'r mut Tally,
}

impl ReadLists for ReadIdLists<'_> {
    type Out = ();

    fn read<'a, I: Iterator<Item = Cell<'a>>>(mut self, rows: usize, item: impl Fn(usize) -> Item<'a, I>) {
        let mut scratch = Vec::new();
        for row in 0..rows {
            let start = self.out.ids.len();
            match (item(row), &self.rule.separator) {
                (Item::List(cells), _) => self.values(row, cells, &mut scratch),
                // An empty string is not split: `if_empty` applies to it.
                (Item::One(Cell::Text([])), Some(_)) => {
                    let id = self.rule.ids.empty(self.tally, &mut scratch);
                    self.alone(id);
                }
                (Item::One(Cell::Text(text)), Some(separator)) => {
                    let values = self.rule.ids.values;
                    self.values(row, split(text, separator).map(|part| parsed(part, values)), &mut scratch);
                }
                (Item::One(Cell::Null), _) => {
                    self.tally.count(Unusual::Null);
                    self.alone(self.rule.ids.exceptions.null(&self.rule.ids.hasher));
                }
                (Item::One(Cell::Missing), _) => {
                    self.tally.count(Unusual::Missing);
                    self.alone(self.rule.ids.exceptions.missing(&self.rule.ids.hasher));
                }
                (Item::One(cell), separator) => {
                    let allowed = if separator.is_some() { "a list, or a string to split" } else { "a list" };
                    self.tally.wrong(row, || format!("found {}, allowed: {allowed}", cell.found()));
                    self.alone(self.rule.ids.exceptions.null(&self.rule.ids.hasher));
                }
            }
            self.keep_last(start);
            self.out.end_row();
        }
    }
}

impl ReadIdLists<'_> {
    /// Add the ids of the values of one row. With weights, a value without a finite weight is skipped, and so
    /// are all values if there are more or fewer weights than values.
    #[inline]
    fn values<'a>(&mut self, row: usize, cells: impl Iterator<Item = Cell<'a>>, scratch: &mut Vec<u8>) {
        let Some(weights) = self.weights.and_then(|weights| weights.of(row)) else {
            for cell in cells {
                let id = self.rule.ids.id(cell, row, self.tally, scratch);
                self.alone(id);
            }
            return;
        };
        let start = self.out.ids.len();
        let mut count = 0;
        for cell in cells {
            let id = self.rule.ids.id(cell, row, self.tally, scratch);
            let weight = weights.get(count).copied().unwrap_or(f32::NAN);
            count += 1;
            if let (Some(id), true, Some(out)) = (id, weight.is_finite(), &mut self.out.weights) {
                self.out.ids.push(id);
                out.push(weight);
            }
        }
        if count != weights.len() {
            self.tally.wrong(row, || {
                format!(
                    "found {} as the number of weights, allowed: {count}, one for each value",
                    weights.len()
                )
            });
            self.out.ids.truncate(start);
            if let Some(out) = &mut self.out.weights {
                out.truncate(start);
            }
        }
    }

    /// Add an id whose weight is 1.
    #[inline]
    fn alone(&mut self, id: Option<u64>) {
        self.out.ids.extend(id);
        if let (Some(weights), Some(_)) = (&mut self.out.weights, id) {
            weights.push(1.0);
        }
    }

    fn keep_last(&mut self, start: usize) {
        let count = self.out.ids.len() - start;
        if let Some(last) = self.rule.last.filter(|last| count > *last) {
            self.tally.count(Unusual::Truncated);
            self.out.ids.copy_within(start + count - last.., start);
            self.out.ids.truncate(start + last);
        }
    }
}

/// Split `text` at separators. There is at least one part.
fn split<'a>(text: &'a [u8], separator: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let end = match separator {
            [byte] => text.iter().position(|other| other == byte),
            _ => text.windows(separator.len()).position(|window| window == separator),
        };
        rest = end.map(|end| &text[end + separator.len()..]);
        Some(end.map_or(text, |end| &text[..end]))
    })
}

/// Convert a part of a string to a value of the feature's type. If the type is integer, an empty part is
/// null.
fn parsed(part: &[u8], values: ValueType) -> Cell<'_> {
    if values == ValueType::String {
        return Cell::Text(part);
    }
    if part.is_empty() {
        return Cell::Null;
    }
    let text = std::str::from_utf8(part).unwrap_or_default();
    let unsigned = || text.parse().map(Cell::Uint);
    text.parse().map(Cell::Int).or_else(|_| unsigned()).unwrap_or(Cell::Text(part))
}

/// The weights of the ids of a bag, for all rows.
#[derive(Debug, Default)]
pub(crate) struct Weights {
    /// The weights; NaN for a value that is not a weight.
    values: Vec<f32>,
    /// The end of each row.
    ends: Vec<u32>,
    /// Whether each row lacks a list of weights. The weights of such a row are 1.
    absent: Vec<bool>,
}

impl Weights {
    fn of(&self, row: usize) -> Option<&[f32]> {
        let start = if row == 0 { 0 } else { self.ends[row - 1] };
        (!self.absent[row]).then(|| &self.values[start as usize..self.ends[row] as usize])
    }

    /// Add a weight. A value that is not a weight is counted, and NaN is added.
    fn push(&mut self, cell: Cell<'_>, row: usize, tally: &mut Tally) {
        let value = match number(cell) {
            Number::Value(value) => value,
            Number::Unusual(what) => {
                tally.count(what);
                f32::NAN
            }
            Number::Wrong => {
                tally.wrong(row, || format!("found {} as a weight, allowed: a number", cell.found()));
                f32::NAN
            }
        };
        self.values.push(value);
    }
}

/// Reads the weights of a bag.
pub(crate) struct ReadWeights<'r> {
    pub(crate) separator: Option<&'r [u8]>,
    pub(crate) tally: &'r mut Tally,
}

impl ReadLists for ReadWeights<'_> {
    type Out = Weights;

    fn read<'a, I: Iterator<Item = Cell<'a>>>(
        self,
        rows: usize,
        item: impl Fn(usize) -> Item<'a, I>,
    ) -> Weights {
        let mut weights = Weights::default();
        let strings = if self.separator.is_some() { ", or a string to split" } else { "" };
        for row in 0..rows {
            let mut absent = false;
            match (item(row), self.separator) {
                (Item::List(cells), _) => cells.for_each(|cell| weights.push(cell, row, self.tally)),
                (Item::One(Cell::Text([])), Some(_)) => {}
                (Item::One(Cell::Text(text)), Some(separator)) => {
                    for part in split(text, separator) {
                        let parsed = std::str::from_utf8(part).ok().and_then(|part| part.parse().ok());
                        weights.push(parsed.map_or(Cell::Text(part), Cell::Float), row, self.tally);
                    }
                }
                (Item::One(cell), _) => {
                    absent = true;
                    match cell {
                        Cell::Null => self.tally.count(Unusual::Null),
                        Cell::Missing => self.tally.count(Unusual::Missing),
                        _ => self.tally.wrong(row, || {
                            format!("found {} as weights, allowed: a list of numbers{strings}", cell.found())
                        }),
                    }
                }
            }
            weights.absent.push(absent);
            weights.ends.push(weights.values.len() as u32);
        }
        weights
    }
}
