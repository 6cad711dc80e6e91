//! Reads values from the tree, and collects all errors instead of stopping at the first one.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use super::error::{ConfigErrors, Finding};
use super::later::Later;
use super::number::whole_number;
use super::tree::{Key, Node, Place, Value, shorten};
use super::{Parsed, tree};
use crate::limits::MAX_NAME_BYTES;

/// A mapping that is being read, and its position.
#[derive(Debug, Clone, Copy)]
pub(super) struct Section<'a> {
    pub(super) place: Place,
    entries: &'a [(Key, Node)],
}

impl<'a> Section<'a> {
    fn empty(place: Place) -> Self {
        Self { place, entries: &[] }
    }

    /// The value of `key`. If the key occurs twice, this is the first value.
    pub(super) fn get(&self, key: &str) -> Option<&'a Node> {
        self.entries.iter().find(|(known, _)| known.text == key).map(|(_, node)| node)
    }

    /// The keys and their values. Each key occurs once.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a Key, &'a Node)> {
        let mut seen = HashSet::new();
        self.entries.iter().filter(move |(key, _)| seen.insert(&key.text)).map(|(key, node)| (key, node))
    }
}

/// Collects errors and warnings.
#[derive(Debug, Default)]
pub(super) struct Reader {
    errors: Vec<Finding>,
    warnings: Vec<Finding>,
    /// Whether unknown keys are warnings instead of errors.
    pub(super) accepts_unknown_keys: bool,
}

impl Reader {
    /// Parse `text`, and let `read` read values from its root.
    pub(super) fn read<T>(
        text: &str,
        file: &str,
        read: impl FnOnce(&mut Self, &Node) -> T,
    ) -> Result<Parsed<T>, ConfigErrors> {
        let refuse = |errors| ConfigErrors { file: file.into(), errors };
        let root = tree::parse(text).map_err(|error| refuse(vec![error]))?;
        let mut reader = Self::default();
        let config = read(&mut reader, &root);
        if reader.errors.is_empty() {
            reader.warnings.sort_by_key(|warning| (warning.line, warning.column));
            return Ok(Parsed { config, warnings: reader.warnings });
        }
        reader.errors.sort_by_key(|error| (error.line, error.column));
        Err(refuse(reader.errors))
    }

    pub(super) fn error(&mut self, place: Place, path: &str, message: String) {
        self.errors.push(Finding { path: path.into(), ..place.error(message) });
    }

    /// The number of errors so far.
    pub(super) fn error_count(&self) -> usize {
        self.errors.len()
    }

    /// Read `node` as a mapping with any keys. The result is empty for null. It is also empty for any other value
    /// that is not a mapping, and an error is recorded.
    pub(super) fn mapping<'a>(&mut self, node: &'a Node, path: &str) -> Section<'a> {
        let Value::Mapping(entries) = &node.value else {
            if !node.is_mapping() {
                let message = format!("found {}, allowed: a mapping (`key: value` lines)", node.found());
                self.error(node.place, path, message);
            }
            return Section::empty(node.place);
        };
        let mut first: HashMap<&str, Place> = HashMap::new();
        for (key, _) in entries {
            let before = *first.entry(&key.text).or_insert(key.place);
            if before != key.place {
                let message = format!("appears twice, first on line {}: remove one", before.line);
                self.error(key.place, &join(path, &key.text), message);
            }
        }
        Section { place: node.place, entries }
    }

    /// Read `node` as a mapping with no keys except `known`. With `accepts_unknown_keys`, other keys are
    /// warnings.
    pub(super) fn section<'a>(&mut self, node: &'a Node, path: &str, known: &[&str]) -> Section<'a> {
        let section = self.mapping(node, path);
        for (key, _) in section.entries().filter(|(key, _)| !known.contains(&key.text.as_str())) {
            let near = nearest(&key.text, known.iter().copied());
            let near = near.map(|near| format!(", did you mean `{near}`?")).unwrap_or_default();
            let path = join(path, &key.text);
            if self.accepts_unknown_keys {
                let message = format!("unknown key without effect{near}");
                self.warnings.push(Finding { path, ..key.place.error(message) });
            } else {
                let message = format!("unknown key{near}; allowed: {}", known.join(", "));
                self.error(key.place, &path, message);
            }
        }
        section
    }

    /// The section under the last key of `path`. It is empty if the key is missing. It is also empty if its value is
    /// not a mapping, and an error is recorded.
    pub(super) fn child<'a>(&mut self, parent: &Section<'a>, path: &str, known: &[&str]) -> Section<'a> {
        match parent.get(last(path)) {
            Some(node) => self.section(node, path, known),
            None => Section::empty(parent.place),
        }
    }

    /// The integer under the last key of `path`. None if the key is missing. If its value is not an integer in
    /// `range`, records an error and returns None.
    pub(super) fn integer(
        &mut self,
        section: &Section<'_>,
        path: &str,
        range: RangeInclusive<u64>,
    ) -> Option<u64> {
        let node = section.get(last(path))?;
        let number = match &node.value {
            Value::Scalar { text, quoted: false } => whole_number(text),
            _ => None,
        };
        let allowed = number.filter(|number| range.contains(number));
        if allowed.is_none() {
            let message = format!(
                "found {}, allowed: a whole number from {} to {}",
                node.found(),
                range.start(),
                range.end()
            );
            self.error(node.place, path, message);
        }
        allowed
    }

    /// The number under the last key of `path`. None if the key is missing. If its value is not a number in `range`,
    /// records an error and returns None.
    pub(super) fn number(
        &mut self,
        section: &Section<'_>,
        path: &str,
        range: RangeInclusive<f32>,
    ) -> Option<f32> {
        let node = section.get(last(path))?;
        let allowed = node.as_number().filter(|number| range.contains(number));
        if allowed.is_none() {
            let (low, high) = (range.start(), range.end());
            let message = format!("found {}, allowed: a number from {low:?} to {high:?}", node.found());
            self.error(node.place, path, message);
        }
        allowed
    }

    /// Read the mapping `node`. Its key `name` selects one of `kinds`, which lists the other keys of each kind.
    /// Returns the kind and the section. If there is no such kind, records an error and returns None.
    pub(super) fn named<'a, T: Copy>(
        &mut self,
        node: &'a Node,
        path: &str,
        kinds: &[(&str, T, &[&str])],
    ) -> Option<(T, Section<'a>)> {
        self.tagged(node, path, "name", kinds)
    }

    /// Read the mapping `node`. Its key `tag` selects one of `kinds`, which lists the other keys of each kind.
    /// Returns the kind and the section. If there is no such kind, records an error and returns None.
    pub(super) fn tagged<'a, T: Copy>(
        &mut self,
        node: &'a Node,
        path: &str,
        tag: &str,
        kinds: &[(&str, T, &[&str])],
    ) -> Option<(T, Section<'a>)> {
        let words = || kinds.iter().map(|(word, ..)| *word).collect::<Vec<_>>().join(", ");
        let name = match &node.value {
            Value::Mapping(entries) => entries.iter().find(|(key, _)| key.text == tag),
            _ => None,
        };
        let Some((_, name)) = name else {
            let section = self.mapping(node, path);
            if node.is_mapping() {
                self.error(section.place, &join(path, tag), format!("missing, allowed: {}", words()));
            }
            return None;
        };
        let text = if let Value::Scalar { text, .. } = &name.value { text.as_str() } else { "" };
        let Some((_, kind, keys)) = kinds.iter().find(|(word, ..)| *word == text) else {
            let mut message = format!("found {}, allowed: {}", name.found(), words());
            if let Some(near) = nearest(text, kinds.iter().map(|(word, ..)| *word)) {
                message += &format!("; did you mean `{near}`?");
            }
            self.error(name.place, &join(path, tag), message);
            return None;
        };
        Some((*kind, self.section(node, path, &[&[tag][..], keys].concat())))
    }

    /// The boolean under the last key of `path`. None if the key is missing. If its value is invalid, records an
    /// error and returns None.
    pub(super) fn boolean(&mut self, section: &Section<'_>, path: &str) -> Option<bool> {
        let node = section.get(last(path))?;
        match &node.value {
            Value::Scalar { text, quoted: false } if text == "true" => Some(true),
            Value::Scalar { text, quoted: false } if text == "false" => Some(false),
            _ => {
                self.error(node.place, path, format!("found {}, allowed: true, false", node.found()));
                None
            }
        }
    }

    /// One of the words in `choices`, under the last key of `path`. None if the key is missing. If its value is
    /// invalid, records an error and returns None.
    pub(super) fn choice<T: Copy>(
        &mut self,
        section: &Section<'_>,
        path: &str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let node = section.get(last(path))?;
        if let Value::Scalar { text, .. } = &node.value
            && let Some((_, choice)) = choices.iter().find(|(word, _)| word == text)
        {
            return Some(*choice);
        }
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        self.error(node.place, path, format!("found {}, allowed: {}", node.found(), words.join(", ")));
        None
    }

    /// A name under the last key of `path`. None if the key is missing. If its value is not a string, records an
    /// error and returns None. If [`Self::check_name`] does not allow the name, records an error and returns the
    /// name.
    pub(super) fn name<'a>(&mut self, section: &Section<'a>, path: &str) -> Option<&'a str> {
        let node = section.get(last(path))?;
        match &node.value {
            Value::Scalar { text, .. } if !node.is_null() => {
                self.check_name(text, node.place, path);
                Some(text)
            }
            _ => {
                self.error(node.place, path, format!("found {}, allowed: a name", node.found()));
                None
            }
        }
    }

    /// A string of at least one character, of any kind, under the last key of `path`. Quotes are not needed. None if
    /// the key is missing. If its value is invalid, records an error and returns None.
    pub(super) fn text<'a>(&mut self, section: &Section<'a>, path: &str) -> Option<&'a str> {
        let node = section.get(last(path))?;
        match &node.value {
            Value::Scalar { text, quoted } if !text.is_empty() && (*quoted || !node.is_null()) => Some(text),
            _ => {
                self.error(node.place, path, format!("found {}, allowed: a string", node.found()));
                None
            }
        }
    }

    /// A list of strings under the last key of `path`. None if the key is missing. If its value is not a list of
    /// strings, records an error and returns None.
    pub(super) fn texts(&mut self, section: &Section<'_>, path: &str) -> Option<Vec<String>> {
        let node = section.get(last(path))?;
        let Value::Sequence(items) = &node.value else {
            self.error(node.place, path, format!("found {}, allowed: a list of strings", node.found()));
            return None;
        };
        if let Some(item) = items.iter().find(|item| item.as_text().is_none()) {
            self.error(item.place, path, format!("found {} in the list, allowed: a string", item.found()));
        }
        items.iter().map(Node::as_text).collect()
    }

    /// Check that a name may be used in messages, metrics and checkpoints, and report it if not.
    pub(super) fn check_name(&mut self, name: &str, place: Place, path: &str) {
        let printable = name.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
        if printable && name.trim() == name && (1..=MAX_NAME_BYTES).contains(&name.len()) {
            return;
        }
        let bytes = name.len();
        let unit = if bytes == 1 { "byte" } else { "bytes" };
        let message = format!(
            "found the name {:?} ({bytes} {unit}), allowed: 1 to {MAX_NAME_BYTES} printable ASCII characters, \
             no space at either end",
            shorten(name)
        );
        self.error(place, path, message);
    }

    /// Warn about each of `keys` that is set. Each has no effect, for the given reason.
    pub(super) fn without_effect(&mut self, section: &Section<'_>, path: &str, keys: &[(&str, &str)]) {
        for (key, why) in keys {
            if let Some(node) = section.get(key) {
                let message = format!("accepted, but has no effect: {why}");
                self.warnings.push(Finding { path: join(path, key), ..node.place.error(message) });
            }
        }
    }

    /// Report each of `keys` that needs a feature that this version does not have yet.
    pub(super) fn later(&mut self, section: &Section<'_>, path: &str, keys: &[Later]) {
        for later in keys {
            let Some(node) = section.get(later.key).filter(|node| !later.accepts(node)) else { continue };
            let allowed = match later.accepted {
                [] => "allowed: nothing, remove the key".into(),
                accepted => format!("allowed: {}", accepted.join(", ")),
            };
            let message =
                format!("found {}, {allowed} (not in this version yet: {})", node.found(), later.feature);
            self.error(node.place, &join(path, later.key), message);
        }
    }
}

/// `path.key`, or `key` at the root.
pub(super) fn join(path: &str, key: &str) -> String {
    let key = shorten(key);
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// The last key of a path. It is a known key, which contains no dot.
fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// The most similar word in `known`: the one that takes the fewest edits. At most one edit is allowed for every three
/// letters of `word`, and one edit for a shorter word. None if no word is that similar.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // The comparison takes quadratic time, and a longer word is not a typing error.
    if word.len() > MAX_NAME_BYTES {
        return None;
    }
    let most = (word.chars().count() / 3).max(1);
    known
        .map(|name| (strsim::osa_distance(word, name), name))
        .filter(|(edits, _)| *edits <= most)
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, name)| name)
}
