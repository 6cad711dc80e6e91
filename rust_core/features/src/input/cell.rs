//! [`Cell`]: one value of a column, of Arrow or JSON.

use crate::rules::time::Moment;

/// One value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Cell<'a> {
    /// The column does not exist.
    Missing,
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Float(f64),
    /// A string, which should be UTF-8 but is not checked.
    Text(&'a [u8]),
    Time(Moment),
    /// The name, in messages, of a value that no feature accepts.
    Other(&'static str),
}

impl Cell<'_> {
    /// The value in an error message, shortened.
    pub(crate) fn found(self) -> String {
        match self {
            Self::Missing => "nothing".into(),
            Self::Null => "null".into(),
            Self::Bool(value) => format!("the boolean {value}"),
            Self::Int(value) => format!("the integer {value}"),
            Self::Uint(value) => format!("the integer {value}"),
            Self::Float(value) => format!("the number {value:?}"),
            Self::Text(bytes) => {
                let text = String::from_utf8_lossy(bytes);
                let short: String = text.chars().take(40).collect();
                let more = if short.len() < text.len() { "..." } else { "" };
                format!("the string {short:?}{more}")
            }
            Self::Time(_) => "a timestamp".into(),
            Self::Other(name) => name.into(),
        }
    }
}

/// A value of a column of lists.
pub(crate) enum Item<'a, I> {
    /// Not a list.
    One(Cell<'a>),
    /// Its values.
    List(I),
}

/// Reads the cells of a column. It is compiled for each layout of the column.
pub(crate) trait ReadCells {
    type Out;
    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) -> Self::Out;

    /// Reads a dictionary: `place` returns the index of the value of a row, None for a null, and `cell` the value at an
    /// index.
    fn read_coded<'a>(
        self,
        rows: usize,
        _values: usize,
        place: impl Fn(usize) -> Option<usize>,
        cell: impl Fn(usize) -> Cell<'a>,
    ) -> Self::Out
    where
        Self: Sized,
    {
        self.read(rows, |row| place(row).map_or(Cell::Null, &cell))
    }
}

/// Reads the lists of a column. It is compiled for each layout of the column.
pub(crate) trait ReadLists {
    type Out;
    fn read<'a, I: Iterator<Item = Cell<'a>>>(
        self,
        rows: usize,
        item: impl Fn(usize) -> Item<'a, I>,
    ) -> Self::Out;
}

/// Rows whose columns have names.
pub(crate) trait Source {
    /// Number of rows.
    fn rows(&self) -> usize;
    /// Let `reader` read the cells of a column; all are missing if there is no such column.
    fn cells<R: ReadCells>(&self, column: &str, reader: R) -> R::Out;
    /// Let `reader` read the lists of a column; all are missing if there is no such column.
    fn lists<R: ReadLists>(&self, column: &str, reader: R) -> R::Out;
}
