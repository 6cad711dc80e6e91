//! The contract of `Tables`.

use std::sync::Arc;

use persia_store::{Store, StoreOptions};

#[test]
fn the_store_keeps_the_contract() {
    let schema = persia_contract::schema();
    persia_contract::run_all(&|| Arc::new(Store::new(schema.clone(), StoreOptions::default()).unwrap()));
}
