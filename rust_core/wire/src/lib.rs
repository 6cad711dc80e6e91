//! The protocol between trainers, middlewares and embedding servers.
//!
//! * [`proto`]: messages and services, generated from `proto/persia/v1/`
//! * [`parts`]: a request's tables, checked; what each server gets of them
//! * [`chunk`]: ids, rows and gradients as streams of checked chunks
//! * [`samples`]: vectors of samples in the place of rows of ids
//! * [`scatter`]: rows of a reply, written to where they belong
//! * [`receive`]: a whole look-up or push out of a stream
//! * [`convert`]: tokens, reports and files as messages
//! * [`error`]: [`persia_types::TablesError`] as gRPC status and back
//! * [`auth`], [`tls`]: who may call what
//! * [`backoff`]: pauses between tries
//! * [`discovery`]: where the processes of a job are, through NATS
//! * [`client`]: [`client::WireTables`], rows behind the network
//! * [`settings`], [`listen`]: endpoints, channels and servers, all with the same limits

#[cfg(target_endian = "big")]
compile_error!("numbers travel as they lie in memory, little-endian");

pub mod auth;
pub mod backoff;
pub mod chunk;
pub mod client;
pub mod convert;
pub mod discovery;
pub mod error;
pub mod floats;
pub mod listen;
pub mod parts;
pub mod receive;
pub mod samples;
pub mod scatter;
pub mod settings;
pub mod tls;

/// Messages, clients and servers of `persia.v1`, generated; `tests/generated.rs` says how.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod proto {
    include!("generated/persia.v1.rs");

    /// All files of `persia.v1`, for the reflection service.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/persia.v1.bin");
}

/// Number of the protocol. Peers of another one are refused.
pub const PROTOCOL: u32 = 3;
/// Version of Persia. Peers of another one are refused.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
