//! The protocol between trainers, middlewares and embedding servers.
//!
//! * [`proto`]: messages and services, generated from `proto/persia/v1/`

/// Messages, clients and servers of `persia.v1`, generated; `tests/generated.rs` says how.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod proto {
    include!("generated/persia.v1.rs");
}
