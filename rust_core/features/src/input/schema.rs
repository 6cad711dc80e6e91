//! Checks whether the columns have the types that the features need.

use arrow_schema::{DataType, Schema};
use persia_types::config::features::{Date, FeaturesConfig, IdColumn, Label, Rule, Target, ValueType};
use persia_types::config::nearest;

use crate::error::Mistake;
use crate::rules::time::needs_time;

/// The maximum number of names listed in a message.
const MAX_LISTED: usize = 20;

/// The class of the values of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Class {
    /// Nulls only.
    Null,
    Boolean,
    Integer,
    /// Floats and decimals.
    Real,
    Text,
    Timestamp,
    Day,
    List(Box<Class>),
    Other,
}

fn class(data_type: &DataType) -> Class {
    use DataType::*;
    match data_type {
        Null => Class::Null,
        Boolean => Class::Boolean,
        Int8 | Int16 | Int32 | Int64 | UInt8 | UInt16 | UInt32 | UInt64 => Class::Integer,
        Float16 | Float32 | Float64 | Decimal128(..) => Class::Real,
        Utf8 | LargeUtf8 | Utf8View => Class::Text,
        Timestamp(..) => Class::Timestamp,
        Date32 | Date64 => Class::Day,
        Dictionary(_, values) if !matches!(**values, Dictionary(..)) => class(values),
        List(item) | LargeList(item) | FixedSizeList(item, _) => {
            Class::List(Box::new(class(item.data_type())))
        }
        _ => Class::Other,
    }
}

/// Returns the type of the values of a feature's ids, if it is declared or fitted.
pub(crate) type ValuesOf<'a> = &'a dyn Fn(&str) -> Option<ValueType>;

/// The type of the values that become a feature's ids, according to this schema. Returns None if the feature
/// has no ids, the column is missing, all values are null, or no value can become an id.
pub(crate) fn values_of(rule: &Rule, schema: &Schema) -> Option<ValueType> {
    let column = id_column(rule)?;
    let found = class(schema.field_with_name(&column.column).ok()?.data_type());
    match found {
        Class::List(values) => value_type(&values),
        found => value_type(&found),
    }
}

/// The column of a feature's ids, if it has one.
pub(crate) fn id_column(rule: &Rule) -> Option<&IdColumn> {
    match rule {
        Rule::Id(id) => Some(id),
        Rule::Bag(bag) => Some(&bag.ids),
        Rule::Sequence(sequence) => Some(&sequence.ids),
        _ => None,
    }
}

fn value_type(class: &Class) -> Option<ValueType> {
    match class {
        Class::Text => Some(ValueType::String),
        Class::Integer | Class::Boolean => Some(ValueType::Integer),
        _ => None,
    }
}

/// Return all errors in the columns and, with `labels`, in the label columns.
pub(crate) fn check(
    config: &FeaturesConfig,
    values: ValuesOf<'_>,
    schema: &Schema,
    labels: bool,
) -> Vec<Mistake> {
    let mut check = Check { schema, mistakes: Vec::new() };
    for feature in &config.features {
        let mistake =
            |message| Mistake { feature: feature.name.clone(), line: feature.line, row: None, message };
        for (column, wrong) in wrongs(&feature.rule, values(&feature.name)) {
            check.column(column, &wrong, &mistake);
        }
    }
    for label in config.labels.iter().filter(|_| labels) {
        let mistake = |message| Mistake { feature: label.name.clone(), line: label.line, row: None, message };
        check.column(&label.column, &|found: &Class| wrong_label(label, found), &mistake);
    }
    check.mistakes
}

struct Check<'a> {
    schema: &'a Schema,
    mistakes: Vec<Mistake>,
}

impl Check<'_> {
    fn column(
        &mut self,
        name: &str,
        wrong: &dyn Fn(&Class) -> Option<String>,
        mistake: &dyn Fn(String) -> Mistake,
    ) {
        let mut fields = self.schema.fields().iter().filter(|field| field.name() == name);
        let (first, second) = (fields.next(), fields.next());
        let message = match (first, second) {
            (None, _) => Some(self.missing(name)),
            (Some(_), Some(_)) => Some(format!("the data has several columns `{name}`: rename all but one")),
            (Some(field), None) => {
                let found = class(field.data_type());
                let wrong = if found == Class::Null { None } else { wrong(&found) };
                wrong.map(|allowed| format!("column `{name}` is {}, allowed: {allowed}", field.data_type()))
            }
        };
        self.mistakes.extend(message.map(mistake));
    }

    fn missing(&self, name: &str) -> String {
        let names = || self.schema.fields().iter().map(|field| field.name().as_str());
        match nearest(name, names()) {
            Some(near) => format!("there is no column `{name}`, did you mean `{near}`?"),
            None => {
                let listed: Vec<&str> = names().take(MAX_LISTED).collect();
                let more = if self.schema.fields().len() > MAX_LISTED { ", ..." } else { "" };
                format!("there is no column `{name}`; the columns are: {}{more}", listed.join(", "))
            }
        }
    }
}

/// Returns the error of a class of values, or None if the class is allowed.
type Wrong<'a> = Box<dyn Fn(&Class) -> Option<String> + 'a>;

/// The columns of a feature, each with a check that returns the error of a class of values.
fn wrongs(rule: &Rule, values: Option<ValueType>) -> Vec<(&str, Wrong<'_>)> {
    let refuse = |wrong: bool, allowed: &str| wrong.then(|| allowed.to_owned());
    match rule {
        Rule::Id(id) => vec![(&id.column, Box::new(move |found| wrong_ids(found, values)))],
        Rule::Bag(bag) => {
            let split = bag.separator.is_some();
            let mut all: Vec<(&str, Wrong<'_>)> =
                vec![(&bag.ids.column, Box::new(move |found| wrong_lists(found, values, split)))];
            if let Some(weights) = &bag.weights {
                all.push((
                    weights,
                    Box::new(move |found| {
                        let list =
                            matches!(found, Class::List(item) if is_number(item) || **item == Class::Null);
                        let strings = split && *found == Class::Text;
                        refuse(!list && !strings, "lists of numbers, or strings if `separator` is set")
                    }),
                ));
            }
            all
        }
        Rule::Sequence(sequence) => {
            let split = sequence.separator.is_some();
            vec![(&sequence.ids.column, Box::new(move |found| wrong_lists(found, values, split)))]
        }
        Rule::Bucket(bucket) => vec![(&bucket.column, Box::new(wrong_number))],
        Rule::Dense(dense) => vec![(&dense.column, Box::new(wrong_number))],
        Rule::Date(date) => vec![(&date.column, Box::new(move |found| wrong_date(date, found)))],
        Rule::Cross(_) => Vec::new(),
    }
}

fn is_number(found: &Class) -> bool {
    matches!(found, Class::Boolean | Class::Integer | Class::Real)
}

fn wrong_number(found: &Class) -> Option<String> {
    (!is_number(found)).then(|| "numbers; declare its type where the data is read, or cast it".into())
}

fn wrong_ids(found: &Class, values: Option<ValueType>) -> Option<String> {
    match (found, values, value_type(found)) {
        (Class::Null, ..) => None,
        (Class::Real, ..) => {
            let allowed = "integers or strings: floats cannot be ids; cast whole numbers to integers, or use \
                           `type: bucket`";
            Some(allowed.into())
        }
        (_, _, None) => Some("integers or strings".into()),
        (_, Some(wanted), Some(found)) if wanted != found => {
            let wanted = match wanted {
                ValueType::Integer => "integers",
                ValueType::String => "strings",
            };
            Some(format!(
                "{wanted}, as declared or as in the training data; values of another type would get other ids"
            ))
        }
        _ => None,
    }
}

fn wrong_lists(found: &Class, values: Option<ValueType>, split: bool) -> Option<String> {
    match found {
        // The error for a single float suggests a bucket feature, which cannot read lists.
        Class::List(items) if **items == Class::Real => {
            Some("lists of integers or strings: floats cannot be ids; cast whole numbers to integers".into())
        }
        Class::List(items) => wrong_ids(items, values).map(|allowed| format!("lists of {allowed}")),
        Class::Text if split => None,
        _ => Some("lists, or strings if `separator` is set".into()),
    }
}

fn wrong_date(date: &Date, found: &Class) -> Option<String> {
    let needs_time = needs_time(date.part);
    match found {
        Class::Timestamp | Class::Text => None,
        Class::Day if needs_time => Some("timestamps: a date has no time of day".into()),
        Class::Day => None,
        Class::Integer if date.unit.is_some() => None,
        Class::Integer => {
            Some("timestamps, or integers if `unit` says what they count: s, ms, us, ns".into())
        }
        _ if needs_time => Some("timestamps, or strings such as 2024-05-01T10:00:00Z".into()),
        _ => Some("timestamps, dates, or strings such as 2024-05-01T10:00:00Z".into()),
    }
}

fn wrong_label(label: &Label, found: &Class) -> Option<String> {
    match &label.target {
        Target::EqualsText(_) => {
            (*found != Class::Text).then(|| "strings, because `equals` is a string".into())
        }
        _ => (!is_number(found)).then(|| "numbers; for strings, set `equals` to a string".into()),
    }
}
