//! Starts worker threads, joins them, and turns their panics into errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use crate::error::Error;

/// Run `work`, and turn a panic into an error. Otherwise the thread would end silently.
pub(crate) fn guarded<T>(
    worker: &'static str,
    step: u64,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Error::Panicked { worker, step, what: panic_message(panic.as_ref()) }))
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Start a named worker thread.
pub(super) fn spawn(
    worker: &'static str,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name(format!("persia-{worker}"))
        .spawn(work)
        .map_err(|source| Error::Spawn { worker, source: source.into() })
}

/// Wait for the end of a worker, unless this thread *is* the worker. The worker can be this thread, because a
/// gradient's destructor may drop the engine.
pub(super) fn join(worker: Option<JoinHandle<()>>) {
    if let Some(worker) = worker
        && worker.thread().id() != std::thread::current().id()
    {
        // `guarded` has already turned panics of the work into errors.
        let _ = worker.join();
    }
}
