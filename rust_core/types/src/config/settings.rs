//! Reads the settings of a table in a slot: dtype, optimizer, initializer, admission, time to live.

use std::ops::RangeInclusive;

use super::reader::{Reader, Section};
use super::tree::{Node, Value};
use crate::limits::{MAX_MIN_COUNT, MAX_POISSON_MEAN};
use crate::optimizer::InvalidNumber;
use crate::schema::{Admission, Dtype, Initializer, Optimizer, Rounding, TableSettings};

pub(super) const DTYPES: &[(&str, Dtype)] =
    &[("f32", Dtype::F32), ("f16", Dtype::F16), ("bf16", Dtype::Bf16)];
const ROUNDINGS: &[(&str, Rounding)] =
    &[("nearest", Rounding::Nearest), ("stochastic", Rounding::Stochastic)];

const ANY: RangeInclusive<f32> = f32::MIN..=f32::MAX;
const AT_LEAST_ZERO: RangeInclusive<f32> = 0.0..=f32::MAX;
const ABOVE_ZERO: RangeInclusive<f32> = f32::MIN_POSITIVE..=f32::MAX;
const SHARE: RangeInclusive<f32> = 0.0..=1.0;

#[derive(Clone, Copy)]
enum OptimizerName {
    Sgd,
    Adagrad,
    Adam,
}

const OPTIMIZERS: &[(&str, OptimizerName, &[&str])] = &[
    ("sgd", OptimizerName::Sgd, &["lr", "momentum", "weight_decay"]),
    (
        "adagrad",
        OptimizerName::Adagrad,
        &["lr", "initial_accumulator_value", "weight_decay", "g_square_momentum", "eps", "vectorwise_shared"],
    ),
    ("adam", OptimizerName::Adam, &["lr", "betas", "weight_decay", "eps"]),
];

#[derive(Clone, Copy)]
enum InitializerName {
    Zero,
    Uniform,
    Normal,
    Gamma,
    Poisson,
    InverseSqrtDim,
}

const INITIALIZERS: &[(&str, InitializerName, &[&str])] = &[
    ("zero", InitializerName::Zero, &[]),
    ("uniform", InitializerName::Uniform, &["low", "high"]),
    ("normal", InitializerName::Normal, &["mean", "std"]),
    ("gamma", InitializerName::Gamma, &["shape", "scale"]),
    ("poisson", InitializerName::Poisson, &["lam"]),
    ("inverse_sqrt_dim", InitializerName::InverseSqrtDim, &[]),
];

/// Read the settings in the section of a slot. Returns None after reporting a wrong setting.
pub(super) fn read_settings(reader: &mut Reader, section: &Section<'_>, path: &str) -> Option<TableSettings> {
    let at = |key: &str| format!("{path}.{key}");
    let before = reader.error_count();
    let dtype = reader.choice(section, &at("dtype"), DTYPES);
    // An invalid dtype has been reported, so the rounding is not compared with the default.
    let wrong_dtype = dtype.is_none() && section.get("dtype").is_some();
    let mut settings = TableSettings {
        dtype: dtype.unwrap_or_default(),
        rounding: reader.choice(section, &at("rounding"), ROUNDINGS).unwrap_or_default(),
        ttl: reader.integer(section, &at("ttl"), 1..=u64::from(u32::MAX)).map(|steps| steps as u32),
        ..TableSettings::default()
    };
    if let (Rounding::Stochastic, Dtype::F32, Some(node), false) =
        (settings.rounding, settings.dtype, section.get("rounding"), wrong_dtype)
    {
        let message = "found `stochastic` for rows of f32, which are not rounded; allowed: nearest, or set `dtype: f16` or \
                       `dtype: bf16`";
        reader.error(node.place, &at("rounding"), message.into());
    }
    if let Some(node) = section.get("optimizer") {
        settings.optimizer = Entry { reader, path: at("optimizer") }.optimizer(node);
    }
    if let Some(node) = section.get("init") {
        settings.initializer = Entry { reader, path: at("init") }.initializer(node);
    }
    if let Some(node) = section.get("admission") {
        settings.admission = Entry { reader, path: at("admission") }.admission(node);
    }
    (reader.error_count() == before).then_some(settings)
}

/// The first setting in which two tables differ: `(key, value of one, value of the other)`.
pub(super) fn first_difference(
    one: &TableSettings,
    other: &TableSettings,
) -> Option<(&'static str, String, String)> {
    let (one, other) = (described(one), described(other));
    let mut pairs = one.into_iter().zip(other);
    pairs.find(|((_, one), (_, other))| one != other).map(|((key, one), (_, other))| (key, one, other))
}

/// All settings, with their keys in the file.
fn described(settings: &TableSettings) -> [(&'static str, String); 6] {
    fn or_none<T>(value: Option<T>, text: impl Fn(&T) -> String) -> String {
        value.as_ref().map_or("none".into(), text)
    }
    let word = |text: String| text.to_lowercase();
    [
        ("dtype", word(format!("{:?}", settings.dtype))),
        ("rounding", word(format!("{:?}", settings.rounding))),
        ("optimizer", or_none(settings.optimizer, optimizer_text)),
        ("init", or_none(settings.initializer, initializer_text)),
        ("admission", or_none(settings.admission, admission_text)),
        ("ttl", or_none(settings.ttl, u32::to_string)),
    ]
}

/// An optimizer with all its parameters, as in the file.
fn optimizer_text(optimizer: &Optimizer) -> String {
    match optimizer {
        Optimizer::Sgd { lr, momentum, weight_decay } => {
            format!("{{name: sgd, lr: {lr:?}, momentum: {momentum:?}, weight_decay: {weight_decay:?}}}")
        }
        Optimizer::Adagrad {
            lr,
            weight_decay,
            initial_accumulator_value,
            g_square_momentum,
            eps,
            vectorwise_shared,
        } => format!(
            "{{name: adagrad, lr: {lr:?}, initial_accumulator_value: {initial_accumulator_value:?}, weight_decay: \
             {weight_decay:?}, g_square_momentum: {g_square_momentum:?}, eps: {eps:?}, vectorwise_shared: \
             {vectorwise_shared}}}"
        ),
        Optimizer::Adam { lr, beta1, beta2, weight_decay, eps } => format!(
            "{{name: adam, lr: {lr:?}, betas: [{beta1:?}, {beta2:?}], weight_decay: {weight_decay:?}, eps: {eps:?}}}"
        ),
    }
}

/// An initializer with all its parameters, as in the file.
fn initializer_text(initializer: &Initializer) -> String {
    match initializer {
        Initializer::Zero => "{name: zero}".into(),
        Initializer::Uniform { low, high } => format!("{{name: uniform, low: {low:?}, high: {high:?}}}"),
        Initializer::Normal { mean, std } => format!("{{name: normal, mean: {mean:?}, std: {std:?}}}"),
        Initializer::Gamma { shape, scale } => format!("{{name: gamma, shape: {shape:?}, scale: {scale:?}}}"),
        Initializer::Poisson { lam } => format!("{{name: poisson, lam: {lam:?}}}"),
        Initializer::InverseSqrtDim => "{name: inverse_sqrt_dim}".into(),
    }
}

fn admission_text(Admission { probability, min_count }: &Admission) -> String {
    format!("{{probability: {probability:?}, min_count: {min_count}}}")
}

impl TableSettings {
    /// The settings that differ from the defaults, as readable `key value` entries.
    pub fn describe(&self) -> Vec<String> {
        let defaults = described(&Self::default());
        let own = described(self).into_iter().zip(defaults).filter(|(own, default)| own != default);
        own.map(|((key, value), _)| format!("{key} {value}")).collect()
    }
}

/// A key of a slot whose value is a mapping, such as `optimizer`.
struct Entry<'r> {
    reader: &'r mut Reader,
    path: String,
}

impl Entry<'_> {
    fn optimizer(&mut self, node: &Node) -> Option<Optimizer> {
        let (name, section) = self.reader.named(node, &self.path, OPTIMIZERS)?;
        // NaN, which is in no range, replaces a missing or malformed number, so that `check` reports all errors
        // together.
        let number = |key: &str, default: f32| match section.get(key) {
            None => default,
            Some(node) => node.as_number().unwrap_or(f32::NAN),
        };
        let weight_decay = number("weight_decay", 0.0);
        let optimizer = match name {
            OptimizerName::Sgd => {
                Optimizer::Sgd { lr: number("lr", f32::NAN), momentum: number("momentum", 0.0), weight_decay }
            }
            OptimizerName::Adagrad => {
                let path = format!("{}.vectorwise_shared", self.path);
                Optimizer::Adagrad {
                    lr: number("lr", 1e-2),
                    weight_decay,
                    initial_accumulator_value: number("initial_accumulator_value", 1e-2),
                    g_square_momentum: number("g_square_momentum", 1.0),
                    eps: number("eps", 1e-10),
                    vectorwise_shared: self.reader.boolean(&section, &path).unwrap_or(false),
                }
            }
            OptimizerName::Adam => {
                let (beta1, beta2) = betas(&section);
                Optimizer::Adam {
                    lr: number("lr", 1e-3),
                    beta1,
                    beta2,
                    weight_decay,
                    eps: number("eps", 1e-8),
                }
            }
        };
        match optimizer.check() {
            Ok(()) => Some(optimizer),
            Err(invalid) => {
                self.report(&section, &invalid);
                None
            }
        }
    }

    /// Report the parameters of an optimizer that are missing or out of range.
    fn report(&mut self, section: &Section<'_>, invalid: &[InvalidNumber]) {
        let mut keys: Vec<(&str, String)> = invalid.iter().map(key_and_range).collect();
        keys.dedup();
        for (key, allowed) in keys {
            let (place, found) = match section.get(key) {
                None => (section.place, "missing".into()),
                Some(node) => (node.place, format!("found {}", node.found())),
            };
            self.reader.error(place, &format!("{}.{key}", self.path), format!("{found}, allowed: {allowed}"));
        }
    }

    fn initializer(&mut self, node: &Node) -> Option<Initializer> {
        let (name, section) = self.reader.named(node, &self.path, INITIALIZERS)?;
        let section = &section;
        match name {
            InitializerName::Zero => Some(Initializer::Zero),
            InitializerName::Uniform => {
                let low = self.required(section, "low", ANY);
                let high = self.required(section, "high", low.unwrap_or(f32::MIN)..=f32::MAX);
                Some(Initializer::Uniform { low: low?, high: high? })
            }
            InitializerName::Normal => {
                let mean = self.number(section, "mean", ANY, 0.0);
                let std = self.number(section, "std", AT_LEAST_ZERO, 0.01);
                Some(Initializer::Normal { mean: mean?, std: std? })
            }
            InitializerName::Gamma => {
                let shape = self.required(section, "shape", ABOVE_ZERO);
                let scale = self.number(section, "scale", AT_LEAST_ZERO, 1.0);
                Some(Initializer::Gamma { shape: shape?, scale: scale? })
            }
            InitializerName::Poisson => {
                let lam = self.required(section, "lam", 0.0..=MAX_POISSON_MEAN)?;
                Some(Initializer::Poisson { lam })
            }
            InitializerName::InverseSqrtDim => Some(Initializer::InverseSqrtDim),
        }
    }

    fn admission(&mut self, node: &Node) -> Option<Admission> {
        let section = self.reader.section(node, &self.path, &["probability", "min_count"]);
        let default = Admission::default();
        let probability = self.number(&section, "probability", SHARE, default.probability);
        let min_count = match section.get("min_count") {
            None => Some(default.min_count),
            Some(_) => {
                let path = format!("{}.min_count", self.path);
                let most = u64::from(MAX_MIN_COUNT);
                self.reader.integer(&section, &path, 1..=most).map(|count| count as u32)
            }
        };
        Some(Admission { probability: probability?, min_count: min_count? })
    }

    /// The number under `key`, or `default` if the key is missing. If its value is invalid, records an error and
    /// returns None.
    fn number(
        &mut self,
        section: &Section<'_>,
        key: &str,
        range: RangeInclusive<f32>,
        default: f32,
    ) -> Option<f32> {
        match section.get(key) {
            None => Some(default),
            Some(_) => self.reader.number(section, &format!("{}.{key}", self.path), range),
        }
    }

    /// The number under `key`, which has no default. If it is missing or invalid, records an error and returns None.
    fn required(&mut self, section: &Section<'_>, key: &str, range: RangeInclusive<f32>) -> Option<f32> {
        let path = format!("{}.{key}", self.path);
        if section.get(key).is_none() {
            let message = format!("missing, allowed: a number from {:?} to {:?}", range.start(), range.end());
            self.reader.error(section.place, &path, message);
        }
        self.reader.number(section, &path, range)
    }
}

/// The key of an optimizer parameter in the file, and its allowed values.
fn key_and_range(invalid: &InvalidNumber) -> (&'static str, String) {
    let InvalidNumber { name, allowed, .. } = invalid;
    match *name {
        "beta1" | "beta2" => ("betas", "a list of two numbers of at least 0 and below 1".into()),
        key => (key, format!("a number from {:?} to {:?}", allowed.start(), allowed.end())),
    }
}

/// Read `[beta1, beta2]`, or return the defaults if the key is missing. Both are NaN if the value is anything
/// else.
fn betas(section: &Section<'_>) -> (f32, f32) {
    let Some(node) = section.get("betas") else { return (0.9, 0.999) };
    let numbers = match &node.value {
        Value::Sequence(values) => match &values[..] {
            [beta1, beta2] => beta1.as_number().zip(beta2.as_number()),
            _ => None,
        },
        _ => None,
    };
    numbers.unwrap_or((f32::NAN, f32::NAN))
}
