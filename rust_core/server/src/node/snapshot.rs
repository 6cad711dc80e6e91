//! The administrative requests for checkpoints: make a cut, write its files, and replace or drop all rows.

use std::io;
use std::time::Duration;

use persia_store::checkpoint::probe_file;
use persia_types::tables::{FileEntry, Snapshot};
use persia_types::{Tables, TablesError};

use super::request_log::Rows;
use super::{Fence, Node};

/// The maximum time that a cut waits for another administrative request. It is longer than any request without file
/// access takes.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);

impl Node {
    /// Hold the current rows for the snapshot with this number.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`; those of [`Tables::prepare_snapshot`]; `Io` with the kind `ResourceBusy` if
    /// another request is still in progress after a second; `Io` if the log cannot be written.
    pub fn prepare_snapshot(&self, fence: Fence, number: u64) -> Result<(), TablesError> {
        self.check_fence(fence)?;
        // The cut must not wait for a disk, because all ranks wait for the cut.
        let busy = |why: &str| {
            let what = format!("cannot begin a snapshot: {why}; save again later");
            self.io(io::ErrorKind::ResourceBusy, &what)
        };
        let _writing = self.writing.try_lock_for(CUT_TIMEOUT).ok_or_else(|| {
            busy("files of an earlier one are still being written, or all rows are being replaced or dropped")
        })?;
        let _alone = self
            .admin
            .try_lock_for(CUT_TIMEOUT)
            .ok_or_else(|| busy("another administrative request is in progress"))?;
        self.check_fence(fence)?;
        let Some(log) = &self.log else { return self.store.prepare_snapshot(number) };
        let cut = log.prepare_snapshot(number, || {
            self.store.prepare_snapshot(number)?;
            Ok(self.position())
        });
        cut.map_err(|error| self.on_this_host(error))
    }

    /// Release the rows of this snapshot, if they are held. If the snapshot is being written, the transfer is
    /// cancelled.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`.
    pub fn abort_snapshot(&self, fence: Fence, number: u64) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        self.check_fence(fence)?;
        self.release(number)
    }

    fn release(&self, number: u64) -> Result<(), TablesError> {
        self.store.abort_snapshot(number)?;
        if let Some(log) = &self.log
            && let Err(error) = log.abort_snapshot(number)
        {
            tracing::warn!(
                number,
                "cannot log that the snapshot was aborted; a server that recovers from this log keeps the snapshot, \
                 and copies its rows when they change: {error}"
            );
        }
        Ok(())
    }

    /// Check that a snapshot can be written into `directory`, which is relative to the checkpoint root or a
    /// URL.
    ///
    /// # Errors
    /// Those of [`Self::write_snapshot`].
    pub fn check_storage(&self, fence: Fence, directory: &str) -> Result<(), TablesError> {
        self.check_fence(fence)?;
        let probed = self.options.checkpoints.resolve(directory).and_then(|dir| probe_file(&dir));
        probed.map_err(|error| match error {
            TablesError::Io { path, source } => {
                let what = format!("server {}: {source}", self.options.index);
                TablesError::Io { path, source: io::Error::new(source.kind(), what) }
            }
            other => other,
        })
    }

    /// Write the rows of the snapshot with this number, or the current rows, into `directory`, which is relative to
    /// the checkpoint root or a URL. After an error, the directory contains no file of this call.
    ///
    /// # Errors
    /// `NotBegun`; `StaleGeneration`; `BadShape` for a directory that is not allowed, or if the rows of the
    /// snapshot are not held; `Io`, including if another run begins during the call.
    pub fn write_snapshot(
        &self,
        fence: Fence,
        directory: &str,
        number: Option<u64>,
    ) -> Result<Snapshot, TablesError> {
        let _writing = self.writing.lock();
        let (start, dir) = {
            let _alone = self.admin.lock();
            self.check_fence(fence)?;
            (self.store.start_transfer(), self.options.checkpoints.resolve(directory))
        };
        // Write without the lock `admin`, so that another run can begin.
        let snapshot = dir.and_then(|dir| self.store.write_started(start, &dir, number));
        if let (Err(_), Some(number)) = (&snapshot, number) {
            let _alone = self.admin.lock();
            if self.check_fence(fence).is_ok() {
                self.release(number)?;
            }
        }
        let snapshot = snapshot.map_err(|error| self.on_this_host(error))?;
        tracing::info!(directory, files = snapshot.files.len(), "snapshot written");
        Ok(snapshot)
    }

    /// Truncate the log, if there is one. Call this after the checkpoint that contains this snapshot has been
    /// published. The checkpoint's `files` in `directory` become the base of the log, unless there has been a later
    /// cut.
    ///
    /// # Errors
    /// Those of [`Self::write_snapshot`].
    pub fn commit_snapshot(
        &self,
        fence: Fence,
        number: u64,
        directory: &str,
        files: &[FileEntry],
    ) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        self.check_fence(fence)?;
        self.options.checkpoints.resolve(directory).map_err(|error| self.on_this_host(error))?;
        let Some(log) = &self.log else { return Ok(()) };
        let run = self.begun.read().clone().ok_or(TablesError::NotBegun)?;
        let rows = Rows { directory: directory.into(), files: files.to_vec() };
        log.truncate_to_checkpoint(number, run, rows).map_err(|error| self.on_this_host(error))
    }

    /// Replace all rows by the rows in `files` that belong to this server's shards or, with `check_only`, only check
    /// whether that is possible.
    ///
    /// # Errors
    /// Those of [`Self::write_snapshot`]; `Corrupt` and `Foreign`, with the name of the file; `OutOfMemory`.
    pub fn restore(
        &self,
        fence: Fence,
        directory: &str,
        files: &[FileEntry],
        check_only: bool,
    ) -> Result<(), TablesError> {
        let _writing = self.writing.lock();
        let _alone = self.admin.lock();
        self.check_fence(fence)?;
        let dir = self.options.checkpoints.resolve(directory).map_err(|error| self.on_this_host(error))?;
        if check_only {
            return self.store.check_restore(&dir, files).map_err(|error| self.on_this_host(error));
        }
        let rows = Rows { directory: directory.into(), files: files.to_vec() };
        self.replace(Some(rows), || self.store.restore(&dir, files))?;
        tracing::info!(dir = %dir.display(), "rows restored");
        Ok(())
    }

    /// Drop all rows.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`; `Io` if the log cannot be written.
    pub fn clear(&self, fence: Fence) -> Result<(), TablesError> {
        let _writing = self.writing.lock();
        let _alone = self.admin.lock();
        self.check_fence(fence)?;
        self.replace(None, || self.store.clear())?;
        tracing::info!("rows dropped");
        Ok(())
    }

    /// Apply `change`, after which the store contains exactly `rows`, and start a new log from them.
    fn replace(
        &self,
        rows: Option<Rows>,
        change: impl FnOnce() -> Result<(), TablesError>,
    ) -> Result<(), TablesError> {
        let run = self.begun.read().clone().ok_or(TablesError::NotBegun)?;
        *self.oldest.lock() = run.generation;
        let replaced = match &self.log {
            None => change(),
            Some(log) => log.restart(|| {
                change()?;
                Ok((run, rows, self.position()))
            }),
        };
        replaced.map_err(|error| self.on_this_host(error))
    }
}
