//! Servers and middlewares over real sockets: in this process, and as the binaries they are shipped as.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]

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
mod running;
mod stack;
