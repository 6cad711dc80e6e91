//! What features and labels do with their columns.

use serde::{Deserialize, Serialize};

/// What one feature does with its column. Numbers are f32 from the start, so that columns of f64, of f32 and of JSON give
/// the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Rule {
    /// An integer or a string becomes one id.
    Id(IdColumn),
    /// A list becomes ids, which are pooled.
    Bag(Bag),
    /// A list becomes its last ids in order, which the model gets one by one.
    Sequence(Sequence),
    /// A number becomes the id of its interval.
    Bucket(Bucket),
    /// The ids of other features become one id.
    Cross(Cross),
    /// A number becomes a float.
    Dense(Dense),
    /// A part of a timestamp becomes an id.
    Date(Date),
}

impl Rule {
    /// Its word in the file.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Id(_) => "id",
            Self::Bag(_) => "bag",
            Self::Sequence(_) => "sequence",
            Self::Bucket(_) => "bucket",
            Self::Cross(_) => "cross",
            Self::Dense(_) => "dense",
            Self::Date(_) => "date",
        }
    }

    /// The columns it reads. A cross reads those of its parts, and none itself.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        let (one, other) = match self {
            Self::Id(id) => (Some(&id.column), None),
            Self::Bag(bag) => (Some(&bag.ids.column), bag.weights.as_ref()),
            Self::Sequence(sequence) => (Some(&sequence.ids.column), None),
            Self::Bucket(bucket) => (Some(&bucket.column), None),
            Self::Cross(_) => (None, None),
            Self::Dense(dense) => (Some(&dense.column), None),
            Self::Date(date) => (Some(&date.column), None),
        };
        one.into_iter().chain(other).map(String::as_str)
    }

    /// The prefix of its ids, if it has a column of ids.
    pub fn prefix(&self) -> Option<&str> {
        match self {
            Self::Id(id) => Some(&id.prefix),
            Self::Bag(bag) => Some(&bag.ids.prefix),
            Self::Sequence(sequence) => Some(&sequence.ids.prefix),
            Self::Bucket(bucket) => Some(&bucket.prefix),
            Self::Date(date) => Some(&date.prefix),
            Self::Cross(_) | Self::Dense(_) => None,
        }
    }
}

/// Values that become ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdColumn {
    /// The column's name.
    pub column: String,
    /// None: as the column is in the training data.
    pub values: Option<ValueType>,
    /// In front of each value before it is hashed.
    pub prefix: String,
    /// ASCII letters are lower-cased first.
    pub lower: bool,
    /// Of a null, or a value of a wrong type.
    pub if_null: IfNull,
    /// Of an empty string.
    pub if_empty: IfEmpty,
    /// Of a column that is not there.
    pub if_missing: IfMissing,
}

/// The type of values that become ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueType {
    /// Integers are ids themselves.
    Integer,
    /// Strings are hashed.
    String,
}

/// The ids of a null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfNull {
    /// One id of its own, which is trained as any other.
    Id,
    /// None.
    Skip,
}

/// The ids of an empty string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfEmpty {
    /// That of the string, as of any other.
    Value,
    /// Those of a null.
    Null,
    /// None.
    Skip,
}

/// The ids of a column that is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfMissing {
    /// Those of a null.
    Null,
    /// None.
    Skip,
}

/// A list of values that become ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bag {
    /// Its values.
    pub ids: IdColumn,
    /// Splits a string into values; None takes lists.
    pub separator: Option<String>,
    /// A column with one number for each value.
    pub weights: Option<String>,
}

/// A list of values that become ids in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// Its values.
    pub ids: IdColumn,
    /// Splits a string into values; None takes lists.
    pub separator: Option<String>,
    /// How many of the last ids are kept.
    pub last: u32,
}

/// A number whose interval is an id: the number of boundaries below it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bucket {
    /// The column's name.
    pub column: String,
    /// Given or fitted.
    pub boundaries: Boundaries,
    /// With one, the interval's number is hashed behind it.
    pub prefix: String,
    /// Of a null, NaN, or a value of a wrong type.
    pub if_null: IfNull,
    /// Of a column that is not there.
    pub if_missing: IfMissing,
}

/// The boundaries of a bucket feature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Boundaries {
    /// Ascending.
    Given(Vec<f32>),
    /// Fitted so that this many intervals have equally many rows, as far as equal numbers allow.
    Quantiles(u32),
}

/// The combination of other features' ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cross {
    /// Names of at least two features, in order. At most one is a bag.
    pub features: Vec<String>,
}

/// A number that becomes a float: clipped, then log1p, then scaled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dense {
    /// The column's name.
    pub column: String,
    /// In the place of a null, NaN, infinity, or a missing column.
    pub missing: Missing,
    /// Smallest and largest number.
    pub clip: Clip,
    /// `sign(x) * ln(1 + |x|)`.
    pub log1p: bool,
    /// The last operation.
    pub scaling: Scaling,
}

/// What takes the place of a number that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// The output is 0.
    Zero,
    /// This number, which is clipped and scaled as any other.
    Given(f32),
    /// The fitted mean, clipped and scaled as any other number.
    Mean,
    /// The fitted median, clipped and scaled as any other number.
    Median,
}

/// The range of a dense feature.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clip {
    /// All numbers.
    None,
    /// From the first to the second.
    Given(f32, f32),
    /// From one fitted quantile to another.
    Quantiles(f32, f32),
}

/// The scaling of a dense feature.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// As it is.
    None,
    /// `(x - mean) / std`; None is fitted.
    Standardise(Option<(f32, f32)>),
    /// `(x - min) / (max - min)`, at least 0 and at most 1; None is fitted.
    MinMax(Option<(f32, f32)>),
}

/// A part of a timestamp.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Date {
    /// The column's name.
    pub column: String,
    /// Which part is the id.
    pub part: DatePart,
    /// The IANA zone in which the part is read. Timestamps without a zone are UTC; dates without a time have none.
    pub timezone: String,
    /// The unit of a column of integers.
    pub unit: Option<Epoch>,
    /// With one, the part's number is hashed behind it.
    pub prefix: String,
    /// Of a null, or a value of a wrong type.
    pub if_null: IfNull,
    /// Of a column that is not there.
    pub if_missing: IfMissing,
}

/// A part of a timestamp, and its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatePart {
    /// 0 to 59.
    Minute,
    /// 0 to 23.
    Hour,
    /// 0, Monday, to 6.
    Weekday,
    /// 24 * weekday + hour.
    HourOfWeek,
    /// 1 to 31.
    Day,
    /// 1 to 366.
    DayOfYear,
    /// 1 to 12.
    Month,
    /// 1 to 4.
    Quarter,
    /// As it is.
    Year,
}

/// The unit of integer times, which count from 1970-01-01T00:00:00Z.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Epoch {
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// Milliseconds.
    #[serde(rename = "ms")]
    Milliseconds,
    /// Microseconds.
    #[serde(rename = "us")]
    Microseconds,
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanoseconds,
}

/// A target of training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Label {
    /// The key in the file.
    pub name: String,
    /// The line of the key; 0 if the label was not read from a file.
    #[serde(skip)]
    pub line: usize,
    /// The column's name.
    pub column: String,
    /// How a value becomes a float.
    pub target: Target,
    /// The factor of its loss.
    pub weight: f32,
    /// The loss of its output.
    pub loss: Loss,
}

/// How a value becomes a label.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// The number itself; false is 0 and true is 1.
    Value,
    /// 1 above this number, else 0.
    GreaterThan(f32),
    /// 1 for this number, else 0.
    EqualsNumber(f32),
    /// 1 for this string, else 0.
    EqualsText(String),
}

/// The loss of a label's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Binary cross entropy with logits: the label is 0 or 1.
    Bce,
    /// Mean squared error.
    Mse,
}
