//! The tests that every implementation of [`Tables`] must pass. They depend on none of the implementations.
//!
//! ```text
//! #[test]
//! fn the_store_keeps_the_contract() {
//!     let store = || Store::new(persia_contract::schema(), StoreOptions::default()).unwrap();
//!     persia_contract::run_all(&|| Arc::new(store()));
//! }
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests, which fail by a panic")]

mod begin;
mod files;
mod fixture;
mod pooled;
mod refusals;
mod rows;
mod samples;
mod tokens;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use persia_types::schema::{Schema, Slot, Table};
use persia_types::tables::Tables;

/// Creates empty tables of [`schema`] on which no run has begun.
pub type Make<'a> = &'a dyn Fn() -> Arc<dyn Tables>;

/// The name of a guarantee, and its test.
pub type Case = (&'static str, fn(Make<'_>));

/// All cases.
pub fn cases() -> Vec<Case> {
    let rows = [rows::CASES, samples::CASES, pooled::CASES].concat();
    [begin::CASES, tokens::CASES, &rows, refusals::CASES, files::CASES].concat()
}

/// The schema that `make` must use: two tables, of dimensions 4 and 19.
pub fn schema() -> Schema {
    let slot = |name: &str, table| Slot { name: name.into(), table, ..Slot::default() };
    Schema {
        slots: vec![slot("a", 0), slot("b", 1), slot("c", 0)],
        tables: vec![Table::new("ac", 4), Table::new("b", 19)],
    }
}

/// Run every case on fresh tables.
///
/// # Panics
/// If a case fails, with the names of all failed cases.
pub fn run_all(make: Make<'_>) {
    let failed: Vec<&str> = cases()
        .into_iter()
        .filter(|(_, case)| catch_unwind(AssertUnwindSafe(|| case(make))).is_err())
        .map(|(name, _)| name)
        .collect();
    assert!(failed.is_empty(), "contract broken: {}", failed.join(", "));
}
