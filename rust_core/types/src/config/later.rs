//! Settings of PersiaML that this version does not have yet. The commit that adds a feature removes its line.

use super::tree::{Node, Value};

/// A key that accepts only some of its values yet.
#[derive(Debug)]
pub(super) struct Later {
    /// The key.
    pub(super) key: &'static str,
    /// The accepted values; empty when the key itself is refused.
    pub(super) accepted: &'static [&'static str],
    /// The missing feature.
    pub(super) feature: &'static str,
}

/// Of `common_config`.
pub(super) const COMMON: &[Later] =
    &[Later { key: "job_type", accepted: &["Train", "Eval"], feature: "serving, `Infer`" }];

/// Of `embedding_parameter_server_config`.
pub(super) const SERVER: &[Later] = &[Later {
    key: "enable_incremental_update",
    accepted: &["false"],
    feature: "incremental updates, `true`",
}];

impl Later {
    /// Whether `node` is accepted by this version. A number or a boolean in quotes is a word, and is not.
    pub(super) fn accepts(&self, node: &Node) -> bool {
        let Value::Scalar { text, quoted } = &node.value else { return false };
        let word = !matches!(text.as_str(), "0" | "true" | "false");
        (word || !quoted) && self.accepted.contains(&text.as_str())
    }
}
