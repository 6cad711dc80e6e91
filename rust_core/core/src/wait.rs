//! Waits without the GIL, in slices, so that Ctrl-C ends the wait and not the process.

use std::time::Duration;

use pyo3::prelude::*;

/// The maximum delay until a Python signal is handled.
const SLICE: Duration = Duration::from_millis(100);

/// Call `attempt` without the GIL until it returns a value. Signals are handled after every slice.
pub(crate) fn until<T: Send>(
    py: Python<'_>,
    mut attempt: impl FnMut(Duration) -> PyResult<Option<T>> + Send,
) -> PyResult<T> {
    loop {
        if let Some(value) = py.detach(|| attempt(SLICE))? {
            return Ok(value);
        }
        py.check_signals()?;
    }
}
