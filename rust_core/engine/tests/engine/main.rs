//! Tests of the engine's interface, over tables that can be delayed and made to fail.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests are tests, too")]

mod contract;
mod failures;
mod features;
mod mathematics;
mod ordering;
mod plain;
mod staleness;
mod support;
mod turns;
