//! Traces of steps, which are sent to an OpenTelemetry collector with OTLP over gRPC.
//!
//! A rank samples every N-th step. The ids of a step's trace, and of the spans for the step, its look-up and its push,
//! are hashes of the token and of a random number of the process. The threads of a rank and its Python code therefore
//! need not exchange these ids. Requests of a sampled step carry the W3C Trace Context header `traceparent`. Servers
//! and middlewares record spans for requests with this header.
//!
//! * [`TraceSettings`]: the variables of OpenTelemetry
//! * [`start`], [`stop`]: start and stop the exporter of this process. Without an exporter, this module has no effect
//! * [`RequestSpan`]: the spans of servers and middlewares
//! * [`record_step`], and [`persia_types::trace`]: the spans of ranks

mod context;
mod exporter;
mod request;
mod settings;
mod step;

pub use exporter::{Process, start, stop};
pub use request::RequestSpan;
pub use settings::{BadTraceSettings, TraceSettings};
pub use step::{StepCall, inject_step, record_step};
