//! Embedding servers and the middlewares in front of them.
//!
//! * [`node`]: one server, with its rows, its run, and the order of requests in a reproducible run
//! * `wal`: the write-ahead log of a server
//! * [`service`]: serves a node over gRPC
//! * [`middleware`]: divides requests among servers and merges their responses
//! * [`serve`]: connections, authentication, health and reflection
//! * [`process`]: the life cycle of both binaries, with [`args`], [`kind`], [`logs`], [`metrics`], [`watchdog`],
//!   [`probe`] and [`exit`]

mod allocator;
pub mod args;
mod auth;
mod connection;
pub mod exit;
pub mod kind;
pub mod logs;
pub mod metrics;
pub mod middleware;
pub mod node;
pub mod probe;
pub mod process;
mod request_memory;
pub mod serve;
pub mod service;
mod wal;
pub mod watchdog;
