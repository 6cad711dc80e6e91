//! JSON records: rows with named columns.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::input::cell::{Cell, Item, ReadCells, ReadLists, Source};

/// A value of a record.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Null.
    Null,
    /// A boolean.
    Bool(bool),
    /// A signed integer.
    Int(i64),
    /// An integer that is at least 2^63.
    Uint(u64),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// A value that no feature accepts, with its name for messages, such as `an object`.
    Other(&'static str),
}

impl Value {
    fn cell(&self) -> Cell<'_> {
        match self {
            Self::Null => Cell::Null,
            Self::Bool(value) => Cell::Bool(*value),
            Self::Int(value) => Cell::Int(*value),
            Self::Uint(value) => Cell::Uint(*value),
            Self::Float(value) => Cell::Float(*value),
            Self::Text(text) => Cell::Text(text.as_bytes()),
            Self::List(_) => Cell::Other("a list"),
            Self::Other(name) => Cell::Other(name),
        }
    }
}

/// Rows of named values. A key that a record does not have counts as a missing column of this row.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Records {
    rows: Vec<HashMap<String, Value>>,
}

impl Records {
    /// Create records from rows.
    pub fn new(rows: Vec<HashMap<String, Value>>) -> Self {
        Self { rows }
    }

    /// Read a JSON list of objects, or one object after another (JSON lines).
    ///
    /// # Errors
    /// The text is not JSON, or contains a value that is not an object. The error states line and column.
    pub fn from_json(text: &[u8]) -> Result<Self, String> {
        let mut rows = Vec::new();
        for part in serde_json::Deserializer::from_slice(text).into_iter::<OneOrMany>() {
            match part.map_err(|error| format!("cannot read the records as JSON objects: {error}"))? {
                OneOrMany::One(row) => rows.push(row),
                OneOrMany::Many(many) => rows.extend(many),
            }
        }
        Ok(Self { rows })
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no records.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl Source for Records {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn cells<R: ReadCells>(&self, column: &str, reader: R) -> R::Out {
        reader.read(self.rows.len(), |row| self.rows[row].get(column).map_or(Cell::Missing, Value::cell))
    }

    fn lists<R: ReadLists>(&self, column: &str, reader: R) -> R::Out {
        reader.read(self.rows.len(), |row| match self.rows[row].get(column) {
            Some(Value::List(values)) => Item::List(values.iter().map(Value::cell)),
            Some(value) => Item::One(value.cell()),
            None => Item::One(Cell::Missing),
        })
    }
}

enum OneOrMany {
    One(HashMap<String, Value>),
    Many(Vec<HashMap<String, Value>>),
}

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parts;
        impl<'de> Visitor<'de> for Parts {
            type Value = OneOrMany;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object, or a list of objects")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<OneOrMany, A::Error> {
                let mut row = HashMap::new();
                while let Some((key, value)) = map.next_entry()? {
                    row.insert(key, value);
                }
                Ok(OneOrMany::One(row))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<OneOrMany, A::Error> {
                let mut rows = Vec::new();
                while let Some(row) = list.next_element()? {
                    rows.push(row);
                }
                Ok(OneOrMany::Many(rows))
            }
        }
        deserializer.deserialize_any(Parts)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values;
        impl<'de> Visitor<'de> for Values {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Int(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(i64::try_from(value).map_or(Value::Uint(value), Value::Int))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Float(value))
            }

            fn visit_str<E>(self, text: &str) -> Result<Value, E> {
                Ok(Value::Text(text.into()))
            }

            fn visit_string<E>(self, text: String) -> Result<Value, E> {
                Ok(Value::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = list.next_element()? {
                    values.push(value);
                }
                Ok(Value::List(values))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Value::Other("an object"))
            }
        }
        deserializer.deserialize_any(Values)
    }
}
