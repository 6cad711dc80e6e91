//! Connections between processes: where, with which limits, and who may use them.

pub mod auth;
pub mod backoff;
pub mod listen;
pub mod settings;
pub mod tls;
