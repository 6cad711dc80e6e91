//! Tests of the client with a faulty middleware, over real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test: a panic is its verdict")]

mod admin;
mod faults;
mod mock;
mod tls;
