//! Tests of `embedding_config.yml`.

use super::said;
use crate::config::EmbeddingConfig;
use crate::schema::{HashStack, Pooling};

/// A realistic file with comments, a list in flow style and one in block style, an anchor, and PersiaML keys.
const REAL: &str = "
feature_index_prefix_bit: 12
slots_config:
  # The user.
  age: &wide
    dim: 16
  workclass:
    dim: 8
    embedding_summation: true
    sqrt_scaling: true
    sample_fixed_size: 20
    hash_stack_config: {hash_stack_rounds: 0, embedding_size: 0}
  education: {dim: 0x10, pooling: mean, dtype: f32}
  'native country': *wide
  clicks: {dim: 8, index_prefix: 0}
feature_groups:
  country_and_age: [native country, age]
  clicks:
    - clicks
    - workclass
";

fn parse(text: &str) -> Vec<String> {
    said(EmbeddingConfig::parse(text, "embedding_config.yml"))
}

/// The error messages for one slot `age` with these keys.
fn slot(keys: &str) -> Vec<String> {
    parse(&format!("slots_config:\n  age: {{{keys}}}"))
}

#[test]
fn a_real_file_is_read() {
    let parsed = EmbeddingConfig::parse(REAL, "embedding_config.yml").unwrap();
    let schema = &parsed.config.schema;
    assert_eq!(parsed.config.feature_index_prefix_bit, 12);
    let tables: Vec<_> = schema.tables.iter().map(|table| (table.name.as_str(), table.dim)).collect();
    assert_eq!(tables, [("country_and_age", 16), ("clicks", 8), ("education", 16)]);
    let slots: Vec<_> = schema
        .slots
        .iter()
        .map(|slot| (slot.name.as_str(), slot.table, slot.pooling, slot.sqrt_scaling))
        .collect();
    assert_eq!(
        slots,
        [
            ("age", 0, Pooling::Sum, false),
            ("workclass", 1, Pooling::Sum, true),
            ("education", 2, Pooling::Mean, false),
            ("native country", 0, Pooling::Sum, false),
            ("clicks", 1, Pooling::Sum, false),
        ]
    );
    let warnings: Vec<_> = parsed.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "line 15, column 34: slots_config.clicks.index_prefix: accepted, but has no effect: ids keep all 64 bits"
        ]
    );
}

#[test]
fn absent_keys_have_their_documented_defaults() {
    let parsed = EmbeddingConfig::parse("slots_config: {a: {dim: 4}, b: {dim: 2}}", "f").unwrap();
    assert_eq!(parsed.warnings, []);
    assert_eq!(parsed.config.feature_index_prefix_bit, 8);
    for (index, slot) in parsed.config.schema.slots.iter().enumerate() {
        assert_eq!((slot.table, slot.pooling, slot.sqrt_scaling), (index, Pooling::Sum, false));
        assert_eq!(parsed.config.schema.tables[index].name, slot.name);
    }
}

#[test]
fn raw_features_and_hash_stacks_are_read() {
    let text = "slots_config:
  clicks: {dim: 8, embedding_summation: false, sample_fixed_size: 5}
  buys: {dim: 8, embedding_summation: false}
  user: {dim: 4, hash_stack_config: {hash_stack_rounds: 2, embedding_size: 1_000}}";
    let schema = EmbeddingConfig::parse(text, "f").unwrap().config.schema;
    assert_eq!(schema.slots[0].sample_fixed_size, Some(5));
    assert_eq!(schema.slots[1].sample_fixed_size, Some(10));
    assert_eq!(schema.slots[2].sample_fixed_size, None);
    assert_eq!(schema.slots[0].hash_stack, None);
    assert_eq!(schema.slots[2].hash_stack, Some(HashStack { rounds: 2, buckets: 1000 }));
}

#[test]
fn mistakes_in_raw_features_and_hash_stacks_are_named() {
    for (keys, expected) in [
        (
            "embedding_summation: false, pooling: mean",
            "pooling: found `mean` together with `embedding_summation: false`, which pools nothing: remove one of the two",
        ),
        ("embedding_summation: no", "embedding_summation: found `no`, allowed: true, false"),
        (
            "hash_stack_config: {hash_stack_rounds: 2}",
            "hash_stack_config.embedding_size: `hash_stack_rounds: 2` needs a number of rows; allowed: a whole number from 1 to \
             4294967295",
        ),
        (
            "hash_stack_config: {hash_stack_rounds: 2, embedding_size: 0}",
            "hash_stack_config.embedding_size: `hash_stack_rounds: 2` needs a number of rows; allowed: a whole number from 1 to \
             4294967295",
        ),
        (
            "hash_stack_config: {hash_stack_rounds: 65, embedding_size: 9}",
            "hash_stack_config.hash_stack_rounds: found `65`, allowed: a whole number from 0 to 64",
        ),
    ] {
        let said = slot(&format!("dim: 8, {keys}"));
        assert_eq!(said.len(), 1, "{keys}: {said:?}");
        assert!(said[0].ends_with(&format!(": slots_config.age.{expected}")), "{}", said[0]);
    }
    let group = |stack: &str| {
        parse(&format!(
            "slots_config: {{a: {{dim: 8, hash_stack_config: {{hash_stack_rounds: 2, embedding_size: 9}}}}, b: {{dim: 8{stack}}}}}\nfeature_groups: {{g: [a, b]}}"
        ))
    };
    let said = group("");
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("`b` and `a` have different values of hash_stack_config"), "{}", said[0]);
    let text = "slots_config: {a: {dim: 8, hash_stack_config: &h {hash_stack_rounds: 2, embedding_size: 9}}, \
                b: {dim: 8, hash_stack_config: *h}}\nfeature_groups: {g: [a, b]}";
    EmbeddingConfig::parse(text, "f").unwrap();
}

#[test]
fn commented_out_sections_are_empty() {
    let parsed =
        EmbeddingConfig::parse("slots_config: {a: {dim: 4}}\nfeature_groups:\n  # none", "f").unwrap();
    assert_eq!(parsed.config.schema.tables.len(), 1);
}

#[test]
fn each_mistake_in_a_slot_is_named() {
    let whole = "allowed: a whole number from 1 to 4096";
    for (keys, expected) in [
        ("", format!("line 2, column 8: slots_config.age: missing, {whole}").replace("age: m", "age.dim: m")),
        ("dim: 0", format!("line 2, column 14: slots_config.age.dim: found `0`, {whole}")),
        ("dim: 4097", format!("line 2, column 14: slots_config.age.dim: found `4097`, {whole}")),
        ("dim: -8", format!("line 2, column 14: slots_config.age.dim: found `-8`, {whole}")),
        ("dim: 8.5", format!("line 2, column 14: slots_config.age.dim: found `8.5`, {whole}")),
        ("dim: '8'", format!("line 2, column 14: slots_config.age.dim: found \"8\", {whole}")),
        ("dim: [8]", format!("line 2, column 14: slots_config.age.dim: found a list, {whole}")),
        ("dim: ", format!("line 2, column 12: slots_config.age.dim: found nothing, {whole}")),
        (
            "dim: 8, sqrt_scaling: True",
            "line 2, column 31: slots_config.age.sqrt_scaling: found `True`, allowed: true, false".into(),
        ),
        (
            "dim: 8, sqrt_scaling: true, pooling: mean",
            "line 2, column 31: slots_config.age.sqrt_scaling: found `true` together with `pooling: mean`; allowed: false, \
             or `pooling: sum`"
                .into(),
        ),
        (
            "dim: 8, pooling: max",
            "line 2, column 26: slots_config.age.pooling: found `max`, allowed: sum, mean".into(),
        ),
        (
            "dim: 8, sample_fixed_size: 0",
            "line 2, column 36: slots_config.age.sample_fixed_size: found `0`, allowed: a whole number from 1 to \
             65536"
                .into(),
        ),
        (
            "dim: 8, hash_stack_config: 2",
            "line 2, column 36: slots_config.age.hash_stack_config: found `2`, allowed: a mapping (`key: value` lines)"
                .into(),
        ),
    ] {
        assert_eq!(slot(keys), [expected], "{keys}");
    }
}

#[test]
fn an_unknown_key_gets_a_suggestion() {
    let said = slot("dmi: 8, dim: 8");
    assert_eq!(said.len(), 1);
    assert!(
        said[0].starts_with(
            "line 2, column 9: slots_config.age.dmi: unknown key, did you mean `dim`?; allowed: dim, "
        ),
        "{}",
        said[0]
    );
    let said = parse("slot_config: {a: {dim: 8}}");
    assert!(
        said[0].contains("slots_config: missing") || said[1].contains("slots_config: missing"),
        "{said:?}"
    );
    assert!(said.iter().any(|line| line.contains("slot_config: unknown key, did you mean `slots_config`?")));
    let said = slot("dim: 8, zzz: 1");
    assert!(said[0].contains("zzz: unknown key; allowed: dim, "), "{}", said[0]);
}

#[test]
fn a_key_that_appears_twice_is_refused() {
    assert_eq!(
        parse("slots_config:\n  a: {dim: 8}\n  b: {dim: 8}\n  a: {dim: 4}"),
        ["line 4, column 3: slots_config.a: appears twice, first on line 2: remove one"]
    );
    assert_eq!(
        slot("dim: 8, dim: 8"),
        ["line 2, column 17: slots_config.age.dim: appears twice, first on line 2: remove one"]
    );
}

#[test]
fn no_slot_at_all_is_refused() {
    let example = "name at least one slot, such as `age: {dim: 8}`";
    assert_eq!(parse("feature_groups: {}"), [format!("line 1, column 1: slots_config: missing: {example}")]);
    assert_eq!(
        parse("slots_config: {}"),
        [format!("line 1, column 15: slots_config: found no slot: {example}")]
    );
    assert_eq!(
        parse("slots_config:"),
        [format!("line 1, column 13: slots_config: found no slot: {example}")]
    );
    assert_eq!(
        parse("slots_config: [age]"),
        ["line 1, column 15: slots_config: found a list, allowed: a mapping (`key: value` lines)"]
    );
}

#[test]
fn names_are_short_printable_ascii() {
    let long = "n".repeat(129);
    for name in ["''", "' '", "' a'", "größe", "\"a\\tb\"", &long] {
        let said = parse(&format!("slots_config:\n  {name}: {{dim: 8}}"));
        assert_eq!(said.len(), 1, "{name}: {said:?}");
        assert!(said[0].contains("allowed: 1 to 128 printable ASCII characters"), "{}", said[0]);
        let said = parse(&format!("slots_config: {{a: {{dim: 8}}}}\nfeature_groups:\n  {name}: [a]"));
        assert_eq!(said.len(), 1, "{name}: {said:?}");
        assert!(said[0].starts_with("line 3, column 3: feature_groups."), "{}", said[0]);
    }
    EmbeddingConfig::parse(&format!("slots_config: {{{}: {{dim: 8}}}}", "n".repeat(128)), "f").unwrap();
}

#[test]
fn each_mistake_in_a_group_is_named() {
    let slots = "slots_config: {age: {dim: 8}, job: {dim: 8}, town: {dim: 4}}\nfeature_groups:\n";
    for (groups, expected) in [
        (
            "  g: [age, town]",
            "line 3, column 12: feature_groups.g: the slot `town` has dim 4 and `age` has dim 8; slots of one group \
             share a table: make the dims equal",
        ),
        (
            "  g: [age]\n  h: [job, age]",
            "line 4, column 12: feature_groups.h: the slot `age` is in the group `g` already; a slot has one table: \
             remove the slot from one of the two groups",
        ),
        (
            "  g: [age, agge]",
            "line 3, column 12: feature_groups.g: found `agge`, which is not a slot of slots_config, did you mean `age`?",
        ),
        (
            "  g: [xyz]",
            "line 3, column 7: feature_groups.g: found `xyz`, which is not a slot of slots_config",
        ),
        (
            "  g: []",
            "line 3, column 6: feature_groups.g: found an empty list, allowed: a list of one slot or more",
        ),
        ("  g:", "line 3, column 4: feature_groups.g: found nothing, allowed: a list of one slot or more"),
        ("  g: age", "line 3, column 6: feature_groups.g: found `age`, allowed: a list of one slot or more"),
        ("  g: [{age: 1}]", "line 3, column 7: feature_groups.g: found a mapping, allowed: names of slots"),
        ("  g: [age, age]", "line 3, column 12: feature_groups.g: names the slot `age` twice: remove one"),
        (
            "  town: [age, job]",
            "line 3, column 3: feature_groups.town: the slot `town`, which is in no group, has a table of this name \
             too: rename the group, or put the slot into the group",
        ),
        (
            "  - age",
            "line 3, column 3: feature_groups: found a list, allowed: a mapping (`key: value` lines)",
        ),
    ] {
        assert_eq!(parse(&format!("{slots}{groups}")), [expected], "{groups}");
    }
}

#[test]
fn a_dim_that_is_wrong_is_not_reported_again_by_its_group() {
    let said = parse("slots_config: {a: {dim: 8}, b: {dim: no}}\nfeature_groups: {g: [a, b]}");
    assert_eq!(said.len(), 1, "{said:?}");
}

/// `count` slots without a group.
fn many(count: usize) -> String {
    (0..count).map(|slot| format!("\n  s{slot}: {{dim: 1}}")).collect()
}

#[test]
fn more_tables_than_prefix_bits_hold_are_refused_with_both_numbers() {
    let file = |slots: usize, bits: &str| {
        format!("{bits}\nslots_config:{}\nfeature_groups: {{g: [s0, s1]}}", many(slots))
    };
    // A group has two slots, so there is one table fewer than slots.
    EmbeddingConfig::parse(&file(256, ""), "f").unwrap();
    EmbeddingConfig::parse(&file(300, "feature_index_prefix_bit: 9"), "f").unwrap();
    EmbeddingConfig::parse(&file(300, "feature_index_prefix_bit: 0"), "f").unwrap();
    assert_eq!(
        parse(&file(301, "feature_index_prefix_bit: 8")),
        [
            "line 1, column 27: feature_index_prefix_bit: found 8, but 300 tables need more prefix bits (groups: 1, \
             slots without a group: 299); allowed: 9 or more, or 0 for no prefix"
        ]
    );
    let said = parse(&file(257, ""));
    assert_eq!(said.len(), 1, "{said:?}");
    let default = "feature_index_prefix_bit: missing, the default is 8, but 256 tables need more prefix bits";
    assert!(said[0].contains(default), "{said:?}");
    for slots in [2, 300] {
        assert_eq!(
            parse(&file(slots, "feature_index_prefix_bit: 64")),
            ["line 1, column 27: feature_index_prefix_bit: found `64`, allowed: a whole number from 0 to 63"]
        );
    }
}

#[test]
fn the_number_of_slots_is_bounded() {
    let file = |slots: usize| format!("feature_index_prefix_bit: 20\nslots_config:{}", many(slots));
    assert_eq!(EmbeddingConfig::parse(&file(4096), "f").unwrap().config.schema.slots.len(), 4096);
    assert_eq!(
        parse(&file(4097)),
        ["line 3, column 3: slots_config: found 4097 slots, allowed: at most 4096"]
    );
}

#[test]
fn every_mistake_of_a_file_is_reported_at_once() {
    let text = "feature_index_prefix_bit: many
slots_config:
  age: {dim: 0, poling: sum}
  job: {dim: 8, embedding_summation: maybe}
  town: 8
feature_groups:
  g: [age, jobs]
  h: []
colour: red
";
    let errors = EmbeddingConfig::parse(text, "conf/embedding_config.yml").unwrap_err();
    let lines: Vec<usize> = errors.errors.iter().map(|error| error.line).collect();
    assert_eq!(lines, [1, 3, 3, 4, 5, 7, 8, 9], "{errors}");
    let text = errors.to_string();
    assert!(text.starts_with("conf/embedding_config.yml: 8 errors\n  line 1, column 27: "), "{text}");
    assert_eq!(text.lines().count(), 9);
}
