//! The protocol between trainers, middlewares and embedding servers.
//!
//! A look-up or push on the wire, each module built on those above it:
//!
//! * [`chunk`]: complete items of one part, with a checksum
//! * [`floats`]: the format of a row
//! * [`samples`]: the description of pooled samples in a head
//! * [`parts`]: the tables of a request, checked, and their split among servers
//! * [`send`], [`collect`], [`scatter`]: creating the chunks of a request, collecting them, writing rows to their
//!   positions
//! * [`receive`], [`csr`]: receiving a complete request from a stream
//!
//! Around it:
//!
//! * [`proto`]: messages and services, generated from `proto/persia/v1/`
//! * [`convert`], [`error`]: types and [`persia_types::TablesError`] as messages and back
//! * [`settings`], [`listen`], [`tls`], [`auth`], [`backoff`]: connections, their limits and their authentication
//! * [`discovery`]: discovery of a job's processes, through NATS
//! * [`rpc`]: the methods that servers and middlewares have in common
//! * [`client`]: [`client::WireTables`], rows on embedding servers
//! * [`logs`]: the grammar of `PERSIA_LOG`

#[cfg(target_endian = "big")]
compile_error!("numbers are sent in memory order, which must be little-endian");

pub mod client;
mod codec;
pub mod convert;
pub mod discovery;
pub mod error;
pub mod logs;
pub mod rpc;
mod transport;

pub use codec::{chunk, collect, csr, floats, parts, receive, samples, scatter, send};
pub use transport::{auth, backoff, listen, peer, settings, tls};

/// Generated messages, clients and servers of `persia.v1`; `tests/generated.rs` describes how.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod proto {
    include!("generated/persia.v1.rs");

    /// All files of `persia.v1`, for the reflection service.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/persia.v1.bin");
}

/// The number of the protocol. Peers with another number are refused.
pub const PROTOCOL: u32 = 4;
/// The version of Persia. Peers with another version are refused.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
