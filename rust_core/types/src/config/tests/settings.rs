//! Tests of the settings of a table in its slot.

use super::said;
use crate::config::EmbeddingConfig;
use crate::schema::{Admission, Dtype, Initializer, Optimizer, Rounding, TableSettings};

/// The settings of the table of a slot with these keys.
fn settings(keys: &str) -> TableSettings {
    let text = format!("slots_config: {{age: {{dim: 8, {keys}}}}}");
    EmbeddingConfig::parse(&text, "f").unwrap().config.schema.tables[0].settings
}

/// The error messages for a slot `age` with these keys, without the path of the slot.
fn refused(keys: &str) -> Vec<String> {
    let said = said(EmbeddingConfig::parse(&format!("slots_config: {{age: {{dim: 8, {keys}}}}}"), "f"));
    let after = |line: &String| line.split_once("slots_config.age.").unwrap().1.to_owned();
    said.iter().map(after).collect()
}

#[test]
fn a_slot_that_says_nothing_follows_the_run() {
    assert_eq!(settings("pooling: sum"), TableSettings::default());
    assert_eq!(settings("dtype: f32, rounding: nearest"), TableSettings::default());
}

#[test]
fn every_setting_is_read() {
    let all = settings(
        "dtype: bf16, rounding: stochastic, ttl: 1_000, admission: {probability: 0.5, min_count: 3}, \
         init: {name: normal, std: 0.1}, optimizer: {name: sgd, lr: 0.5}",
    );
    let expected = TableSettings {
        dtype: Dtype::Bf16,
        rounding: Rounding::Stochastic,
        optimizer: Some(Optimizer::Sgd { lr: 0.5, momentum: 0.0, weight_decay: 0.0 }),
        initializer: Some(Initializer::Normal { mean: 0.0, std: 0.1 }),
        admission: Some(Admission { probability: 0.5, min_count: 3 }),
        ttl: Some(1_000),
    };
    assert_eq!(all, expected);
    assert_eq!(settings("admission: {min_count: 2}").admission.unwrap().probability, 1.0);
    assert_eq!(settings("admission: {probability: 0}").admission.unwrap().min_count, 1);
}

/// The names, parameters and defaults must be those of `persia.embedding.optim`.
#[test]
fn optimizers_have_the_defaults_of_their_python_classes() {
    let optimizer = |keys: &str| settings(&format!("optimizer: {{{keys}}}")).optimizer.unwrap();
    let adam = Optimizer::Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, eps: 1e-8 };
    assert_eq!(optimizer("name: adam"), adam);
    let adam = Optimizer::Adam { lr: 1.0, beta1: 0.5, beta2: 0.0, weight_decay: 0.25, eps: 1e-3 };
    assert_eq!(optimizer("name: adam, lr: 1, betas: [0.5, 0], weight_decay: .25, eps: 1e-3"), adam);
    let adagrad = Optimizer::Adagrad {
        lr: 1e-2,
        weight_decay: 0.0,
        initial_accumulator_value: 1e-2,
        g_square_momentum: 1.0,
        eps: 1e-10,
        vectorwise_shared: false,
    };
    assert_eq!(optimizer("name: adagrad"), adagrad);
    assert_eq!(optimizer("name: adagrad, vectorwise_shared: true").state_len(8), 1);
}

#[test]
fn initialisers_are_read() {
    for (keys, expected) in [
        ("name: zero", Initializer::Zero),
        ("name: uniform, low: -1, high: 1e-1", Initializer::Uniform { low: -1.0, high: 0.1 }),
        ("name: normal", Initializer::Normal { mean: 0.0, std: 0.01 }),
        ("name: gamma, shape: 2", Initializer::Gamma { shape: 2.0, scale: 1.0 }),
        ("name: poisson, lam: 0.5", Initializer::Poisson { lam: 0.5 }),
        ("name: inverse_sqrt_dim", Initializer::InverseSqrtDim),
    ] {
        assert_eq!(settings(&format!("init: {{{keys}}}")).initializer, Some(expected), "{keys}");
    }
}

#[test]
fn settings_are_described_as_in_the_file() {
    for text in [
        "optimizer {name: sgd, lr: 0.5, momentum: 0.9, weight_decay: 1e-6}",
        "optimizer {name: adagrad, lr: 0.01, initial_accumulator_value: 0.1, weight_decay: 0.0, g_square_momentum: \
         1.0, eps: 1e-10, vectorwise_shared: true}",
        "optimizer {name: adam, lr: 0.001, betas: [0.9, 0.999], weight_decay: 0.0, eps: 1e-8}",
        "init {name: zero}",
        "init {name: uniform, low: -0.05, high: 0.05}",
        "init {name: normal, mean: 0.0, std: 0.1}",
        "init {name: gamma, shape: 2.0, scale: 1.0}",
        "init {name: poisson, lam: 0.5}",
        "init {name: inverse_sqrt_dim}",
        "admission {probability: 0.5, min_count: 3}",
    ] {
        assert_eq!(settings(&text.replacen(' ', ": ", 1)).describe(), [text]);
    }
}

#[test]
fn each_mistake_is_named_with_what_is_allowed() {
    for (keys, expected) in [
        ("dtype: f8", "dtype: found `f8`, allowed: f32, f16, bf16"),
        ("dtype: f16, rounding: up", "rounding: found `up`, allowed: nearest, stochastic"),
        (
            "rounding: stochastic",
            "rounding: found `stochastic` for rows of f32, which are not rounded; allowed: nearest, or set `dtype: f16` \
             or `dtype: bf16`",
        ),
        ("ttl: 0", "ttl: found `0`, allowed: a whole number from 1 to 4294967295"),
        ("init: zero", "init: found `zero`, allowed: a mapping (`key: value` lines)"),
        (
            "init: {std: 1}",
            "init.name: missing, allowed: zero, uniform, normal, gamma, poisson, inverse_sqrt_dim",
        ),
        (
            "optimizer: {name: adagrat}",
            "optimizer.name: found `adagrat`, allowed: sgd, adagrad, adam; did you mean `adagrad`?",
        ),
        ("optimizer: {name: [sgd]}", "optimizer.name: found a list, allowed: sgd, adagrad, adam"),
        ("optimizer: {name: sgd}", "optimizer.lr: missing, allowed: a number from 0.0 to 3.4028235e38"),
        (
            "optimizer: {name: adam, momentum: 1}",
            "optimizer.momentum: unknown key; allowed: name, lr, betas, weight_decay, eps",
        ),
        (
            "optimizer: {name: adam, betas: [0.9, 1]}",
            "optimizer.betas: found a list, allowed: a list of two numbers of at least 0 and below 1",
        ),
        (
            "init: {name: uniform, low: 1, high: 0}",
            "init.high: found `0`, allowed: a number from 1.0 to 3.4028235e38",
        ),
        ("init: {name: poisson, lam: 501}", "init.lam: found `501`, allowed: a number from 0.0 to 500.0"),
        ("admission: 0.5", "admission: found `0.5`, allowed: a mapping (`key: value` lines)"),
        (
            "admission: {min_counts: 2}",
            "admission.min_counts: unknown key, did you mean `min_count`?; allowed: probability, min_count",
        ),
        (
            "admission: {min_count: 65536}",
            "admission.min_count: found `65536`, allowed: a whole number from 1 to 65535",
        ),
        (
            "admission: {probability: 1.5}",
            "admission.probability: found `1.5`, allowed: a number from 0.0 to 1.0",
        ),
    ] {
        assert_eq!(refused(keys), [expected], "{keys}");
    }
    for (keys, expected) in [
        ("name: sgd, lr: 1, momentum: 1", "momentum: found `1`, allowed: a number from 0.0 to 0.99999994"),
        ("name: adam, eps: 0", "eps: found `0`, allowed: a number from 1.1754944e-38 to 1e30"),
        ("name: adagrad, eps: 0", "eps: found `0`, allowed: a number from 1.1754944e-38 to 1e30"),
        ("name: adagrad, lr: none", "lr: found `none`, allowed: a number from 0.0 to 3.4028235e38"),
    ] {
        assert_eq!(refused(&format!("optimizer: {{{keys}}}")), [format!("optimizer.{expected}")]);
    }
    let both = refused("optimizer: {name: sgd, lr: -1, momentum: 1, weight_decay: x}");
    assert_eq!(both.len(), 3, "{both:?}");
}

#[test]
fn slots_of_one_group_must_agree() {
    let text = |one: &str, other: &str| {
        format!("slots_config: {{a: {{dim: 4{one}}}, b: {{dim: 4{other}}}}}\nfeature_groups: {{g: [a, b]}}")
    };
    for (one, other, expected) in [
        (", dtype: f16", "", "the slot `b` has dtype f32 and `a` has dtype f16"),
        (", ttl: 5", ", ttl: 6", "the slot `b` has ttl 6 and `a` has ttl 5"),
        ("", ", init: {name: zero}", "the slot `b` has init {name: zero} and `a` has init none"),
        (
            ", optimizer: {name: sgd, lr: 1}",
            "",
            "the slot `b` has optimizer none and `a` has optimizer {name: sgd, lr: 1.0, momentum: 0.0, weight_decay: 0.0}",
        ),
    ] {
        let said = said(EmbeddingConfig::parse(&text(one, other), "f"));
        let tail = "; slots of one group share a table: set both to the same value";
        assert_eq!(said, [format!("line 2, column 25: feature_groups.g: {expected}{tail}")]);
    }
    let agreed = EmbeddingConfig::parse(&text(", dtype: f16, ttl: 5", ", ttl: 5, dtype: f16"), "f").unwrap();
    assert_eq!(agreed.config.schema.tables.len(), 1);
    assert_eq!(agreed.config.schema.tables[0].settings.describe(), ["dtype f16", "ttl 5"]);
}
