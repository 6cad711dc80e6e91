//! Tests that sent messages arrive unchanged, and that malformed messages are refused.

mod receive;
mod samples;
mod stream;
