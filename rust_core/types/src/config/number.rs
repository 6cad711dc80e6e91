//! Numbers in the notations that are common in YAML.

/// The number above which an `f64` does not represent every integer.
const EXACT_F64: f64 = 9_007_199_254_740_992.0;

/// Read `1000000`, `1_000_000`, `1e6`, `0x10`, `0o17` or `0b1`. None for anything else, including `010`, which YAML 1.1
/// reads as 8 and YAML 1.2 as 10.
pub(super) fn whole_number(text: &str) -> Option<u64> {
    let digits = separated(text.strip_prefix('+').unwrap_or(text))?;
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(rest) = digits.strip_prefix(prefix) {
            return if rest.starts_with('+') { None } else { u64::from_str_radix(rest, radix).ok() };
        }
    }
    if digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    if !digits.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok().or_else(|| {
        let float: f64 = digits.parse().ok()?;
        (float.fract() == 0.0 && float <= EXACT_F64).then_some(float as u64)
    })
}

/// Read `0.5`, `-1`, `.5`, `1e-3` or `1_000.0` as the nearest f32. None for anything else, including infinities, NaN
/// and numbers beyond the range of f32.
pub(super) fn number(text: &str) -> Option<f32> {
    let digits = separated(text)?;
    let unsigned = digits.strip_prefix(['+', '-']).unwrap_or(&digits);
    if !unsigned.starts_with(|first: char| first.is_ascii_digit() || first == '.') {
        return None;
    }
    digits.parse().ok().filter(|number: &f32| number.is_finite())
}

/// Remove every `_` from the text. None unless each is between two digits, which may be hexadecimal.
fn separated(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let digit = |place: Option<&u8>| place.is_some_and(u8::is_ascii_hexdigit);
    for (place, _) in bytes.iter().enumerate().filter(|(_, byte)| **byte == b'_') {
        if place == 0 || !digit(bytes.get(place - 1)) || !digit(bytes.get(place + 1)) {
            return None;
        }
    }
    Some(text.replace('_', ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_number_is_read() {
        for text in
            ["1000000000", "1_000_000_000", "1e9", "1E9", "1.0e9", "1e+9", "+1000000000", "0x3b9aca00"]
        {
            assert_eq!(whole_number(text), Some(1_000_000_000), "{text}");
        }
        assert_eq!(whole_number("0"), Some(0));
        assert_eq!(whole_number("0o17"), Some(15));
        assert_eq!(whole_number("0b11"), Some(3));
        assert_eq!(whole_number("18446744073709551615"), Some(u64::MAX));
    }

    #[test]
    fn every_spelling_of_a_fraction_is_read() {
        for (text, value) in [
            ("0.5", 0.5),
            (".5", 0.5),
            ("-1", -1.0),
            ("1e-3", 1e-3),
            ("+1_0.5", 10.5),
            ("2.", 2.0),
            ("0", 0.0),
        ] {
            assert_eq!(number(text), Some(value), "{text}");
        }
        for text in ["", ".", "-", "inf", "nan", "-inf", "1e39", "--1", "1.5.", "0x10", "1,5", "half", "e5"] {
            assert_eq!(number(text), None, "{text}");
        }
    }

    #[test]
    fn anything_else_is_no_number() {
        for text in [
            "",
            "+",
            "-1",
            "1.5",
            "1e-3",
            "010",
            "_1",
            "1_",
            "1__0",
            "0x",
            "0x+1",
            "++1",
            "+-1",
            "nan",
            "inf",
            "1e300",
            "18446744073709551616",
            "eight",
            "1 000",
            "1,000",
        ] {
            assert_eq!(whole_number(text), None, "{text}");
        }
    }
}
