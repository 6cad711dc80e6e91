//! Parses YAML text into a tree whose nodes have positions.
//!
//! The tree is built from parser events in a loop, without recursion. Text that is nested a hundred thousand levels
//! deep, or that is multiplied by aliases, therefore reaches a limit instead of exhausting the stack or the memory.

use std::collections::HashMap;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, ScanError};

use super::error::Finding;
use super::number::number;

/// The maximum size of a configuration file, in bytes.
pub const MAX_CONFIG_BYTES: usize = 4 << 20;
/// The maximum number of nested levels in a configuration file.
pub const MAX_CONFIG_DEPTH: usize = 32;
/// The maximum number of keys and values in a configuration file. An alias counts as many nodes as it
/// repeats, and a value with an anchor counts twice.
pub const MAX_CONFIG_NODES: usize = 500_000;

/// A line and a column, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) line: usize,
    pub(super) column: usize,
}

impl Place {
    /// An error at this position that belongs to no key.
    pub(super) fn error(self, message: impl Into<String>) -> Finding {
        Finding { line: self.line, column: self.column, path: String::new(), message: message.into() }
    }
}

impl From<Marker> for Place {
    fn from(marker: Marker) -> Self {
        Self { line: marker.line().max(1), column: marker.col() + 1 }
    }
}

/// A value and its position.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) value: Value,
}

#[derive(Debug, Clone)]
pub(super) enum Value {
    /// A scalar as written, without its quotes. A quoted scalar is never a number or a boolean.
    Scalar {
        text: String,
        quoted: bool,
    },
    Sequence(Vec<Node>),
    /// A mapping in the order of the file. A repeated key has several entries.
    Mapping(Vec<(Key, Node)>),
}

#[derive(Debug, Clone)]
pub(super) struct Key {
    pub(super) place: Place,
    pub(super) text: String,
}

impl Node {
    /// Whether this is null: `key:` without a value, `~` or `null`.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, quoted: false } if matches!(text.as_str(), "" | "~" | "null"))
    }

    /// Whether this is a mapping. A mapping whose keys are all commented out is null in YAML, and counts as an empty
    /// one.
    pub(super) fn is_mapping(&self) -> bool {
        self.is_null() || matches!(self.value, Value::Mapping(_))
    }

    /// The value, if it is a finite number.
    pub(super) fn as_number(&self) -> Option<f32> {
        match &self.value {
            Value::Scalar { text, quoted: false } => number(text),
            _ => None,
        }
    }

    /// The text, if this is a scalar other than null. A number is also returned as text.
    pub(super) fn as_text(&self) -> Option<String> {
        match &self.value {
            Value::Scalar { text, .. } if !self.is_null() => Some(text.clone()),
            _ => None,
        }
    }

    /// The value as text for an error message.
    pub(super) fn found(&self) -> String {
        match &self.value {
            _ if self.is_null() => "nothing".into(),
            Value::Scalar { text, quoted: true } => format!("{:?}", shorten(text)),
            Value::Scalar { text, .. } => format!("`{}`", shorten(text).escape_debug()),
            Value::Sequence(_) => "a list".into(),
            Value::Mapping(_) => "a mapping".into(),
        }
    }

    /// The number of nodes of this tree and the number of its levels.
    fn extent(&self) -> (usize, usize) {
        let join = |sum: (usize, usize), node: &Self| {
            let (nodes, depth) = node.extent();
            (sum.0 + nodes, sum.1.max(depth + 1))
        };
        match &self.value {
            Value::Scalar { .. } => (1, 1),
            Value::Sequence(items) => items.iter().fold((1, 1), join),
            // A key counts as a node.
            Value::Mapping(entries) => {
                entries.iter().map(|(_, node)| node).fold((1 + entries.len(), 1), join)
            }
        }
    }
}

/// Shorten `text` to its first 60 characters, followed by `...`, if it is longer.
pub(super) fn shorten(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}

/// Parse `text`, which must contain exactly one document.
pub(super) fn parse(text: &str) -> Result<Node, Finding> {
    let start = Place { line: 1, column: 1 };
    if text.len() > MAX_CONFIG_BYTES {
        return Err(
            start.error(format!("the file has {} bytes, the limit is {MAX_CONFIG_BYTES}", text.len()))
        );
    }
    // Some editors on Windows begin a file with a byte-order mark.
    let mut parser = Parser::new_from_str(text.strip_prefix('\u{feff}').unwrap_or(text));
    let mut builder = Builder::default();
    while let Some(event) = parser.next_event() {
        let (event, span) = event.map_err(|error| syntax_error(&error))?;
        builder.take(event, span.start.into())?;
    }
    match builder.root {
        Some(root) if !root.is_null() => Ok(root),
        _ => Err(start.error("the file is empty")),
    }
}

fn syntax_error(error: &ScanError) -> Finding {
    Place::from(*error.marker()).error(format!("not valid YAML: {}", error.info()))
}

/// A collection whose end has not been parsed yet.
struct Open {
    node: Node,
    /// The key whose value comes next.
    key: Option<Key>,
    anchor: usize,
}

/// Assembles nodes. Anchor 0 means that there is no anchor.
#[derive(Default)]
struct Builder {
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
    root: Option<Node>,
}

impl Builder {
    fn take(&mut self, event: Event<'_>, place: Place) -> Result<(), Finding> {
        match event {
            Event::Scalar(_, _, _, Some(tag))
            | Event::SequenceStart(_, Some(tag))
            | Event::MappingStart(_, Some(tag)) => {
                // A tag may contain any character, escaped by its code.
                let tag = tag.to_string();
                let tag = shorten(&tag).escape_debug().to_string();
                Err(place.error(format!("the tag `{tag}` is not supported: remove it")))
            }
            Event::Scalar(text, style, anchor, None) => {
                let quoted = style != ScalarStyle::Plain;
                self.count(1, place)?;
                self.close(Node { place, value: Value::Scalar { text: text.into_owned(), quoted } }, anchor)
            }
            Event::SequenceStart(anchor, None) => self.start(place, Value::Sequence(Vec::new()), anchor),
            Event::MappingStart(anchor, None) => self.start(place, Value::Mapping(Vec::new()), anchor),
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(open) => self.close(open.node, open.anchor),
                None => Ok(()),
            },
            Event::Alias(anchor) => self.repeat(anchor, place),
            Event::DocumentStart(_) if self.root.is_some() => {
                Err(place.error(
                    "a second document begins here, but a file may have only one: remove the `---` or `...` before it",
                ))
            }
            Event::DocumentStart(_)
            | Event::DocumentEnd
            | Event::StreamStart
            | Event::StreamEnd
            | Event::Nothing => Ok(()),
        }
    }

    fn start(&mut self, place: Place, value: Value, anchor: usize) -> Result<(), Finding> {
        self.count(1, place)?;
        if self.open.len() >= MAX_CONFIG_DEPTH {
            return Err(too_deep(place));
        }
        self.open.push(Open { node: Node { place, value }, key: None, anchor });
        Ok(())
    }

    /// Add an alias, as a copy of the value of its anchor.
    fn repeat(&mut self, anchor: usize, place: Place) -> Result<(), Finding> {
        let Some(node) = self.anchors.get(&anchor) else {
            return Err(place.error("this alias is inside the value it refers to"));
        };
        let (nodes, depth) = node.extent();
        if self.open.len() + depth > MAX_CONFIG_DEPTH {
            return Err(too_deep(place));
        }
        let node = Node { place, ..node.clone() };
        self.count(nodes, place)?;
        self.close(node, 0)
    }

    /// Add a complete node to its collection.
    fn close(&mut self, node: Node, anchor: usize) -> Result<(), Finding> {
        let place = node.place;
        if anchor != 0 {
            self.count(node.extent().0, place)?;
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match (&mut open.node.value, open.key.take()) {
            (Value::Sequence(items), _) => items.push(node),
            (Value::Mapping(entries), Some(key)) => entries.push((key, node)),
            (_, _) => match node.value {
                Value::Scalar { text, .. } => open.key = Some(Key { place, text }),
                _ => return Err(place.error(format!("a key must be a string, found {}", node.found()))),
            },
        }
        Ok(())
    }

    fn count(&mut self, nodes: usize, place: Place) -> Result<(), Finding> {
        self.nodes += nodes;
        if self.nodes > MAX_CONFIG_NODES {
            return Err(place.error(format!("more than {MAX_CONFIG_NODES} keys and values up to here")));
        }
        Ok(())
    }
}

fn too_deep(place: Place) -> Finding {
    place.error(format!("nested deeper than {MAX_CONFIG_DEPTH} levels"))
}
