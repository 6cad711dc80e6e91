//! Tests the ids of fixed values. Checkpoints and served models depend on them.

use persia_features::hash::{CROSS_SEED, SEED, hash_cross, hash_text};

use crate::{SERVING, features, from_json, ids};

/// The ids were computed with the reference implementation: `xxhash.xxh3_64_intdigest(text,
/// seed=0x706572736961)`.
#[test]
fn strings_have_the_ids_of_the_reference_implementation() {
    assert_eq!((SEED, CROSS_SEED), (0x7065_7273_6961, 0x78_7065_7273_6961));
    for (text, id) in PINNED {
        assert_eq!(hash_text(text.as_bytes()), *id, "{text:?}");
    }
    assert_eq!(hash_cross(&[1, 2]), CROSSES[0]);
    assert_eq!(hash_cross(&[2, 1]), CROSSES[1]);
    assert_eq!(hash_cross(&[1, 2, 3]), CROSSES[2]);
}

#[test]
fn values_become_ids_by_the_documented_rules() {
    let strings = features("u: {type: id, dim: 2, values: string}").transform(Default::default()).unwrap();
    let json = r#"[{"u": "a"}, {"u": ""}, {"u": null}, {"u": "Ab"}]"#;
    let null = hash_text(b"\xffnull");
    let expected = [hash_text(b"a"), hash_text(b""), null, hash_text(b"Ab")];
    assert_eq!(ids(&from_json(&strings, json, SERVING).unwrap()).concat(), expected);
    assert_eq!(null, NULL);

    let lower = features("u: {type: id, dim: 2, values: string, lower: true, prefix: 'P:'}");
    let lower = lower.transform(Default::default()).unwrap();
    let json = "[{\"u\": \"AbÄ\"}, {\"u\": null}]";
    let expected = [hash_text("P:abÄ".as_bytes()), hash_text(b"P:\xffnull")];
    assert_eq!(ids(&from_json(&lower, json, SERVING).unwrap()).concat(), expected);

    let integers = features("u: {type: id, dim: 2, values: integer}").transform(Default::default()).unwrap();
    let json = r#"[{"u": 7}, {"u": -1}, {"u": 18446744073709551615}, {"u": true}, {"u": null}]"#;
    let expected = [7, u64::MAX, u64::MAX, 1, null];
    assert_eq!(ids(&from_json(&integers, json, SERVING).unwrap()).concat(), expected);

    let prefixed = features("u: {type: id, dim: 2, values: integer, prefix: 'u'}");
    let prefixed = prefixed.transform(Default::default()).unwrap();
    let samples = from_json(&prefixed, r#"[{"u": 7}, {"u": -7}]"#, SERVING).unwrap();
    assert_eq!(ids(&samples).concat(), [hash_text(b"u7"), hash_text(b"u-7")]);
}

const LONG: &str = concat!(
    "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789",
    "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789",
    "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
);
const PINNED: &[(&str, u64)] = &[
    ("", 0x976a81c746055e0a),
    ("a", 0xa29210c684234b49),
    ("007", 0x657e872f7d9457b2),
    ("user_42", 0xdafd4fa16f8464ce),
    ("Zürich", 0xb36d0565b409c451),
    ("日本語", 0xcc9e00f9d98763bb),
    ("https://example.org/a/b?c=d&e=f", 0xcd8455975dfe7792),
    (LONG, 0xa1315535bd4efe8a),
];
const CROSSES: [u64; 3] = [0x7f1000af4963aedb, 0xe8c4174f3ec76c9b, 0xa677ef23d9423582];
const NULL: u64 = 0x5d3d26c343cf3172;
