//! Samples and the lines they become.

/// Repeated measurements of one thing.
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

    /// Half the distance of the quartiles over the median.
    pub(crate) fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / 2.0 / self.median()
    }

    fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * part).round() as usize]
    }
}

/// Print how far `value` is from `peer`, where less is better.
pub(crate) fn print(id: &str, case: &str, unit: &str, value: f64, peer: f64, target: f64, spread: f64) {
    println!(
        r#"{{"id": "{id}", "case": "{case}", "value": {value:.2}, "unit": "{unit}", "peer": {peer:.2}, "ratio": {:.3}, "target": {target}, "spread": {spread:.3}}}"#,
        peer / value
    );
}
