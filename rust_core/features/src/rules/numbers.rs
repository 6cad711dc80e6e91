//! Rules for numbers and for dense features.

use persia_types::config::features::{Clip, Dense, Scaling};

use crate::input::cell::{Cell, ReadCells};
use crate::report::{Tally, Unusual};

/// A cell as a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Number {
    /// A finite number.
    Value(f32),
    /// A missing, null or non-finite value.
    Unusual(Unusual),
    /// A value of another type.
    Wrong,
}

/// Read the number in a cell. It is rounded to f32, so that f64, f32 and JSON columns give equal results.
#[inline]
pub(crate) fn number(cell: Cell<'_>) -> Number {
    let value = match cell {
        Cell::Float(value) => value as f32,
        Cell::Int(value) => value as f32,
        Cell::Uint(value) => value as f32,
        Cell::Bool(value) => f32::from(u8::from(value)),
        Cell::Null => return Number::Unusual(Unusual::Null),
        Cell::Missing => return Number::Unusual(Unusual::Missing),
        Cell::Text(_) | Cell::Time(_) | Cell::Other(_) => return Number::Wrong,
    };
    if value.is_finite() { Number::Value(value) } else { Number::Unusual(Unusual::NotFinite) }
}

/// `sign(x) * ln(1 + |x|)`, bit-identical on every machine.
#[inline]
pub(crate) fn log1p(value: f32) -> f32 {
    libm::log1pf(value.abs()).copysign(value)
}

/// The scaling of a dense feature, which is its last operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Scale {
    None,
    Standardise { mean: f64, factor: f64 },
    MinMax { min: f64, factor: f64 },
}

/// The rule by which a number becomes a float.
#[derive(Debug, Clone)]
pub(crate) struct DenseRule {
    clip: Option<(f32, f32)>,
    log1p: bool,
    scale: Scale,
    /// The output for a missing number.
    missing: f32,
}

impl DenseRule {
    /// Create a rule. `clip`, and `pair` for the scaling, are declared or fitted. `missing` is the number
    /// that replaces a missing number; None means that the output is 0.
    pub(crate) fn new(
        dense: &Dense,
        clip: Option<(f32, f32)>,
        pair: Option<(f64, f64)>,
        missing: Option<f32>,
    ) -> Self {
        // If all rows have the same number, it cannot be scaled, so the output is 0.
        let inverse = |width: f64| if width > 0.0 { 1.0 / width } else { 0.0 };
        let scale = match (dense.scaling, pair) {
            (Scaling::Standardise(_), Some((mean, std))) => Scale::Standardise { mean, factor: inverse(std) },
            (Scaling::MinMax(_), Some((min, max))) => Scale::MinMax { min, factor: inverse(max - min) },
            _ => Scale::None,
        };
        let mut rule = Self { clip, log1p: dense.log1p, scale, missing: 0.0 };
        rule.missing = missing.map_or(0.0, |number| rule.output(number, &mut Tally::default()));
        rule
    }

    /// The number before scaling. Means and standard deviations are fitted to such numbers.
    #[inline]
    fn unscaled(&self, value: f32) -> f32 {
        unscaled(value, self.clip, self.log1p)
    }

    #[inline]
    fn output(&self, value: f32, tally: &mut Tally) -> f32 {
        let value = self.unscaled(value);
        let scaled = match self.scale {
            Scale::None => return value,
            Scale::Standardise { mean, factor } => ((f64::from(value) - mean) * factor) as f32,
            Scale::MinMax { min, factor } => {
                let scaled = ((f64::from(value) - min) * factor) as f32;
                if !(0.0..=1.0).contains(&scaled) {
                    tally.count(Unusual::OutOfRange);
                }
                scaled.clamp(0.0, 1.0)
            }
        };
        if scaled.is_finite() {
            return scaled;
        }
        tally.count(Unusual::NotFinite);
        self.missing
    }
}

/// Apply `clip` and `log1p` to a number, if the feature has them.
#[inline]
pub(crate) fn unscaled(value: f32, clip: Option<(f32, f32)>, takes_log1p: bool) -> f32 {
    let value = clip.map_or(value, |(low, high)| value.clamp(low, high));
    if takes_log1p { log1p(value) } else { value }
}

/// The limits of the clip, if they are given and not fitted.
pub(crate) fn given_clip(clip: Clip) -> Option<(f32, f32)> {
    match clip {
        Clip::Given(low, high) => Some((low, high)),
        Clip::None | Clip::Quantiles(..) => None,
    }
}

/// Reads a dense feature into column `column` of rows of `width` floats.
pub(crate) struct ReadDense<'r> {
    pub(crate) rule: &'r DenseRule,
    pub(crate) out: &'r mut [f32],
    pub(crate) column: usize,
    pub(crate) width: usize,
    pub(crate) tally: &'r mut Tally,
}

impl ReadCells for ReadDense<'_> {
    type Out = ();

    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) {
        for (row, floats) in self.out.chunks_exact_mut(self.width).take(rows).enumerate() {
            floats[self.column] = match number(cell(row)) {
                Number::Value(value) => self.rule.output(value, self.tally),
                Number::Unusual(what) => {
                    self.tally.count(what);
                    self.rule.missing
                }
                Number::Wrong => {
                    self.tally.wrong(row, || format!("found {}, allowed: a number", cell(row).found()));
                    self.rule.missing
                }
            };
        }
    }
}
