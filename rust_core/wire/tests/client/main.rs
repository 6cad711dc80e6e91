//! The client against a middleware that misbehaves in every way, over real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test: a panic is its verdict")]

mod admin;
mod faults;
mod mock;
mod tls;
