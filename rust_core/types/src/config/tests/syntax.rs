//! Tests of text that is not YAML, and of malicious YAML.

use crate::config::{EmbeddingConfig, MAX_CONFIG_BYTES, MAX_CONFIG_DEPTH};

/// The error message for `text`. There must be exactly one.
fn parse(text: &str) -> String {
    let errors = EmbeddingConfig::parse(text, "f.yml").unwrap_err();
    assert_eq!(errors.errors.len(), 1, "{errors}");
    errors.to_string()
}

#[test]
fn text_that_is_no_yaml_is_refused_with_its_place() {
    for (text, line) in [
        ("slots_config:\n  a: {dim: 8", 2),
        ("a: b: c", 1),
        ("a:\n\t- b", 2),
        ("x: *nobody", 1),
        ("a: 'b", 1),
    ] {
        let said = parse(text);
        assert!(said.contains(": not valid YAML: "), "{said}");
        let place = EmbeddingConfig::parse(text, "f.yml").unwrap_err().errors[0].line;
        assert!((line..=line + 1).contains(&place), "{text:?}: {said}");
    }
}

#[test]
fn an_empty_file_is_refused() {
    for text in ["", "\n\n", "# only a comment\n", "---\n", "~", "null", "\u{feff}"] {
        assert_eq!(parse(text), "f.yml: 1 error\n  line 1, column 1: the file is empty", "{text:?}");
    }
}

#[test]
fn a_root_that_is_no_mapping_is_refused() {
    for (text, found) in [("- a\n- b", "a list"), ("hello", "`hello`"), ("\"8\"", "\"8\"")] {
        let expected = format!("line 1, column 1: found {found}, allowed: a mapping (`key: value` lines)");
        assert_eq!(parse(text), format!("f.yml: 1 error\n  {expected}"));
    }
}

#[test]
fn a_second_document_is_refused() {
    let said = parse("slots_config: {a: {dim: 8}}\n---\nslots_config: {}\n");
    assert!(said.contains("line 2, column 1: a second document begins here"), "{said}");
}

#[test]
fn tags_and_keys_that_are_no_words_are_refused() {
    assert!(parse("slots_config: !!map {}").contains("the tag `"));
    assert!(parse("!a%0ab").contains("the tag `!a\\nb` is not"), "{}", parse("!a%0ab"));
    let place = parse("slots_config:\n  x:\n    \"a\\nb\": 1\n    dim: 8");
    assert!(place.contains("a\\nb") && !place.contains("a\nb"), "{place}");
    assert!(parse("? [a, b]\n: c").contains("line 1, column 3: a key must be a string, found a list"));
}

#[test]
fn a_byte_order_mark_is_skipped() {
    EmbeddingConfig::parse("\u{feff}slots_config: {a: {dim: 8}}", "f.yml").unwrap();
}

#[test]
fn aliases_that_double_themselves_meet_a_limit() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let alias = format!("*a{}", level - 1);
        text += &format!("a{level}: &a{level} [{}]\n", [alias.as_str(); 10].join(", "));
    }
    let said = parse(&text);
    assert!(said.contains("more than 500000 keys and values up to here"), "{said}");
}

#[test]
fn an_alias_inside_its_own_value_is_refused() {
    let said = parse("a: &a [*a]");
    assert!(said.contains("line 1, column 8: "), "{said}");
}

#[test]
fn nesting_meets_a_limit_before_the_stack_does() {
    for text in [
        "- ".repeat(100_000),
        "[".repeat(200),
        (0..100).map(|level| format!("{}a:\n", " ".repeat(level))).collect(),
    ] {
        let said = parse(&text);
        assert!(said.contains(&format!("nested deeper than {MAX_CONFIG_DEPTH} levels")), "{said}");
    }
    // Each anchor is within the limit, but their total is not.
    let deep = "[".repeat(20) + "x" + &"]".repeat(20);
    let said = parse(&format!("a: &a {deep}\nb: {}*a{}", "[".repeat(20), "]".repeat(20)));
    assert!(said.contains("nested deeper than"), "{said}");
}

#[test]
fn a_file_that_is_too_large_is_refused() {
    let said = parse(&"#".repeat(MAX_CONFIG_BYTES + 1));
    assert!(said.contains("the file has 4194305 bytes, the limit is 4194304"), "{said}");
}
