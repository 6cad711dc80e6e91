//! The types that all parts of Persia share. This crate does no I/O, starts no threads and does not depend on Python.
//!
//! * [`id`]: feature ids, their hash and their virtual shard
//! * [`token`]: the identifier of one look-up and its push, and the record of pushes that ensures that each
//!   is applied once
//! * [`schema`]: slots, tables, optimizers and initializers, as the engine and the store use them
//! * [`tables`]: [`Tables`], the one interface between the engine and the rows
//! * [`limits`]: the limits of configurations, requests, connections and rows
//! * [`config`]: parses and validates the YAML files
//! * [`trace`]: the times of traced steps

pub mod config;
mod error;
pub mod id;
pub mod limits;
mod optimizer;
mod place;
pub mod schema;
mod stats;
pub mod tables;
pub mod token;
pub mod trace;

pub use id::{Id, ShardedIds, VIRTUAL_SHARDS, server_shards, shard_of};
pub use optimizer::InvalidNumber;
pub use place::is_url;
pub use schema::{
    Admission, Dtype, HashStack, Initializer, Optimizer, Pooling, Rounding, Schema, Slot, Table,
    TableSettings,
};
pub use tables::{Mode, Tables, TablesError};
pub use token::{JobId, Token};
