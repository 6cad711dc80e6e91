//! Connections between processes: endpoints, limits and authentication.

pub mod auth;
pub mod backoff;
pub mod listen;
pub mod peer;
pub mod settings;
pub mod tls;
