//! The protocol between trainers, middlewares and embedding servers.
//!
//! These modules send and receive a look-up or push. Each module uses only those above it:
//!
//! * [`chunk`]: complete items of one part, with a checksum
//! * [`floats`]: the format of rows
//! * [`samples`]: the description of samples in a head
//! * [`parts`]: the checked tables of a request, and their split among servers
//! * [`send`], [`collect`], [`scatter`]: create the chunks of a request, collect them, and write rows to their
//!   positions
//! * [`receive`], [`csr`]: receive a complete request from a stream
//!
//! The other modules:
//!
//! * [`proto`]: messages and services, generated from `proto/persia/v1/`
//! * [`convert`], [`error`]: convert types and [`persia_types::TablesError`] to messages and back
//! * [`settings`], [`listen`], [`peer`], [`tls`], [`auth`], [`backoff`]: connections, their limits and their
//!   authentication
//! * [`discovery`]: discovery of a job's processes, through NATS
//! * [`rpc`]: the methods that both servers and middlewares have
//! * [`client`]: [`client::WireTables`], which accesses rows on embedding servers
//! * [`logs`]: the grammar of `PERSIA_LOG`, and the format of log lines
//! * [`trace`]: the spans of traced steps

#[cfg(target_endian = "big")]
compile_error!("numbers are sent in memory order, which must be little-endian");

pub mod client;
mod codec;
pub mod convert;
pub mod discovery;
pub mod error;
pub mod logs;
pub mod rpc;
pub mod trace;
mod transport;

pub use codec::{chunk, collect, csr, floats, parts, receive, samples, scatter, send};
pub use transport::{auth, backoff, listen, peer, settings, tls};

/// Generated messages, clients and servers of `persia.v1`; `tests/generated.rs` generates them.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod proto {
    include!("generated/persia.v1.rs");

    /// The descriptors of all files of `persia.v1`, for the reflection service.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/persia.v1.bin");
}

/// The protocol number. Peers with a different number are refused.
pub const PROTOCOL: u32 = 4;
/// The version of Persia. Peers with a different version are refused.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
