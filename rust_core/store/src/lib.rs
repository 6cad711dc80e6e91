//! Rows of embedding tables, in memory and on disk. Knows nothing of Python or the network.

pub mod checkpoint;
