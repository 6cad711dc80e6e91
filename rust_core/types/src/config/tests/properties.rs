//! Property tests of parsing arbitrary text.

use proptest::prelude::*;

use crate::config::{ConfigErrors, EmbeddingConfig, GlobalConfig, Parsed};

/// Fragments of YAML and of the configuration files. Random sequences of them reach more code than random
/// characters.
const WORDS: &[&str] = &[
    "slots_config",
    "feature_groups",
    "feature_index_prefix_bit",
    "common_config",
    "embedding_worker_config",
    "embedding_parameter_server_config",
    "capacity",
    "dim",
    "pooling",
    "job_name",
    "age",
    "job",
    ": ",
    ":",
    "\n",
    "\n  ",
    "\n    ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    "&a ",
    "*a",
    "!!int ",
    "'",
    "\"",
    "|\n",
    ">\n",
    "#",
    " ",
    "? ",
    "%TAG ! x\n",
    "---\n",
    "...\n",
    "8",
    "1e9",
    "true",
    "mean",
    "~",
    "<<: ",
    "\t",
    "\\x",
    "é",
    "\u{0}",
    "\u{feff}",
];

/// Check that every error has a position in the text, and that the message lists all errors.
fn check<T>(text: &str, result: Result<Parsed<T>, ConfigErrors>) {
    let Err(errors) = result else { return };
    assert!(!errors.errors.is_empty());
    assert!(errors.to_string().lines().count() > errors.errors.len());
    for error in &errors.errors {
        assert!(error.line >= 1 && error.column >= 1, "{error}");
        assert!(error.line <= text.lines().count() + 1, "{error} of {text:?}");
        assert!(!error.message.is_empty());
        assert!(!error.message.contains('\n'), "{error}");
    }
}

fn check_both(text: &str) {
    check(text, EmbeddingConfig::parse(text, "f"));
    check(text, GlobalConfig::parse(text, "f"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_panics(text in "\\PC{0,200}") {
        check_both(&text);
    }

    #[test]
    fn no_sequence_of_yaml_panics(words in prop::collection::vec(prop::sample::select(WORDS), 0..60)) {
        check_both(&words.concat());
    }

    #[test]
    fn no_damage_to_a_good_file_panics(cut in 0usize..200, word in prop::sample::select(WORDS)) {
        let good = "feature_index_prefix_bit: 8\nslots_config:\n  age: {dim: 8, pooling: mean}\n  job:\n    dim: 8\n\
                    feature_groups:\n  g: [age, job]\n";
        let cut = cut.min(good.len());
        check_both(&good[..cut]);
        check_both(&format!("{}{word}{}", &good[..cut], &good[cut..]));
    }

    #[test]
    fn a_valid_schema_is_whole(dims in prop::collection::vec(1usize..5, 1..20), split in 0usize..20) {
        let mut text = String::from("slots_config:\n");
        for (slot, dim) in dims.iter().enumerate() {
            text += &format!("  s{slot}: {{dim: {dim}}}\n");
        }
        let group: Vec<usize> = (0..dims.len().min(split)).filter(|slot| dims[*slot] == dims[0]).collect();
        if !group.is_empty() {
            let names: Vec<String> = group.iter().map(|slot| format!("s{slot}")).collect();
            text += &format!("feature_groups: {{shared: [{}]}}\n", names.join(", "));
        }
        let schema = EmbeddingConfig::parse(&text, "f").unwrap().config.schema;
        prop_assert_eq!(schema.slots.len(), dims.len());
        prop_assert_eq!(schema.tables.len(), dims.len() - group.len().saturating_sub(1));
        for (index, slot) in schema.slots.iter().enumerate() {
            let table = &schema.tables[slot.table];
            prop_assert_eq!(table.dim, dims[index]);
            let expected = if group.contains(&index) { "shared".to_string() } else { slot.name.clone() };
            prop_assert_eq!(&table.name, &expected);
        }
    }
}
