//! [`ActiveRun`]: the run that has begun, checked once and made ready for use.

use persia_types::limits::MAX_RANKS;
use persia_types::tables::Run;
use persia_types::{Id, Initializer, JobId, Optimizer, Schema, TablesError};

use crate::initial::{InitialWeights, admits};
use crate::optimizer::Rule;
use crate::table::Layout;

/// See the module's documentation.
pub(crate) struct ActiveRun {
    pub(crate) epoch: u64,
    pub(crate) optimizer: Option<Optimizer>,
    pub(crate) weight_bound: f32,
    seed: u64,
    admit_probability: f32,
    initial_weights: Vec<InitialWeights>,
    initial_state: f32,
}

impl ActiveRun {
    /// Check every number of `run`.
    pub(crate) fn new(run: &Run, schema: &Schema) -> Result<Self, TablesError> {
        if run.schema != *schema {
            return bad(differing(schema, &run.schema));
        }
        in_range("admit_probability", run.admit_probability, 0.0, 1.0)?;
        in_range("weight_bound", run.weight_bound, 0.0, f32::MAX)?;
        if !(1..=MAX_RANKS).contains(&run.world_size) {
            return bad(format!("world_size is {}, it must be from 1 to {MAX_RANKS}", run.world_size));
        }
        if let Some(optimizer) = &run.optimizer {
            check_optimizer(optimizer)?;
        }
        check_initializer(&run.initializer)?;
        let tables = schema.tables.iter();
        Ok(Self {
            epoch: run.epoch,
            optimizer: run.optimizer,
            weight_bound: run.weight_bound,
            seed: run.seed,
            admit_probability: run.admit_probability,
            initial_weights: tables
                .map(|t| InitialWeights::new(run.seed, &t.name, run.initializer))
                .collect(),
            initial_state: run.optimizer.as_ref().map_or(0.0, Rule::initial_state),
        })
    }

    /// A row of `dim` weights and the state the optimizer wants.
    pub(crate) fn layout(&self, dim: usize) -> Layout {
        Layout { dim, state_len: self.optimizer.map_or(0, |optimizer| optimizer.state_len(dim)) }
    }

    /// The job's id, for tokens.
    pub(crate) fn job(run: &Run) -> JobId {
        JobId::from_name(&run.job)
    }

    /// Whether a missing id gets a row at `step`.
    pub(crate) fn admits(&self, id: Id, step: u32) -> bool {
        admits(self.seed, id, u64::from(step), self.admit_probability)
    }

    /// Write the weights of a row that is new.
    pub(crate) fn write_initial(&self, table: usize, id: Id, weights: &mut [f32]) {
        self.initial_weights[table].write(id, weights);
    }

    /// Write the state of a row that is new.
    pub(crate) fn write_initial_state(&self, state: &mut [f32]) {
        state.fill(self.initial_state);
    }
}

pub(crate) fn bad<T>(what: String) -> Result<T, TablesError> {
    Err(TablesError::BadRun { what })
}

fn in_range(name: &str, value: f32, low: f32, high: f32) -> Result<(), TablesError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    bad(format!("{name} is {value}, it must be from {low} to {high}"))
}

fn check_optimizer(optimizer: &Optimizer) -> Result<(), TablesError> {
    let positive = |name: &str, value: f32| in_range(name, value, 0.0, f32::MAX);
    let beta = |name: &str, value: f32| in_range(name, value, 0.0, 1.0f32.next_down());
    match *optimizer {
        Optimizer::Sgd { lr, momentum, weight_decay } => {
            positive("lr", lr)?;
            positive("momentum", momentum)?;
            positive("weight_decay", weight_decay)
        }
        Optimizer::Adagrad {
            lr, weight_decay, initial_accumulator_value, g_square_momentum, eps, ..
        } => {
            positive("lr", lr)?;
            positive("weight_decay", weight_decay)?;
            positive("initial_accumulator_value", initial_accumulator_value)?;
            positive("g_square_momentum", g_square_momentum)?;
            positive("eps", eps)?;
            if initial_accumulator_value + eps == 0.0 {
                return bad(
                    "initial_accumulator_value and eps are both 0: the first update divides by 0".into()
                );
            }
            Ok(())
        }
        Optimizer::Adam { lr, beta1, beta2, weight_decay, eps } => {
            positive("lr", lr)?;
            beta("beta1", beta1)?;
            beta("beta2", beta2)?;
            positive("weight_decay", weight_decay)?;
            // A gradient of 0 in a new row would be divided by 0.
            in_range("eps", eps, f32::MIN_POSITIVE, f32::MAX)
        }
    }
}

fn check_initializer(initializer: &Initializer) -> Result<(), TablesError> {
    match *initializer {
        Initializer::Zero => Ok(()),
        Initializer::Uniform { low, high } => {
            in_range("the initializer's low", low, f32::MIN, f32::MAX)?;
            in_range("the initializer's high", high, low, f32::MAX)
        }
        Initializer::Normal { mean, std } => {
            in_range("the initializer's mean", mean, f32::MIN, f32::MAX)?;
            in_range("the initializer's std", std, 0.0, f32::MAX)
        }
    }
}

/// The first difference of two schemas, in words.
fn differing(held: &Schema, asked: &Schema) -> String {
    let pairs = held.tables.iter().zip(&asked.tables);
    if let Some((held, asked)) = pairs.into_iter().find(|(held, asked)| held != asked) {
        return format!(
            "table {} of dim {} was configured, the run has {} of dim {}",
            held.name, held.dim, asked.name, asked.dim
        );
    }
    let slots = held.slots.iter().zip(&asked.slots);
    if let Some((held, asked)) = slots.into_iter().find(|(held, asked)| held != asked) {
        return format!("slot {held:?} was configured, the run has {asked:?}");
    }
    format!(
        "{} tables and {} slots were configured, the run has {} and {}",
        held.tables.len(),
        held.slots.len(),
        asked.tables.len(),
        asked.slots.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Run {
        Run {
            job: "job".into(),
            epoch: 1,
            schema: Schema::default(),
            seed: 0,
            optimizer: None,
            initializer: Initializer::Zero,
            admit_probability: 1.0,
            weight_bound: 0.0,
            fresh: false,
            world_size: 1,
            reproducible: false,
        }
    }

    fn refusal(change: impl FnOnce(&mut Run)) -> String {
        let mut run = run();
        change(&mut run);
        ActiveRun::new(&run, &Schema::default()).err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn every_number_out_of_range_is_refused_by_name() {
        assert_eq!(refusal(|_| ()), "");
        for value in [-0.1, 1.1, f32::NAN] {
            assert!(refusal(|run| run.admit_probability = value).contains("admit_probability"));
        }
        assert!(refusal(|run| run.weight_bound = f32::INFINITY).contains("weight_bound"));
        let bad = f32::NAN;
        let uniform = |low, high| refusal(|run| run.initializer = Initializer::Uniform { low, high });
        assert!(uniform(bad, 1.0).contains("low") && uniform(1.0, 0.0).contains("high"));
        let normal = |mean, std| refusal(|run| run.initializer = Initializer::Normal { mean, std });
        assert!(normal(bad, 1.0).contains("mean") && normal(0.0, -1.0).contains("std"));
        let sgd = |lr, momentum, weight_decay| {
            refusal(|run| run.optimizer = Some(Optimizer::Sgd { lr, momentum, weight_decay }))
        };
        assert_eq!(sgd(0.1, 0.9, 0.1), "");
        assert!(sgd(bad, 0.0, 0.0).contains("lr") && sgd(0.1, bad, 0.0).contains("momentum"));
        assert!(sgd(0.1, 0.0, f32::INFINITY).contains("weight_decay"));
        let adam = |beta1, beta2, eps| {
            let adam = Optimizer::Adam { lr: 0.1, beta1, beta2, weight_decay: 0.0, eps };
            refusal(|run| run.optimizer = Some(adam))
        };
        assert_eq!(adam(0.9, 0.999, 1e-8), "");
        assert!(adam(1.0, 0.9, 1e-8).contains("beta1") && adam(0.9, bad, 1e-8).contains("beta2"));
        assert!(adam(0.9, 0.9, 0.0).contains("eps"));
    }

    #[test]
    fn adagrad_that_would_divide_by_zero_is_refused() {
        let adagrad = |initial_accumulator_value, g_square_momentum, eps| {
            let vectorwise_shared = true;
            let (lr, weight_decay) = (0.1, 0.0);
            refusal(|run| {
                run.optimizer = Some(Optimizer::Adagrad {
                    lr,
                    weight_decay,
                    initial_accumulator_value,
                    g_square_momentum,
                    eps,
                    vectorwise_shared,
                });
            })
        };
        assert_eq!(adagrad(0.0, 1.0, 1e-10), "");
        assert!(adagrad(0.0, 1.0, 0.0).contains("divides by 0"));
        assert!(adagrad(-1.0, 1.0, 1.0).contains("initial_accumulator_value"));
        assert!(adagrad(0.0, f32::NAN, 1.0).contains("g_square_momentum"));
    }
}
