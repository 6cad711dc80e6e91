//! Embedding servers, and the middleware in front of them.
//!
//! * [`node`]: one server: its rows, its run, the order of requests in a reproducible run
//! * `wal`: its write-ahead log
//! * [`service`]: a node as gRPC service
//! * [`middleware`]: divides requests among servers, and merges their answers
//! * [`serve`]: connections, authentication, health and reflection
//! * [`process`]: start and end of both binaries; [`args`], [`kind`], [`logs`], [`metrics`], [`watchdog`], [`probe`]
//!   and [`exit`] are parts of it

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
