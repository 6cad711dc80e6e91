//! Reads Arrow arrays as cells.

use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::{Array, ArrayRef, ArrowPrimitiveType, OffsetSizeTrait, PrimitiveArray, RecordBatch};
use arrow_schema::{DataType, TimeUnit};
use persia_types::config::features::Epoch;

use crate::input::cell::{Cell, Item, ReadCells, ReadLists, Source};
use crate::rules::time::{Moment, from_integer};

impl Source for RecordBatch {
    fn rows(&self) -> usize {
        self.num_rows()
    }

    fn cells<R: ReadCells>(&self, column: &str, reader: R) -> R::Out {
        match self.column_by_name(column) {
            Some(array) => read_cells(array, reader),
            None => reader.read(self.num_rows(), |_| Cell::Missing),
        }
    }

    fn lists<R: ReadLists>(&self, column: &str, reader: R) -> R::Out {
        let Some(array) = self.column_by_name(column) else {
            return reader.read(self.num_rows(), |_| Item::<std::iter::Empty<_>>::One(Cell::Missing));
        };
        match array.data_type() {
            DataType::List(_) => list::<i32, R>(array, reader),
            DataType::LargeList(_) => list::<i64, R>(array, reader),
            DataType::FixedSizeList(..) => {
                let list = array.as_fixed_size_list();
                let size = list.value_length() as usize;
                read_cells(
                    list.values(),
                    Lists { list: array, bounds: |row| (row * size, row * size + size), reader },
                )
            }
            _ => read_cells(array, NoLists(reader)),
        }
    }
}

fn list<O: OffsetSizeTrait, R: ReadLists>(array: &ArrayRef, reader: R) -> R::Out {
    let list = array.as_list::<O>();
    let offsets = list.value_offsets();
    let bounds = |row: usize| (offsets[row].as_usize(), offsets[row + 1].as_usize());
    read_cells(list.values(), Lists { list: array, bounds, reader })
}

/// Reads lists from the child array, which has the values of all lists.
struct Lists<'l, B, R> {
    list: &'l ArrayRef,
    bounds: B,
    reader: R,
}

impl<B: Fn(usize) -> (usize, usize), R: ReadLists> ReadCells for Lists<'_, B, R> {
    type Out = R::Out;

    fn read<'a>(self, _: usize, cell: impl Fn(usize) -> Cell<'a>) -> R::Out {
        let cell = &cell;
        self.reader.read(self.list.len(), |row| {
            if self.list.is_null(row) {
                return Item::One(Cell::Null);
            }
            let (start, end) = (self.bounds)(row);
            Item::List((start..end).map(cell))
        })
    }
}

/// Reads a column whose values are not lists.
struct NoLists<R>(R);

impl<R: ReadLists> ReadCells for NoLists<R> {
    type Out = R::Out;

    fn read<'a>(self, rows: usize, cell: impl Fn(usize) -> Cell<'a>) -> R::Out {
        self.0.read(rows, |row| Item::<std::iter::Empty<_>>::One(cell(row)))
    }
}

/// Let `reader` read the cells of an array of any layout.
pub(crate) fn read_cells<R: ReadCells>(array: &ArrayRef, reader: R) -> R::Out {
    let Some(dictionary) = array.as_any_dictionary_opt() else { return plain(array, reader) };
    let (keys, values) = (dictionary.keys(), dictionary.values());
    if values.is_empty() {
        return reader.read(array.len(), |_| Cell::Null);
    }
    let places = dictionary.normalized_keys();
    plain(values, ByKey { keys, places: &places, reader })
}

/// Reads the values of a dictionary array by the keys of its rows.
struct ByKey<'k, R> {
    keys: &'k dyn Array,
    places: &'k [usize],
    reader: R,
}

impl<R: ReadCells> ReadCells for ByKey<'_, R> {
    type Out = R::Out;

    fn read<'a>(self, values: usize, cell: impl Fn(usize) -> Cell<'a>) -> R::Out {
        let place = |row: usize| (!self.keys.is_null(row)).then(|| self.places[row]);
        self.reader.read_coded(self.places.len(), values, place, cell)
    }
}

/// Let `reader` read the cells of an array that is not a dictionary.
fn plain<R: ReadCells>(array: &ArrayRef, reader: R) -> R::Out {
    let rows = array.len();
    match array.data_type() {
        DataType::Null => reader.read(rows, |_| Cell::Null),
        DataType::Boolean => {
            let values = array.as_boolean();
            reader.read(
                rows,
                |row| {
                    if values.is_null(row) { Cell::Null } else { Cell::Bool(values.value(row)) }
                },
            )
        }
        DataType::Int8 => numbers::<Int8Type, R>(array, reader, |value| Cell::Int(value.into())),
        DataType::Int16 => numbers::<Int16Type, R>(array, reader, |value| Cell::Int(value.into())),
        DataType::Int32 => numbers::<Int32Type, R>(array, reader, |value| Cell::Int(value.into())),
        DataType::Int64 => numbers::<Int64Type, R>(array, reader, Cell::Int),
        DataType::UInt8 => numbers::<UInt8Type, R>(array, reader, |value| Cell::Uint(value.into())),
        DataType::UInt16 => numbers::<UInt16Type, R>(array, reader, |value| Cell::Uint(value.into())),
        DataType::UInt32 => numbers::<UInt32Type, R>(array, reader, |value| Cell::Uint(value.into())),
        DataType::UInt64 => numbers::<UInt64Type, R>(array, reader, Cell::Uint),
        DataType::Float16 => numbers::<Float16Type, R>(array, reader, |value| Cell::Float(value.to_f64())),
        DataType::Float32 => numbers::<Float32Type, R>(array, reader, |value| Cell::Float(value.into())),
        DataType::Float64 => numbers::<Float64Type, R>(array, reader, Cell::Float),
        DataType::Decimal128(_, scale) => {
            // The result is rounded only once if the integer is below 2^53 and the scale at most 22, because
            // then both operands are exact.
            let unit = 10f64.powi(i32::from(scale.unsigned_abs()));
            let divides = *scale >= 0;
            numbers::<Decimal128Type, R>(array, reader, move |value| {
                Cell::Float(if divides { value as f64 / unit } else { value as f64 * unit })
            })
        }
        DataType::Utf8 => text::<i32, R>(array, reader),
        DataType::LargeUtf8 => text::<i64, R>(array, reader),
        DataType::Utf8View => {
            let values = array.as_string_view();
            reader.read(rows, |row| {
                if values.is_null(row) { Cell::Null } else { Cell::Text(values.value(row).as_bytes()) }
            })
        }
        DataType::Date32 => {
            numbers::<Date32Type, R>(array, reader, |days| Cell::Time(Moment::Day(days.into())))
        }
        DataType::Date64 => numbers::<Date64Type, R>(array, reader, |milliseconds| {
            Cell::Time(Moment::Day(milliseconds.div_euclid(86_400_000)))
        }),
        DataType::Timestamp(unit, _) => timestamps(array, *unit, reader),
        _ => reader.read(rows, |_| Cell::Other("a value of a type that no feature takes")),
    }
}

fn timestamps<R: ReadCells>(array: &ArrayRef, unit: TimeUnit, reader: R) -> R::Out {
    let cell = |unit: Epoch| move |value: i64| Cell::Time(from_integer(value, unit));
    match unit {
        TimeUnit::Second => numbers::<TimestampSecondType, R>(array, reader, cell(Epoch::Seconds)),
        TimeUnit::Millisecond => {
            numbers::<TimestampMillisecondType, R>(array, reader, cell(Epoch::Milliseconds))
        }
        TimeUnit::Microsecond => {
            numbers::<TimestampMicrosecondType, R>(array, reader, cell(Epoch::Microseconds))
        }
        TimeUnit::Nanosecond => {
            numbers::<TimestampNanosecondType, R>(array, reader, cell(Epoch::Nanoseconds))
        }
    }
}

fn numbers<T: ArrowPrimitiveType, R: ReadCells>(
    array: &ArrayRef,
    reader: R,
    cell: impl Fn(T::Native) -> Cell<'static>,
) -> R::Out {
    let array: &PrimitiveArray<T> = array.as_primitive();
    let values = array.values().as_ref();
    match array.nulls() {
        None => reader.read(values.len(), |row| cell(values[row])),
        Some(nulls) => {
            reader.read(values.len(), |row| if nulls.is_null(row) { Cell::Null } else { cell(values[row]) })
        }
    }
}

fn text<O: OffsetSizeTrait, R: ReadCells>(array: &ArrayRef, reader: R) -> R::Out {
    let array = array.as_string::<O>();
    let (offsets, bytes) = (array.value_offsets(), array.value_data());
    // Values are read as bytes, because a value need not be UTF-8 to be hashed.
    let value = |row: usize| Cell::Text(&bytes[offsets[row].as_usize()..offsets[row + 1].as_usize()]);
    match array.nulls() {
        None => reader.read(array.len(), value),
        Some(nulls) => {
            reader.read(array.len(), |row| if nulls.is_null(row) { Cell::Null } else { value(row) })
        }
    }
}
