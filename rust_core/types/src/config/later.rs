//! PersiaML settings that Persia does not support yet. When Persia supports a setting, remove the line of the setting
//! here.

use super::tree::{Node, Value};

/// A key for which only some values, or none, are supported yet.
#[derive(Debug)]
pub(super) struct Later {
    /// The key.
    pub(super) key: &'static str,
    /// The accepted values; empty if the key itself is refused.
    pub(super) accepted: &'static [&'static str],
    /// The feature that is missing in this version.
    pub(super) feature: &'static str,
}

/// The unsupported settings of `embedding_parameter_server_config`.
pub(super) const SERVER: &[Later] =
    &[Later { key: "enable_incremental_update", accepted: &["false"], feature: "incremental updates" }];

impl Later {
    /// Whether this version accepts `node`. A quoted number or boolean is a string, and is not accepted.
    pub(super) fn accepts(&self, node: &Node) -> bool {
        let Value::Scalar { text, quoted } = &node.value else { return false };
        let word = !matches!(text.as_str(), "0" | "true" | "false");
        (word || !quoted) && self.accepted.contains(&text.as_str())
    }
}
