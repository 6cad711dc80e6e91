//! Look-ups and pushes as streams of checked chunks.
//!
//! Each module uses only the modules listed before it, except that `csr` uses `receive`.

pub mod chunk;
pub mod floats;
pub mod samples;

pub mod parts;

pub mod collect;
pub mod scatter;
pub mod send;

pub mod csr;
pub mod receive;

#[cfg(test)]
mod tests;
