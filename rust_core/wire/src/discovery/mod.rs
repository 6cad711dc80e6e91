//! Discovery of a job's processes, through the services API of NATS (`$SRV.*`). Nothing else uses NATS.

mod blocking;
mod connection;
mod error;
mod host;
mod peer;

pub use self::blocking::BlockingDiscovery;
pub use self::connection::{Announced, Discovery, DiscoveryOptions};
pub(crate) use self::error::no_connection;
pub use self::error::{DiscoveryError, MAX_JOB_BYTES};
pub use self::host::advertised_host;
pub use self::peer::{Announcement, Peer, Service, check_job_name};
