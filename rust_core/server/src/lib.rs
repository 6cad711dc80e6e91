//! Embedding servers, and the middleware in front of them.
//!
//! * [`node`]: what one server holds and refuses: the store, the run's generation, the order of reproducible runs
//! * [`service`]: a node as gRPC service
//! * [`middleware`]: requests divided among servers, and their answers put together
//! * [`serve`]: connections, from the first to the last; health and reflection
//! * [`process`]: what both binaries do at their start and end; [`args`], [`logs`], [`metrics`], [`watchdog`],
//!   [`probe`], [`exit`]: the parts of it

mod allocator;
pub mod args;
mod connection;
pub mod exit;
pub mod logs;
pub mod metrics;
pub mod middleware;
pub mod node;
pub mod probe;
pub mod process;
mod refusal;
pub mod serve;
pub mod service;
pub mod watchdog;
