//! What every part of Persia agrees on. No I/O, no threads, no Python.
//!
//! * [`id`]: feature ids, their hash and the virtual shard they belong to
//! * [`token`]: the name of one look-up or push, and the window that makes it count once
//! * [`schema`]: slots, tables, optimizers and initialisers as the engine and the store see them
//! * [`tables`]: [`Tables`], the one interface between the engine and wherever rows live
//! * [`kernels`]: the loops over floats that more than one part runs: pooling, sums of gradients
//! * [`simd`]: the same loop for every instruction set
//! * [`half`]: numbers of 16 bits
//! * [`limits`]: every number that bounds something
//! * [`config`]: the two YAML files, parsed and validated

pub mod config;
mod error;
pub mod half;
pub mod id;
pub mod kernels;
pub mod limits;
mod optimizer;
pub mod schema;
pub mod simd;
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
