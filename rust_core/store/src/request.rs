//! What is checked of a request before it has any effect.

use persia_types::limits::MAX_IDS_PER_REQUEST;
use persia_types::{Schema, TablesError};

/// One table's part of a request: its index, its number of ids, and the floats that came with them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) table: usize,
    pub(crate) ids: usize,
    pub(crate) floats: usize,
}

pub(crate) fn malformed<T>(what: String) -> Result<T, TablesError> {
    Err(TablesError::BadShape { what })
}

/// Check tables and lengths; `what` names the floats.
pub(crate) fn check_parts(
    schema: &Schema,
    parts: impl Iterator<Item = Part> + Clone,
    what: &str,
) -> Result<(), TablesError> {
    let tables = schema.tables.len();
    let mut named = vec![false; tables];
    for Part { table, ids, floats } in parts.clone() {
        let refused = |what| Err(TablesError::BadTable { table, tables, what });
        match named.get_mut(table) {
            None => return refused("unknown"),
            Some(true) => return refused("named twice in one request"),
            Some(named) => *named = true,
        }
        let dim = schema.tables[table].dim;
        if ids.checked_mul(dim) != Some(floats) {
            let name = &schema.tables[table].name;
            return malformed(format!("table {name}: {floats} floats of {what} for {ids} ids of dim {dim}"));
        }
    }
    let ids = parts.map(|part| part.ids).sum();
    if ids > MAX_IDS_PER_REQUEST {
        return Err(TablesError::TooManyIds { ids, max: MAX_IDS_PER_REQUEST });
    }
    Ok(())
}

/// The step as rows keep it.
pub(crate) fn check_step(step: u64) -> Result<u32, TablesError> {
    match u32::try_from(step) {
        Ok(step) if step > 0 => Ok(step),
        _ => malformed(format!("step {step} is not from 1 to {}", u32::MAX)),
    }
}
