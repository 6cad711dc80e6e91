//! How the columns of features and labels become ids and floats.

use serde::{Deserialize, Serialize};

/// How the column of a feature becomes ids or floats. The numbers of bucket and dense features are converted
/// to f32 first, so that f64, f32 and JSON columns give equal results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Rule {
    /// An integer or a string becomes one id.
    Id(IdColumn),
    /// A list becomes ids, which are pooled.
    Bag(Bag),
    /// The last values of a list become ids, in order. The model gets one vector for each.
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
    /// The name of the rule in the file.
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

    /// The columns that the feature reads. A cross reads only the columns of its parts.
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

    /// The prefix of the feature's ids, if any.
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

/// A column whose values become ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdColumn {
    /// The column's name.
    pub column: String,
    /// The type of the values; None means the type of the column in the training data.
    pub values: Option<ValueType>,
    /// The string that precedes each value when it is hashed.
    pub prefix: String,
    /// Whether ASCII letters are changed to lower case before hashing.
    pub lower: bool,
    /// The rule for a null, NaN, or a value of a wrong type.
    pub if_null: IfNull,
    /// The rule for an empty string.
    pub if_empty: IfEmpty,
    /// The rule for a missing column.
    pub if_missing: IfMissing,
}

/// The type of values that become ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueType {
    /// Integers, which are used as ids directly.
    Integer,
    /// Strings, which are hashed.
    String,
}

/// The rule for the ids of a null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfNull {
    /// A separate id, which is trained like any other.
    Id,
    /// The null has no id.
    Skip,
}

/// The rule for the ids of an empty string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfEmpty {
    /// The id of the empty string, computed as for any string.
    Value,
    /// The ids of a null.
    Null,
    /// The empty string has no id.
    Skip,
}

/// The rule for the ids of a missing column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfMissing {
    /// The ids of a null.
    Null,
    /// The feature has no ids.
    Skip,
}

/// A list, or a string that a separator divides, whose values become ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bag {
    /// The values of the list.
    pub ids: IdColumn,
    /// The separator that splits a string into values; None for lists.
    pub separator: Option<String>,
    /// A column with one number for each value.
    pub weights: Option<String>,
}

/// A list whose values become ids, in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// The values of the list.
    pub ids: IdColumn,
    /// The separator that splits a string into values; None for lists.
    pub separator: Option<String>,
    /// The number of ids to keep, from the end of the list.
    pub last: u32,
}

/// A value that becomes the id of its interval. The number of the interval is the count of the boundaries below the
/// value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bucket {
    /// The column's name.
    pub column: String,
    /// The boundaries, given or fitted.
    pub boundaries: Boundaries,
    /// The prefix, if any. With a prefix, the id is the hash of the prefix followed by the interval's number.
    pub prefix: String,
    /// The rule for a null, NaN, an infinity, or a value of a wrong type.
    pub if_null: IfNull,
    /// The rule for a missing column.
    pub if_missing: IfMissing,
}

/// The boundaries of a bucket feature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Boundaries {
    /// Given boundaries, in ascending order.
    Given(Vec<f32>),
    /// The number of intervals. Their boundaries are fitted so that all intervals have the same number of rows,
    /// as far as equal values permit.
    Quantiles(u32),
}

/// The combination of other features' ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cross {
    /// The names of at least two features, in order. At most one is a bag.
    pub features: Vec<String>,
}

/// A number that becomes a float: it is clipped, then its log1p is taken, then it is scaled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dense {
    /// The column's name.
    pub column: String,
    /// The replacement of a null, NaN, an infinity, a value of a wrong type, or a missing column.
    pub missing: Missing,
    /// The limits to which numbers are clipped.
    pub clip: Clip,
    /// Whether `sign(x) * ln(1 + |x|)` is computed.
    pub log1p: bool,
    /// The scaling, which is applied last.
    pub scaling: Scaling,
}

/// What replaces a missing number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// The output is 0.
    Zero,
    /// This number, which is clipped and scaled like any other.
    Given(f32),
    /// The fitted mean, which is clipped and scaled like any other number.
    Mean,
    /// The fitted median, which is clipped and scaled like any other number.
    Median,
}

/// The limits to which the numbers of a dense feature are clipped.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clip {
    /// Numbers are not clipped.
    None,
    /// The limits are two given numbers.
    Given(f32, f32),
    /// The limits are two fitted quantiles.
    Quantiles(f32, f32),
}

/// The scaling of a dense feature.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// No scaling.
    None,
    /// `(x - mean) / std`; None means fitted values.
    Standardise(Option<(f32, f32)>),
    /// `(x - min) / (max - min)`, limited to 0 to 1; None means fitted values.
    MinMax(Option<(f32, f32)>),
}

/// A part of a timestamp.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Date {
    /// The column's name.
    pub column: String,
    /// The part that becomes the id.
    pub part: DatePart,
    /// The IANA zone in which the part is computed. Timestamps without a zone are UTC. Dates without a time have no
    /// zone.
    pub timezone: String,
    /// The unit of the integers, if the column has integers.
    pub unit: Option<Epoch>,
    /// The prefix, if any. With a prefix, the id is the hash of the prefix followed by the part's number.
    pub prefix: String,
    /// The rule for a null, an empty string, NaN, or a value that is no timestamp.
    pub if_null: IfNull,
    /// The rule for a missing column.
    pub if_missing: IfMissing,
}

/// A part of a timestamp. Each variant states its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatePart {
    /// The minute, 0 to 59.
    Minute,
    /// The hour, 0 to 23.
    Hour,
    /// The day of the week, from 0 (Monday) to 6.
    Weekday,
    /// The hour of the week: 24 * weekday + hour.
    HourOfWeek,
    /// The day of the month, 1 to 31.
    Day,
    /// The day of the year, 1 to 366.
    DayOfYear,
    /// The month, 1 to 12.
    Month,
    /// The quarter, 1 to 4.
    Quarter,
    /// The year.
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

/// A label.
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
    /// The factor by which the label's loss is multiplied.
    pub weight: f32,
    /// The loss function of the label's output.
    pub loss: Loss,
}

/// How a value becomes a label.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// The number itself; false is 0 and true is 1.
    Value,
    /// 1 if the value is above this number, otherwise 0.
    GreaterThan(f32),
    /// 1 if the value is this number, otherwise 0.
    EqualsNumber(f32),
    /// 1 if the value is this string, otherwise 0.
    EqualsText(String),
}

/// The loss function of a label's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Binary cross entropy with logits. The label is 0 or 1.
    Bce,
    /// Mean squared error.
    Mse,
}
