//! [`ActiveRun`]: the settings of the current run, checked and resolved for each table.

use persia_types::limits::{MAX_MIN_COUNT, MAX_POISSON_MEAN, MAX_RANKS};
use persia_types::tables::Run;
use persia_types::{
    Admission, Id, Initializer, InvalidNumber, JobId, Optimizer, Pooling, Rounding, Schema, Slot, Table,
    TablesError,
};

use crate::math::initial::{InitialWeights, draws_admission};
use crate::math::optimizer::Rule;
use crate::math::random::Rounder;
use crate::shard::Layout;
use crate::simd::Portable;

/// A run whose settings have been checked.
pub(crate) struct ActiveRun {
    pub(crate) generation: u64,
    /// Whether the run has an optimizer. Without one, nothing is trained.
    pub(crate) trains: bool,
    pub(crate) weight_bound: f32,
    seed: u64,
    tables: Vec<TableRun>,
}

/// The settings of one table: its own settings and, where it sets none, those of the run.
pub(crate) struct TableRun {
    /// The optimizer; None if nothing is trained.
    pub(crate) optimizer: Option<Optimizer>,
    pub(crate) layout: Layout,
    pub(crate) admission: Admission,
    /// The random draws for stochastic rounding; None rounds to nearest.
    pub(crate) rounder: Option<Rounder>,
    initial_weights: InitialWeights,
    initial_state: f32,
}

impl ActiveRun {
    /// Check all settings of `run` and resolve them.
    pub(crate) fn new(run: &Run, schema: &Schema) -> Result<Self, TablesError> {
        for table in &run.schema.tables {
            check_settings(table)?;
        }
        if run.schema != *schema {
            return bad(format!(
                "{}; start servers and trainers with the same slots (embedding_config.yml or persia.yml)",
                difference(schema, &run.schema)
            ));
        }
        check_admission(&run.admission())?;
        in_range("weight_bound", run.weight_bound, 0.0, f32::MAX)?;
        if !(1..=MAX_RANKS).contains(&run.world_size) {
            return bad(format!("world_size is {}; it must be from 1 to {MAX_RANKS}", run.world_size));
        }
        if let Some(optimizer) = &run.optimizer {
            optimizer.check().or_else(bad_optimizer)?;
        }
        check_initializer(&run.initializer)?;
        Ok(Self {
            generation: run.generation,
            trains: run.optimizer.is_some(),
            weight_bound: run.weight_bound,
            seed: run.seed,
            tables: schema.tables.iter().map(|table| TableRun::new(run, table)).collect(),
        })
    }

    /// The settings of a table.
    #[inline(always)]
    pub(crate) fn table(&self, table: usize) -> &TableRun {
        &self.tables[table]
    }

    /// The layouts of all tables.
    pub(crate) fn layouts(&self) -> Vec<Layout> {
        self.tables.iter().map(|table| table.layout).collect()
    }

    /// The value of every float of a new row's optimizer state, for each table.
    pub(crate) fn initial_state(&self) -> Vec<f32> {
        self.tables.iter().map(|table| table.initial_state).collect()
    }

    /// The job's id, for tokens.
    pub(crate) fn job(run: &Run) -> JobId {
        JobId::from_name(&run.job)
    }

    /// Whether a missing id gets a row at `step`, by its probability of admission.
    pub(crate) fn draws_admission(&self, table: usize, id: Id, step: u32) -> bool {
        draws_admission(self.seed, id, u64::from(step), self.tables[table].admission.probability)
    }
}

impl TableRun {
    fn new(run: &Run, table: &Table) -> Self {
        let settings = &table.settings;
        let optimizer = run.optimizer_of(table);
        let initializer = settings.initializer.unwrap_or(run.initializer);
        let stochastic = settings.rounding == Rounding::Stochastic;
        Self {
            optimizer,
            layout: Layout {
                state_len: optimizer.map_or(0, |optimizer| optimizer.state_len(table.dim)),
                ..Layout::stateless(table)
            },
            admission: settings.admission.unwrap_or_else(|| run.admission()),
            rounder: stochastic.then(|| Rounder::new(run.seed, &table.name)),
            initial_weights: InitialWeights::new(run.seed, &table.name, initializer),
            initial_state: optimizer.as_ref().map_or(0.0, Rule::initial_state),
        }
    }

    /// Write the weights of a new row as a look-up returns them. `scratch` has the same length.
    pub(crate) fn initial_weights(&self, id: Id, weights: &mut [f32], scratch: &mut [f32]) {
        self.initial_weights.write(id, weights);
        self.layout.round(weights, scratch);
    }

    /// Write a new row with these weights.
    pub(crate) fn write_initial(&self, row: &mut [f32], weights: &[f32]) {
        self.layout.write::<Portable>(row, weights, None);
        row[self.layout.weight_words()..].fill(self.initial_state);
    }
}

pub(crate) fn bad<T>(what: String) -> Result<T, TablesError> {
    Err(TablesError::BadRun { what })
}

fn in_range(name: &str, value: f32, low: f32, high: f32) -> Result<(), TablesError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    bad(format!("{name} is {value:?}; it must be from {low:?} to {high:?}"))
}

/// Check the settings of a table. Configuration files are checked when they are parsed, but a schema may come
/// from another source.
fn check_settings(table: &Table) -> Result<(), TablesError> {
    let of_table = |error| match error {
        TablesError::BadRun { what } => TablesError::BadRun { what: format!("table {}: {what}", table.name) },
        other => other,
    };
    let settings = &table.settings;
    if let Some(optimizer) = &settings.optimizer {
        optimizer.check().or_else(bad_optimizer).map_err(of_table)?;
    }
    settings.initializer.as_ref().map_or(Ok(()), check_initializer).map_err(of_table)?;
    settings.admission.as_ref().map_or(Ok(()), check_admission).map_err(of_table)?;
    if settings.ttl == Some(0) {
        return bad(format!("table {}: ttl is 0 steps; it must be at least 1", table.name));
    }
    Ok(())
}

fn check_admission(admission: &Admission) -> Result<(), TablesError> {
    in_range("admit_probability", admission.probability, 0.0, 1.0)?;
    let count = admission.min_count;
    if !(1..=MAX_MIN_COUNT).contains(&count) {
        return bad(format!("admit_min_count is {count}; it must be from 1 to {MAX_MIN_COUNT}"));
    }
    Ok(())
}

fn bad_optimizer(invalid: Vec<InvalidNumber>) -> Result<(), TablesError> {
    let numbers: Vec<String> = invalid.iter().map(InvalidNumber::to_string).collect();
    bad(format!("the optimizer's {}", numbers.join("; ")))
}

fn check_initializer(initializer: &Initializer) -> Result<(), TablesError> {
    match *initializer {
        Initializer::Zero | Initializer::InverseSqrtDim => Ok(()),
        Initializer::Uniform { low, high } => {
            in_range("the initializer's low", low, f32::MIN, f32::MAX)?;
            in_range("the initializer's high", high, low, f32::MAX)
        }
        Initializer::Normal { mean, std } => {
            in_range("the initializer's mean", mean, f32::MIN, f32::MAX)?;
            in_range("the initializer's std", std, 0.0, f32::MAX)
        }
        Initializer::Gamma { shape, scale } => {
            in_range("the initializer's shape", shape, f32::MIN_POSITIVE, f32::MAX)?;
            in_range("the initializer's scale", scale, 0.0, f32::MAX)
        }
        Initializer::Poisson { lam } => in_range("the initializer's lam", lam, 0.0, MAX_POISSON_MEAN),
    }
}

fn describe(table: &Table) -> String {
    let mut text = format!("table {} of dim {}", table.name, table.dim);
    for setting in table.settings.describe() {
        text += &format!(", {setting}");
    }
    text
}

/// The settings in which two slots differ. Each entry is the name of a setting, its value in `one`, and its
/// value in `other`. Each slot comes with its schema.
pub fn slot_differences(
    one: (&Schema, &Slot),
    other: (&Schema, &Slot),
) -> Vec<(&'static str, String, String)> {
    let pairs = described(one).into_iter().zip(described(other));
    pairs
        .filter(|((_, one), (_, other))| one != other)
        .map(|((setting, one), (_, other))| (setting, one, other))
        .collect()
}

/// All settings of a slot except its name, with their keys in the configuration.
fn described((schema, slot): (&Schema, &Slot)) -> [(&'static str, String); 5] {
    let none = || "none".to_owned();
    let table = schema.tables.get(slot.table).map(|table| table.name.clone());
    let pooling = match slot.pooling {
        Pooling::Sum => "sum",
        Pooling::Mean => "mean",
    };
    let hash_stack = slot
        .hash_stack
        .map(|stack| format!("with hash_stack_rounds {} and embedding_size {}", stack.rounds, stack.buckets));
    [
        ("table", table.unwrap_or_else(none)),
        ("pooling", pooling.into()),
        ("sqrt_scaling", slot.sqrt_scaling.to_string()),
        ("sample_fixed_size", slot.sample_fixed_size.as_ref().map_or_else(none, u32::to_string)),
        ("hash_stack_config", hash_stack.unwrap_or_else(none)),
    ]
}

/// Describe the first difference between two schemas.
fn difference(held: &Schema, asked: &Schema) -> String {
    let pairs = held.tables.iter().zip(&asked.tables);
    if let Some((held, asked)) = pairs.into_iter().find(|(held, asked)| held != asked) {
        return format!("the configuration has {}, but the run has {}", describe(held), describe(asked));
    }
    let mut slots = held.slots.iter().zip(&asked.slots).enumerate();
    if let Some((at, (own, other))) = slots.find(|(_, (own, other))| own != other) {
        if own.name != other.name {
            return format!(
                "slot number {} is {} in the configuration, but {} in the run",
                at + 1,
                own.name,
                other.name
            );
        }
        let differences: Vec<String> = slot_differences((held, own), (asked, other))
            .into_iter()
            .map(|(setting, own, other)| {
                format!("{setting} {own} in the configuration, but {other} in the run")
            })
            .collect();
        return format!("slot {} has {}", own.name, differences.join("; "));
    }
    format!(
        "the number of configured tables is {} and that of slots is {}, but in the run they are {} and {}",
        held.tables.len(),
        held.slots.len(),
        asked.tables.len(),
        asked.slots.len()
    )
}

#[cfg(test)]
mod tests {
    use persia_types::{HashStack, TableSettings};

    use super::*;

    fn run() -> Run {
        Run {
            job: "job".into(),
            generation: 1,
            schema: Schema::default(),
            seed: 0,
            optimizer: None,
            initializer: Initializer::Zero,
            admit_probability: 1.0,
            admit_min_count: 1,
            weight_bound: 0.0,
            fresh: false,
            continues: 0,
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
    fn every_number_out_of_range_is_refused_with_its_name() {
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
        let gamma = |shape, scale| refusal(|run| run.initializer = Initializer::Gamma { shape, scale });
        assert!(gamma(0.0, 1.0).contains("shape") && gamma(1.0, bad).contains("scale"));
        for lam in [-1.0, 501.0, bad] {
            assert!(refusal(|run| run.initializer = Initializer::Poisson { lam }).contains("lam"));
        }
        for count in [0, 65_536] {
            assert!(refusal(|run| run.admit_min_count = count).contains("admit_min_count"));
        }
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
    fn slots_that_differ_are_described_by_their_settings() {
        let slot = |name: &str| Slot { name: name.into(), ..Slot::default() };
        let schema =
            |slot| Schema { slots: vec![slot], tables: vec![Table::new("user", 4), Table::new("item", 4)] };
        let said = |asked| difference(&schema(slot("age")), &schema(asked));
        assert_eq!(said(slot("city")), "slot number 1 is age in the configuration, but city in the run");
        let asked = Slot {
            table: 1,
            pooling: Pooling::Mean,
            sample_fixed_size: Some(7),
            hash_stack: Some(HashStack { rounds: 2, buckets: 9 }),
            ..slot("age")
        };
        assert_eq!(
            said(asked),
            "slot age has table user in the configuration, but item in the run; pooling sum in the configuration, but \
             mean in the run; sample_fixed_size none in the configuration, but 7 in the run; hash_stack_config none in \
             the configuration, but with hash_stack_rounds 2 and embedding_size 9 in the run"
        );
        // A schema that does not come from a configuration file may refer to a table that does not exist.
        let lost = said(Slot { table: 9, ..slot("age") });
        assert_eq!(lost, "slot age has table user in the configuration, but none in the run");
    }

    #[test]
    fn a_table_with_a_bad_setting_is_named() {
        type Change<'a> = &'a dyn Fn(&mut TableSettings);
        let refusal = |change: Change<'_>| {
            let mut table = Table::new("user", 4);
            change(&mut table.settings);
            let schema = Schema { slots: vec![], tables: vec![table] };
            let run = Run { schema: schema.clone(), ..run() };
            ActiveRun::new(&run, &schema).err().map(|e| e.to_string()).unwrap_or_default()
        };
        assert_eq!(refusal(&|settings| settings.ttl = Some(1)), "");
        let sgd = Optimizer::Sgd { lr: f32::NAN, momentum: 0.0, weight_decay: 0.0 };
        let changes: [(Change<'_>, &str); 4] = [
            (&|settings| settings.ttl = Some(0), "ttl is 0"),
            (&|settings| settings.optimizer = Some(sgd), "lr is NaN"),
            (&|settings| settings.initializer = Some(Initializer::Poisson { lam: -1.0 }), "lam is -1"),
            (
                &|settings| settings.admission = Some(Admission { probability: 2.0, min_count: 1 }),
                "admit_probability is 2",
            ),
        ];
        for (change, expected) in changes {
            let said = refusal(change);
            assert!(said.contains("table user: ") && said.contains(expected), "{said}");
        }
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
        assert!(adagrad(0.0, 1.0, 0.0).contains("eps is 0.0"));
        assert!(adagrad(-1.0, 1.0, 1.0).contains("initial_accumulator_value"));
        assert!(adagrad(0.0, f32::NAN, 1.0).contains("g_square_momentum"));
    }
}
