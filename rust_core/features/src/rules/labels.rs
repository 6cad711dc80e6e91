//! Rules for labels.

use persia_types::config::features::{Label, Loss, Target};

use crate::input::cell::{Cell, ReadCells};
use crate::report::{Tally, Unusual};
use crate::rules::numbers::{Number, number};

/// Reads a label. Every value that is not a label is an error, even in serving, because labels are read only on
/// request.
pub(crate) struct ReadLabels<'r> {
    pub(crate) label: &'r Label,
    pub(crate) out: &'r mut Vec<f32>,
    pub(crate) tally: &'r mut Tally,
}

impl ReadCells for ReadLabels<'_> {
    type Out = ();

    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) {
        self.out.reserve(rows);
        for row in 0..rows {
            let cell = cell(row);
            let value = value_of(&self.label.target, cell);
            let binary = self.label.loss == Loss::Bce && self.label.target == Target::Value;
            let value = value.filter(|value| !binary || *value == 0.0 || *value == 1.0);
            self.out.push(value.unwrap_or(f32::NAN));
            if value.is_none() {
                self.tally.wrong(row, || format!("found {}, allowed: {}", cell.found(), allowed(self.label)));
            }
            if cell == Cell::Null {
                self.tally.count(Unusual::Null);
            }
        }
    }
}

fn value_of(target: &Target, cell: Cell<'_>) -> Option<f32> {
    let truth = |value: bool| f32::from(u8::from(value));
    if let Target::EqualsText(text) = target {
        return match cell {
            Cell::Text(found) => Some(truth(found == text.as_bytes())),
            _ => None,
        };
    }
    let Number::Value(value) = number(cell) else { return None };
    Some(match target {
        Target::GreaterThan(limit) => truth(value > *limit),
        Target::EqualsNumber(wanted) => truth(value == *wanted),
        Target::Value | Target::EqualsText(_) => value,
    })
}

fn allowed(label: &Label) -> &'static str {
    match (&label.target, label.loss) {
        (Target::EqualsText(_), _) => "a string; remove rows without a label",
        (Target::Value, Loss::Bce) => {
            "0 or 1; for other numbers, set `greater_than`, `equals` or `loss: mse`; remove rows without a label"
        }
        _ => "a number; remove rows without a label",
    }
}
