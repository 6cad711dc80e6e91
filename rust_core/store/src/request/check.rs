//! Checks of a request, which are made before it has any effect.

use persia_types::limits::MAX_IDS_PER_REQUEST;
use persia_types::tables::{PerSample, TableIds};
use persia_types::{Schema, Table, TablesError};

pub(crate) fn malformed<T>(what: String) -> Result<T, TablesError> {
    Err(TablesError::BadShape { what })
}

/// Add the name of the table to the error of a malformed part.
pub(crate) fn of_table(name: &str, error: TablesError) -> TablesError {
    match error {
        TablesError::BadShape { what } => TablesError::BadShape { what: format!("table {name}: {what}") },
        other => other,
    }
}

/// Check the tables of a request and their numbers of ids, given as `(table, ids)` for each part.
pub(crate) fn check_tables(
    schema: &Schema,
    parts: impl Iterator<Item = (usize, usize)>,
) -> Result<(), TablesError> {
    let tables = schema.tables.len();
    let (mut named, mut total) = (vec![false; tables], 0);
    for (table, ids) in parts {
        let refused = |what: &str| Err(TablesError::BadTable { table, tables, what: what.into() });
        match named.get_mut(table) {
            None => return refused("unknown"),
            Some(true) => return refused("named twice in one request"),
            Some(named) => *named = true,
        }
        total += ids;
    }
    if total > MAX_IDS_PER_REQUEST {
        return Err(TablesError::TooManyIds { ids: total, max: MAX_IDS_PER_REQUEST });
    }
    Ok(())
}

/// Check that a buffer of `floats` numbers has the size of the part's vectors, and that its lists of samples
/// are valid. Refuse samples that are to be pooled.
pub(crate) fn check_buffer(table: &Table, part: &TableIds<'_>, floats: usize) -> Result<(), TablesError> {
    let Table { name, dim, .. } = table;
    let ids = part.ids.len();
    let (what, vectors) = (if part.per_sample.is_some() { "samples" } else { "ids" }, part.vectors());
    if vectors.checked_mul(*dim) != Some(floats) {
        return malformed(format!(
            "table {name}: a buffer of {floats} floats, but dim is {dim} and the number of {what} is {vectors}"
        ));
    }
    match &part.per_sample {
        None => Ok(()),
        Some(PerSample::Gathered(csr)) => {
            csr.check(ids, vectors).map_err(|error| of_table(name, error.into()))
        }
        Some(PerSample::Pooled(_)) => malformed(format!("table {name}: this store cannot pool rows")),
    }
}

/// Check that no sample receives two rows, because two threads could then write to it concurrently.
pub(crate) fn check_samples_once(table: &Table, part: &TableIds<'_>) -> Result<(), TablesError> {
    let Some(csr) = part.gathered() else { return Ok(()) };
    let mut seen = vec![0u64; csr.indices.len().div_ceil(64)];
    for sample in csr.indices {
        let (word, bit) = (&mut seen[*sample as usize / 64], 1 << (sample % 64));
        if *word & bit != 0 {
            return malformed(format!("table {}: sample {sample} occurs twice", table.name));
        }
        *word |= bit;
    }
    Ok(())
}

/// Check a step. Rows store steps in 32 bits.
pub(crate) fn check_step(step: u64) -> Result<u32, TablesError> {
    match u32::try_from(step) {
        Ok(step) if step > 0 => Ok(step),
        _ => malformed(format!("step is {step}; it must be from 1 to {}", u32::MAX)),
    }
}
