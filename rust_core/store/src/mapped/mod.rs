//! Rows of a serving bundle: files that are mapped into memory and never change.
//!
//! A table has two files: its ids, 8 bytes each, little-endian, in ascending order of (hash, id); and its rows in the same
//! order, in a [`RowFormat`]. The first bits of the hash of an id give the few places at which the id can be.
//!
//! * [`write_tables`]: the rows of a checkpoint as such files
//! * [`MappedFile`]: a file in memory, and the hashes of its chunks
//! * [`MappedTable`], [`MappedTables`]: look-ups in these files; implements [`persia_types::Tables`], read-only

mod file;
mod format;
mod table;
mod tables;
mod write;

pub use file::{MappedFile, hash};
pub use format::RowFormat;
pub use table::MappedTable;
pub use tables::MappedTables;
pub use write::{Target, write_tables};
