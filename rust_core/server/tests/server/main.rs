//! Tests of servers and middlewares over sockets, in this process and as binaries.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics when it fails")]

mod auth;
mod contract;
mod equal;
mod hostile;
mod limits;
mod log;
mod lost;
mod pooled;
mod pooled_limits;
mod processes;
mod recovering;
mod running;
mod serving;
mod stack;
mod unauthenticated;
