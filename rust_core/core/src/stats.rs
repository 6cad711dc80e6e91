//! Converts statistics to a dictionary.

use persia_engine::{EngineStats, StageTime};
use persia_types::Schema;
use persia_types::tables::Stats;
use pyo3::prelude::*;
use pyo3::types::PyDict;

pub(crate) fn describe<'py>(
    py: Python<'py>,
    schema: &Schema,
    stats: &Stats,
    engine: &EngineStats,
) -> PyResult<Bound<'py, PyDict>> {
    let rows = PyDict::new(py);
    for (table, count) in schema.tables.iter().zip(&stats.rows) {
        rows.set_item(&table.name, count)?;
    }
    let tables = PyDict::new(py);
    for table in &stats.tables {
        let one = PyDict::new(py);
        let numbers = [
            ("rows", table.rows),
            ("payload_bytes", table.payload_bytes),
            ("memory_bytes", table.memory_bytes),
            ("inserted", table.inserted),
            ("evicted", table.evicted),
            ("expired", table.expired),
            ("waiting", table.waiting),
            ("seen_once", table.seen_once),
        ];
        for (name, value) in numbers {
            one.set_item(name, value)?;
        }
        one.set_item("lookups", counters(py, table.lookups.counters())?)?;
        tables.set_item(&table.name, one)?;
    }
    let all = of_engine(py, schema, engine)?;
    all.set_item("rows", rows)?;
    all.set_item("tables", tables)?;
    all.set_item("payload_bytes", stats.payload_bytes)?;
    all.set_item("memory_bytes", stats.memory_bytes)?;
    all.set_item("lookups", counters(py, stats.lookups.counters())?)?;
    all.set_item("pushes", counters(py, stats.pushes.counters())?)?;
    Ok(all)
}

/// The statistics of one engine. `lookups` and `pushes` count its own requests, and not all requests to the tables.
pub(crate) fn of_engine<'py>(
    py: Python<'py>,
    schema: &Schema,
    engine: &EngineStats,
) -> PyResult<Bound<'py, PyDict>> {
    let seconds = PyDict::new(py);
    for (name, stage) in stages(engine) {
        seconds.set_item(name, stage.total.as_secs_f64())?;
    }
    let slots = PyDict::new(py);
    for (slot, counts) in schema.slots.iter().zip(&engine.slots) {
        let ids = PyDict::new(py);
        ids.set_item("occurrences", counts.occurrences)?;
        ids.set_item("unique", counts.unique)?;
        ids.set_item("truncated", counts.truncated)?;
        slots.set_item(&slot.name, ids)?;
    }
    let all = PyDict::new(py);
    all.set_item("lookups", counters(py, engine.lookup_report.counters())?)?;
    all.set_item("pushes", counters(py, engine.push_report.counters())?)?;
    all.set_item("staleness", engine.staleness)?;
    all.set_item("max_staleness", engine.max_staleness)?;
    all.set_item("slots", slots)?;
    all.set_item("seconds", seconds)?;
    Ok(all)
}

fn counters<'py>(
    py: Python<'py>,
    counters: impl Iterator<Item = (&'static str, u64)>,
) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    for (name, value) in counters {
        all.set_item(name, value)?;
    }
    Ok(all)
}

fn stages(engine: &EngineStats) -> [(&'static str, StageTime); 7] {
    [
        ("deduplicate", engine.deduplicate),
        ("plan", engine.plan),
        ("permit_wait", engine.staleness_wait),
        ("lookup", engine.lookup),
        ("pool", engine.pool),
        ("segment_sum", engine.segment_sum),
        ("push", engine.push),
    ]
}
