//! [`MappedTables`]: the tables of a bundle.

use std::path::Path;

use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Snapshot, Stats,
};
use persia_types::{Mode, Schema, Tables, TablesError};

use super::table::{MappedTable, ReadRows};
use crate::request::check::{check_buffer, check_tables, malformed};
use crate::simd::InstructionSet;

/// Tables in memory-mapped files. Look-ups in [`Mode::Eval`] and [`Mode::Infer`], and statistics, are served.
/// Training look-ups, and requests that would change or write rows, are refused.
#[derive(Debug)]
pub struct MappedTables {
    schema: Schema,
    tables: Vec<MappedTable>,
    level: InstructionSet,
}

impl MappedTables {
    /// Create the tables of a schema, given in schema order.
    ///
    /// # Errors
    /// `BadShape` if the number of tables or a dimension differs from the schema.
    pub fn new(schema: Schema, tables: Vec<MappedTable>) -> Result<Self, TablesError> {
        let (wanted, given): (Vec<usize>, Vec<usize>) = (
            schema.tables.iter().map(|table| table.dim).collect(),
            tables.iter().map(MappedTable::dim).collect(),
        );
        if wanted != given {
            return malformed(format!("the tables have dims {given:?}, but the schema has {wanted:?}"));
        }
        Ok(Self { schema, tables, level: InstructionSet::detect() })
    }

    /// The number of rows of each table.
    pub fn rows(&self) -> Vec<u64> {
        self.tables.iter().map(|table| table.len() as u64).collect()
    }
}

fn read_only<T>() -> Result<T, TablesError> {
    malformed(
        "the rows of a bundle can only be looked up, for evaluation or inference; to train, load the checkpoint from \
         which the bundle was exported"
            .into(),
    )
}

impl Tables for MappedTables {
    fn begin(&self, _: &Run) -> Result<(), TablesError> {
        read_only()
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        if request.mode == Mode::Train {
            return read_only();
        }
        if rows.len() != request.tables.len() {
            return malformed(format!(
                "the number of buffers is {}, but the number of tables is {}",
                rows.len(),
                request.tables.len()
            ));
        }
        check_tables(&self.schema, request.tables.iter().map(|part| (part.table, part.ids.len())))?;
        for (part, rows) in request.tables.iter().zip(rows.iter()) {
            check_buffer(&self.schema.tables[part.table], part, rows.len())?;
        }
        let mut report = LookupReport::default();
        for (part, out) in request.tables.iter().zip(rows) {
            let hits = self.level.run(ReadRows { table: &self.tables[part.table], part, out });
            report += LookupReport { hits, initial: 0, missing: part.ids.len() as u64 - hits };
        }
        Ok(report)
    }

    fn push(&self, _: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        read_only()
    }

    fn prepare_snapshot(&self, _: u64) -> Result<(), TablesError> {
        read_only()
    }

    fn abort_snapshot(&self, _: u64) -> Result<(), TablesError> {
        read_only()
    }

    fn write_snapshot(&self, _: &Path, _: Option<u64>) -> Result<Snapshot, TablesError> {
        read_only()
    }

    fn restore(&self, _: &Path, _: &[FileEntry]) -> Result<(), TablesError> {
        read_only()
    }

    fn stats(&self) -> Result<Stats, TablesError> {
        let memory_bytes = self.tables.iter().map(|table| table.memory_bytes() as u64).sum();
        Ok(Stats { rows: self.rows(), memory_bytes, ..Stats::default() })
    }

    fn clear(&self) -> Result<(), TablesError> {
        read_only()
    }
}
