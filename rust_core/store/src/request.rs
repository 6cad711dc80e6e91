//! What is checked of a request before it has any effect.

use persia_types::limits::MAX_IDS_PER_REQUEST;
use persia_types::tables::{PerSample, TableIds};
use persia_types::{Schema, Table, TablesError};

pub(crate) fn malformed<T>(what: String) -> Result<T, TablesError> {
    Err(TablesError::BadShape { what })
}

/// Say of which table a malformed part is.
pub(crate) fn of_table(name: &str, error: TablesError) -> TablesError {
    match error {
        TablesError::BadShape { what } => TablesError::BadShape { what: format!("table {name}: {what}") },
        other => other,
    }
}

/// Check which tables are named and how many ids they have: `(table, ids)`.
pub(crate) fn check_tables(
    schema: &Schema,
    parts: impl Iterator<Item = (usize, usize)>,
) -> Result<(), TablesError> {
    let tables = schema.tables.len();
    let (mut named, mut all) = (vec![false; tables], 0);
    for (table, ids) in parts {
        let refused = |what: &str| Err(TablesError::BadTable { table, tables, what: what.into() });
        match named.get_mut(table) {
            None => return refused("unknown"),
            Some(true) => return refused("named twice in one request"),
            Some(named) => *named = true,
        }
        all += ids;
    }
    if all > MAX_IDS_PER_REQUEST {
        return Err(TablesError::TooManyIds { ids: all, max: MAX_IDS_PER_REQUEST });
    }
    Ok(())
}

/// Check that a buffer of `floats` takes what is asked for.
pub(crate) fn check_buffer(table: &Table, part: &TableIds<'_>, floats: usize) -> Result<(), TablesError> {
    let Table { name, dim, .. } = table;
    let ids = part.ids.len();
    let (what, vectors) = (if part.per_sample.is_some() { "samples" } else { "ids" }, part.vectors());
    if vectors.checked_mul(*dim) != Some(floats) {
        return malformed(format!(
            "table {name}: {floats} floats of buffer for {vectors} {what} of dim {dim}"
        ));
    }
    match &part.per_sample {
        None => Ok(()),
        Some(PerSample::Gathered(csr)) => {
            csr.check(ids, vectors).map_err(|error| of_table(name, error.into()))
        }
        Some(PerSample::Pooled(_)) => {
            malformed(format!("table {name}: a store gives rows, it does not pool"))
        }
    }
}

/// The step as rows keep it.
pub(crate) fn check_step(step: u64) -> Result<u32, TablesError> {
    match u32::try_from(step) {
        Ok(step) if step > 0 => Ok(step),
        _ => malformed(format!("step {step} is not from 1 to {}", u32::MAX)),
    }
}
