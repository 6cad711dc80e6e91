//! The times of traced steps. The engine reports them to the recorder of its process, if one is installed.
//!
//! Without a recorder, a report costs a load and a comparison. With a recorder, a report about a step that is
//! not sampled also costs a call of [`Recorder::samples`].

use std::sync::OnceLock;
use std::time::Instant;

use crate::token::Token;

/// A part of a step, as performed by a thread of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Matching features with slots and tables.
    Plan,
    /// Waiting for space in the staleness window.
    StalenessWait,
    /// `Tables::lookup`.
    LookUp,
    /// Pooling rows.
    Pool,
    /// Summing the gradients of each id.
    SegmentSum,
    /// `Tables::push`.
    Push,
}

/// Records the times of the steps that it samples.
pub trait Recorder: Send + Sync {
    /// Whether the step of this token is sampled.
    fn samples(&self, token: Token) -> bool;

    /// Record a stage of a sampled step. `failed` is true if the stage ended with an error.
    fn record(&self, token: Token, stage: Stage, start: Instant, end: Instant, failed: bool);
}

static RECORDER: OnceLock<Box<dyn Recorder>> = OnceLock::new();

/// Report the times of steps to `recorder` from now on. Only the first recorder that a process installs is
/// used.
pub fn install(recorder: Box<dyn Recorder>) {
    let _ = RECORDER.set(recorder);
}

/// The recorder of the process, if there is one and it samples the step of this token.
pub fn recorder_of(token: Token) -> Option<&'static dyn Recorder> {
    let recorder: &'static dyn Recorder = &**RECORDER.get()?;
    recorder.samples(token).then_some(recorder)
}
