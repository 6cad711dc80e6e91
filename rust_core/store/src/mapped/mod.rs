//! The rows of a serving bundle, in memory-mapped files that never change.
//!
//! Each table has two files. One contains its ids, 8 bytes each, little-endian, in ascending order of (hash, id). The
//! other contains its rows in the same order, in a [`RowFormat`]. The first bits of an id's hash determine the few
//! positions at which the id can be.
//!
//! * [`write_tables`]: writes the rows of a checkpoint to such files
//! * [`MappedFile`]: a memory-mapped file, and the hashes of its chunks
//! * [`MappedTable`], [`MappedTables`]: look up rows in these files; [`MappedTables`] implements
//!   [`persia_types::Tables`], read-only

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
