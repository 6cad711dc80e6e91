//! Samples, and results as lines of JSON.

use serde_json::{Value, json};

/// The factor by which noise may make the store appear faster than its limit.
const NOISE: f64 = 1.25;

/// Repeated measurements of the same operation.
#[derive(Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub(crate) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    /// Half the interquartile range, divided by the median.
    pub(crate) fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / 2.0 / self.median()
    }

    fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * part).round() as usize]
    }
}

/// A value and the value of its peer. Lower is better.
pub(crate) struct Figure<'a> {
    pub(crate) id: &'a str,
    pub(crate) case: &'a str,
    pub(crate) unit: &'a str,
    pub(crate) value: f64,
    pub(crate) peer: f64,
    /// Whether the peer is a limit that no store can exceed.
    pub(crate) limited: bool,
    pub(crate) target: f64,
    pub(crate) spread: f64,
}

impl Figure<'_> {
    /// Print the result, with the reason if it is invalid.
    pub(crate) fn print(&self) {
        println!("{}", self.record());
    }

    fn record(&self) -> Value {
        let mut record = json!({
            "id": self.id,
            "case": self.case,
            "value": rounded(self.value, 100.0),
            "unit": self.unit,
            "peer": rounded(self.peer, 100.0),
            "ratio": rounded(self.ratio(), 1000.0),
            "target": self.target,
            "spread": rounded(self.spread, 1000.0),
        });
        if let Some(reason) = self.invalid() {
            record["invalid"] = reason.into();
        }
        record
    }

    fn ratio(&self) -> f64 {
        self.peer / self.value
    }

    /// The reason why the figure is not a valid result; None if it is valid.
    fn invalid(&self) -> Option<String> {
        let ratio = self.ratio();
        if !(self.value.is_finite() && self.peer.is_finite() && self.value > 0.0 && self.peer > 0.0) {
            return Some(format!("measured {} against {}, expected numbers above 0", self.value, self.peer));
        }
        if !(self.spread.is_finite() && self.spread >= 0.0) {
            return Some(format!("the spread is {}, expected a number of at least 0", self.spread));
        }
        (self.limited && ratio >= NOISE).then(|| {
            format!("{ratio:.2} times as fast as its limit, expected below {NOISE}: the machine disturbed one of the two")
        })
    }
}

/// Print a figure whose peer is not a limit.
pub(crate) fn print(id: &str, case: &str, unit: &str, value: f64, peer: f64, target: f64, spread: f64) {
    Figure { id, case, unit, value, peer, limited: false, target, spread }.print();
}

/// Round to multiples of 1 / `parts`. A number that is not finite becomes null.
fn rounded(number: f64, parts: f64) -> f64 {
    (number * parts).round() / parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Figure<'_> = Figure {
        id: "B1",
        case: "look-up",
        unit: "CPU ns a row",
        value: 50.0,
        peer: 15.0,
        limited: true,
        target: 0.3,
        spread: 0.012_34,
    };

    #[test]
    fn a_figure_is_one_line_of_rounded_numbers() {
        let record: Value = serde_json::from_str(&GOOD.record().to_string()).unwrap();
        let expected = json!({
            "id": "B1", "case": "look-up", "value": 50.0, "unit": "CPU ns a row", "peer": 15.0, "ratio": 0.3,
            "target": 0.3, "spread": 0.012,
        });
        assert_eq!(record, expected);
        assert!(!GOOD.record().to_string().contains('\n'));
    }

    #[test]
    fn noise_makes_a_figure_invalid_and_a_missed_target_does_not() {
        for good in [
            Figure { peer: 5.0, ..GOOD },
            Figure { peer: 62.4, ..GOOD },
            Figure { peer: 500.0, limited: false, ..GOOD },
            Figure { spread: 0.0, ..GOOD },
        ] {
            assert_eq!(good.invalid(), None);
            assert!(good.record().get("invalid").is_none());
        }
        for (bad, said) in [
            (Figure { peer: 84.5, ..GOOD }, "1.69 times as fast as its limit"),
            (Figure { peer: 62.5, ..GOOD }, "1.25 times as fast as its limit"),
            (Figure { value: 0.0, ..GOOD }, "measured 0 against 15"),
            (Figure { value: f64::NAN, ..GOOD }, "measured NaN against 15"),
            (Figure { peer: 0.0, limited: false, ..GOOD }, "measured 50 against 0"),
            (Figure { peer: f64::INFINITY, ..GOOD }, "measured 50 against inf"),
            (Figure { spread: f64::NAN, ..GOOD }, "the spread is NaN"),
        ] {
            let record: Value = serde_json::from_str(&bad.record().to_string()).unwrap();
            let reason = record["invalid"].as_str().unwrap_or_default();
            assert!(reason.contains(said), "{record}");
        }
    }
}
