//! Sent messages arrive unchanged, and malformed ones are refused.

mod receive;
mod samples;
mod stream;
