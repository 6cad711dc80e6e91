//! [`Optimizer::check`]: the ranges of an optimizer's parameters.

use std::ops::RangeInclusive;

use crate::schema::Optimizer;

const AT_LEAST_ZERO: RangeInclusive<f32> = 0.0..=f32::MAX;
const BELOW_ONE: RangeInclusive<f32> = 0.0..=1.0f32.next_down();
/// The range of a decay factor. A factor above 1 would let an accumulator grow to infinity.
const AT_MOST_ONE: RangeInclusive<f32> = 0.0..=1.0;
/// The range of `eps`. Adding a value in this range leaves the largest finite number unchanged.
const EPS: RangeInclusive<f32> = f32::MIN_POSITIVE..=1e30;

/// A parameter that is out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{name} is {value:?}; it must be from {:?} to {:?}", .allowed.start(), .allowed.end())]
pub struct InvalidNumber {
    /// The field of [`Optimizer`].
    pub name: &'static str,
    /// The value of the parameter.
    pub value: f32,
    /// The allowed range.
    pub allowed: RangeInclusive<f32>,
}

impl Optimizer {
    /// Check that all parameters are finite and in range.
    ///
    /// Momentum and betas must be at least 0 and below 1, `g_square_momentum` must be from 0 to 1, `eps` must
    /// be from [`f32::MIN_POSITIVE`] to 1e30, and all others must be at least 0. Within these ranges, an
    /// update never makes a finite row infinite or NaN.
    ///
    /// # Errors
    /// All parameters that are out of range, in the order of the fields. NaN is out of every range.
    pub fn check(&self) -> Result<(), Vec<InvalidNumber>> {
        let numbers = match *self {
            Self::Sgd { lr, momentum, weight_decay } => vec![
                ("lr", lr, AT_LEAST_ZERO),
                ("momentum", momentum, BELOW_ONE),
                ("weight_decay", weight_decay, AT_LEAST_ZERO),
            ],
            // `eps` must not be 0, because rows of a checkpoint may also have an accumulator of 0.
            Self::Adagrad { lr, weight_decay, initial_accumulator_value, g_square_momentum, eps, .. } => {
                vec![
                    ("lr", lr, AT_LEAST_ZERO),
                    ("weight_decay", weight_decay, AT_LEAST_ZERO),
                    ("initial_accumulator_value", initial_accumulator_value, AT_LEAST_ZERO),
                    ("g_square_momentum", g_square_momentum, AT_MOST_ONE),
                    ("eps", eps, EPS),
                ]
            }
            Self::Adam { lr, beta1, beta2, weight_decay, eps } => vec![
                ("lr", lr, AT_LEAST_ZERO),
                ("beta1", beta1, BELOW_ONE),
                ("beta2", beta2, BELOW_ONE),
                ("weight_decay", weight_decay, AT_LEAST_ZERO),
                ("eps", eps, EPS),
            ],
        };
        let invalid: Vec<InvalidNumber> = numbers
            .into_iter()
            .filter(|(_, value, allowed)| !allowed.contains(value))
            .map(|(name, value, allowed)| InvalidNumber { name, value, allowed })
            .collect();
        if invalid.is_empty() { Ok(()) } else { Err(invalid) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn invalid(optimizer: Optimizer) -> Vec<&'static str> {
        optimizer.check().err().into_iter().flatten().map(|number| number.name).collect()
    }

    /// Test both limits of the range of `name`, and the values just beyond them.
    fn check_range(name: &str, allowed: RangeInclusive<f32>, with: impl Fn(f32) -> Optimizer) {
        for value in [*allowed.start(), *allowed.end()] {
            assert_eq!(invalid(with(value)), [""; 0], "{name} {value:?}");
        }
        let beyond = [allowed.start().next_down(), allowed.end().next_up()];
        for value in [&beyond[..], &[-1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]].concat() {
            assert_eq!(invalid(with(value)), [name], "{name} {value:?}");
        }
    }

    #[test]
    fn ranges_of_sgd() {
        let sgd = |lr, momentum, weight_decay| Optimizer::Sgd { lr, momentum, weight_decay };
        check_range("lr", 0.0..=f32::MAX, |lr| sgd(lr, 0.9, 0.1));
        check_range("momentum", 0.0..=0.99999994, |momentum| sgd(0.1, momentum, 0.1));
        check_range("weight_decay", 0.0..=f32::MAX, |decay| sgd(0.1, 0.9, decay));
    }

    #[test]
    fn ranges_of_adagrad() {
        let adagrad =
            |lr, weight_decay, initial_accumulator_value, g_square_momentum, eps| Optimizer::Adagrad {
                lr,
                weight_decay,
                initial_accumulator_value,
                g_square_momentum,
                eps,
                vectorwise_shared: true,
            };
        check_range("lr", 0.0..=f32::MAX, |lr| adagrad(lr, 0.0, 0.1, 1.0, 1e-10));
        check_range("weight_decay", 0.0..=f32::MAX, |decay| adagrad(0.1, decay, 0.1, 1.0, 1e-10));
        check_range("initial_accumulator_value", 0.0..=f32::MAX, |start| {
            adagrad(0.1, 0.0, start, 1.0, 1e-10)
        });
        check_range("g_square_momentum", 0.0..=1.0, |keep| adagrad(0.1, 0.0, 0.1, keep, 1e-10));
        check_range("eps", f32::MIN_POSITIVE..=1e30, |eps| adagrad(0.1, 0.0, 0.1, 1.0, eps));
    }

    #[test]
    fn ranges_of_adam() {
        let adam =
            |lr, beta1, beta2, weight_decay, eps| Optimizer::Adam { lr, beta1, beta2, weight_decay, eps };
        check_range("lr", 0.0..=f32::MAX, |lr| adam(lr, 0.9, 0.999, 0.0, 1e-8));
        check_range("beta1", 0.0..=0.99999994, |beta1| adam(0.1, beta1, 0.999, 0.0, 1e-8));
        check_range("beta2", 0.0..=0.99999994, |beta2| adam(0.1, 0.9, beta2, 0.0, 1e-8));
        check_range("weight_decay", 0.0..=f32::MAX, |decay| adam(0.1, 0.9, 0.999, decay, 1e-8));
        check_range("eps", f32::MIN_POSITIVE..=1e30, |eps| adam(0.1, 0.9, 0.999, 0.0, eps));
    }

    #[test]
    fn every_invalid_number_is_reported_with_its_range() {
        let sgd = Optimizer::Sgd { lr: f32::NAN, momentum: 1.0, weight_decay: 0.0 };
        let messages: Vec<String> = sgd.check().unwrap_err().iter().map(InvalidNumber::to_string).collect();
        assert_eq!(
            messages,
            [
                "lr is NaN; it must be from 0.0 to 3.4028235e38",
                "momentum is 1.0; it must be from 0.0 to 0.99999994"
            ]
        );
    }
}
