//! The rules by which values become ids. They never change, because checkpoints and served models depend on them.
//!
//! | value | id |
//! |---|---|
//! | string | `xxh3_64(prefix ‖ bytes, SEED)`, of its UTF-8 bytes |
//! | integer, boolean, interval, date part | the number modulo 2^64; with a prefix, the id of its decimal text |
//! | null | `xxh3_64(prefix ‖ 0xFF "null", SEED)`, which differs from every string: UTF-8 has no byte 0xFF |
//! | cross | `xxh3_64(id_1 ‖ … ‖ id_n, CROSS_SEED)`, each id as 8 bytes, little-endian |

use twox_hash::XxHash3_64;

/// The hash seed for strings: the bytes of "persia" as a number.
pub const SEED: u64 = 0x0000_7065_7273_6961;
/// The hash seed for crosses: the bytes of "xpersia" as a number.
pub const CROSS_SEED: u64 = 0x0078_7065_7273_6961;

const NULL: &[u8] = b"\xffnull";

/// The id of a string.
#[inline]
pub fn hash_text(text: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(SEED, text)
}

/// The id of the combination of `ids`, in order.
#[inline]
pub fn hash_cross(ids: &[u64]) -> u64 {
    match *ids {
        [one, other] => {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&one.to_le_bytes());
            bytes[8..].copy_from_slice(&other.to_le_bytes());
            XxHash3_64::oneshot_with_seed(CROSS_SEED, &bytes)
        }
        _ => {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            XxHash3_64::oneshot_with_seed(CROSS_SEED, &bytes)
        }
    }
}

/// Hashes values after a prefix.
#[derive(Debug, Clone)]
pub(crate) struct IdHasher {
    prefix: Vec<u8>,
    lower: bool,
    null: u64,
}

impl IdHasher {
    pub(crate) fn new(prefix: &str, lower: bool) -> Self {
        let null = hash_text(&[prefix.as_bytes(), NULL].concat());
        Self { prefix: prefix.as_bytes().to_vec(), lower, null }
    }

    /// The id of a null.
    pub(crate) fn null(&self) -> u64 {
        self.null
    }

    /// The id of a string. `scratch` is a buffer that is reused.
    #[inline]
    pub(crate) fn text(&self, text: &[u8], scratch: &mut Vec<u8>) -> u64 {
        let lowers = self.lower && text.iter().any(u8::is_ascii_uppercase);
        if self.prefix.is_empty() && !lowers {
            return hash_text(text);
        }
        scratch.clear();
        scratch.extend_from_slice(&self.prefix);
        scratch.extend_from_slice(text);
        if self.lower {
            let start = self.prefix.len();
            scratch[start..].make_ascii_lowercase();
        }
        hash_text(scratch)
    }

    /// The id of a signed integer.
    #[inline]
    pub(crate) fn int(&self, value: i64) -> u64 {
        if self.prefix.is_empty() { value as u64 } else { self.digits(&value.to_string()) }
    }

    /// The id of an unsigned integer.
    #[inline]
    pub(crate) fn uint(&self, value: u64) -> u64 {
        if self.prefix.is_empty() { value } else { self.digits(&value.to_string()) }
    }

    #[cold]
    fn digits(&self, digits: &str) -> u64 {
        hash_text(&[&self.prefix, digits.as_bytes()].concat())
    }
}
