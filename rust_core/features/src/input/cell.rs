//! [`Cell`]: one value of a column, from Arrow or JSON.

use crate::rules::time::Moment;

/// One value of a column.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Cell<'a> {
    /// The column, or the key of a record, does not exist.
    Missing,
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Float(f64),
    /// A string, which should be UTF-8. This is not checked.
    Text(&'a [u8]),
    Time(Moment),
    /// A value that no feature accepts, with its name for messages.
    Other(&'static str),
}

impl Cell<'_> {
    /// The value for an error message, shortened.
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

/// One value of a column of lists.
pub(crate) enum Item<'a, I> {
    /// A value that is not a list.
    One(Cell<'a>),
    /// The values of a list.
    List(I),
}

/// Reads the cells of a column. An implementation is compiled for each layout of columns.
pub(crate) trait ReadCells {
    type Out;
    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) -> Self::Out;

    /// Read a dictionary. `place` returns the index of a row's value, or None for a null; `cell` returns the value at
    /// an index.
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

/// Reads the lists of a column. An implementation is compiled for each layout of columns.
pub(crate) trait ReadLists {
    type Out;
    fn read<'a, I: Iterator<Item = Cell<'a>>>(
        self,
        rows: usize,
        item: impl Fn(usize) -> Item<'a, I>,
    ) -> Self::Out;
}

/// A source of rows with named columns.
pub(crate) trait Source {
    /// The number of rows.
    fn rows(&self) -> usize;
    /// Let `reader` read the cells of a column. All are missing if the column does not exist.
    fn cells<R: ReadCells>(&self, column: &str, reader: R) -> R::Out;
    /// Let `reader` read the lists of a column. All are missing if the column does not exist.
    fn lists<R: ReadLists>(&self, column: &str, reader: R) -> R::Out;
}
