//! Runs the contract of `Tables` on the plain model, and on models with one defect each, which the contract
//! must detect.

use std::sync::Arc;

use persia_contract as contract;
use persia_types::tables::{LookupReport, LookupRequest, PushReport, PushRequest, Tables, TablesError};

use crate::plain::PlainTables;
use crate::support::{Wrapped, tables_by_wrapping};

#[test]
fn plain_tables_keep_the_contract() {
    contract::run_all(&|| Arc::new(PlainTables::new(contract::schema())));
}

/// The cases that fail on tables with this defect.
fn caught(make: contract::Make<'_>) -> Vec<&'static str> {
    let failed = |case: fn(contract::Make<'_>)| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(make))).is_err()
    };
    contract::cases().into_iter().filter(|(_, case)| failed(*case)).map(|(name, _)| name).collect()
}

#[test]
fn the_contract_catches_a_push_that_counts_twice() {
    struct Twice(PlainTables);
    tables_by_wrapping!(Twice);
    impl Wrapped for Twice {
        fn inner(&self) -> &dyn Tables {
            &self.0
        }
        fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
            let mut token = request.token;
            token.rank += 1000; // as if the token were not remembered
            self.0.push(&PushRequest { token, ..*request })?;
            self.0.push(request)
        }
    }
    let caught = caught(&|| Arc::new(Twice(PlainTables::new(contract::schema()))));
    assert!(caught.contains(&"a push counts once"), "{caught:?}");
}

#[test]
fn the_contract_catches_an_evaluation_that_inserts() {
    struct Inserting(PlainTables);
    tables_by_wrapping!(Inserting);
    impl Wrapped for Inserting {
        fn inner(&self) -> &dyn Tables {
            &self.0
        }
        fn lookup(
            &self,
            request: &LookupRequest<'_>,
            rows: &mut [&mut [f32]],
        ) -> Result<LookupReport, TablesError> {
            self.0.lookup(&LookupRequest { mode: persia_types::Mode::Train, ..*request }, rows)
        }
    }
    let caught = caught(&|| Arc::new(Inserting(PlainTables::new(contract::schema()))));
    assert!(caught.contains(&"evaluation changes nothing and reads zeros"), "{caught:?}");
}

#[test]
fn the_contract_catches_gradients_that_shift_after_a_missing_id() {
    struct Shifting(PlainTables);
    tables_by_wrapping!(Shifting);
    impl Wrapped for Shifting {
        fn inner(&self) -> &dyn Tables {
            &self.0
        }
        fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
            let shifted: Vec<Vec<f32>> =
                request.tables.iter().map(|table| self.0.shifted_by_missing(request.step, table)).collect();
            let tables: Vec<_> = request
                .tables
                .iter()
                .zip(&shifted)
                .map(|(table, rows)| {
                    let gradients = persia_kernels::Gradients::Rows(rows);
                    persia_types::tables::TableGradients { gradients, ..*table }
                })
                .collect();
            self.0.push(&PushRequest { tables: &tables, ..*request })
        }
    }
    let caught = caught(&|| Arc::new(Shifting(PlainTables::new(contract::schema()))));
    assert!(caught.contains(&"a missing id shifts no other"), "{caught:?}");
}
