//! The types that every part of Persia shares. The crate does no I/O, starts no threads and does not depend on Python.
//!
//! * [`id`]: feature ids, their hash and the virtual shard they belong to
//! * [`token`]: the identifier of one look-up or push, and the window by which each is applied once
//! * [`schema`]: slots, tables, optimizers and initialisers, as the engine and the store use them
//! * [`tables`]: [`Tables`], the one interface between the engine and the rows
//! * [`limits`]: every limit
//! * [`config`]: the two YAML files, parsed and validated

pub mod config;
mod error;
pub mod id;
pub mod limits;
mod optimizer;
pub mod schema;
mod stats;
pub mod tables;
pub mod token;

pub use id::{Id, ShardedIds, VIRTUAL_SHARDS, server_shards, shard_of};
pub use optimizer::InvalidNumber;
pub use schema::{
    Admission, Dtype, HashStack, Initializer, Optimizer, Pooling, Rounding, Schema, Slot, Table,
    TableSettings,
};
pub use tables::{Mode, Tables, TablesError};
pub use token::{JobId, Token};
