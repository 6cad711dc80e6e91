//! What is sent arrives, and what is malformed is refused.

mod receive;
mod samples;
mod stream;
