//! Objects below a URL such as `s3://bucket/runs/census`, in an object store that speaks the S3 protocol.
//!
//! All functions block until their requests end. Requests run on an asynchronous runtime of this crate. The
//! functions must therefore not be called on a thread of another asynchronous runtime, unless that thread may
//! block. Every function that sends requests also fails if the crate's runtime cannot start its threads.
//! Credentials, region and endpoint come from the environment variables that Amazon's tools read.
//!
//! * [`Place`]: a URL, and requests about the objects below it
//! * [`Upload`]: writes an object piece by piece, in bounded memory
//! * [`Failure`]: an error, with the URL, the cause and, if it is known, what to do

mod client;
mod failure;
mod place;
mod probe;
mod upload;

pub use bytes::Bytes;
pub use failure::Failure;
pub use place::{Fetched, Object, Patience, Place, Put, Version};
pub use upload::Upload;
