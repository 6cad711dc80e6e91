//! [`Upload`]: an object that is being written.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use object_store::{MultipartUpload, PutPayload};
use tokio::task::JoinHandle;

use crate::client::runtime;
use crate::failure::{Failure, failure};
use crate::place::{Patience, Place, Result};

/// The size of each part except the last, in bytes. S3 accepts up to 10,000 parts.
const PART_BYTES: usize = 8 << 20;
/// The maximum number of parts of a file in flight. A file takes `PART_BYTES` of memory for each of them, and for
/// the part that is being filled.
const PARTS_IN_FLIGHT: usize = 2;
/// The time limit for the deletion of parts after a failure.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// A file that is being written to an object store: in one request if it fits into one part, otherwise in
/// several parts. It is not visible before [`Self::finish`]. If it is dropped before that, or `finish` fails,
/// its parts are deleted.
pub struct Upload {
    dir: Place,
    name: String,
    /// The part that is being filled.
    buffer: Vec<u8>,
    parts: Option<Box<dyn MultipartUpload>>,
    in_flight: VecDeque<JoinHandle<object_store::Result<()>>>,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl Upload {
    /// Begin to write the object `name` below `dir`. No request is sent before more than one part has been
    /// written, or [`Self::finish`] is called.
    pub fn new(dir: Place, name: &str) -> Self {
        Self {
            dir,
            name: name.into(),
            buffer: Vec::new(),
            parts: None,
            in_flight: VecDeque::new(),
            hasher: blake3::Hasher::new(),
            bytes: 0,
        }
    }

    /// Begin to write the object at a URL; None for a file system path.
    ///
    /// # Errors
    /// The URL or the environment cannot be used, or the URL names a bucket.
    pub fn create(path: &Path) -> Result<Option<Self>> {
        let Some(place) = Place::find(path, Patience::Save)? else { return Ok(None) };
        let no_object = || {
            let what = "the URL names a bucket; expected s3://BUCKET/OBJECT";
            Failure::new(path, io::ErrorKind::InvalidInput, what)
        };
        let (dir, name) = place.parent().ok_or_else(no_object)?;
        Ok(Some(Self::new(dir, name)))
    }

    /// Make the object visible. Returns its size and BLAKE3 hash.
    ///
    /// # Errors
    /// The object cannot be written.
    pub fn finish(mut self) -> Result<(u64, String)> {
        let url = self.dir.url_of(&self.name);
        self.complete().map_err(|source| Failure { url, source })?;
        Ok((self.bytes, self.hasher.finalize().to_hex().to_string()))
    }

    fn complete(&mut self) -> io::Result<()> {
        if self.parts.is_none() {
            let content = std::mem::take(&mut self.buffer);
            return self.dir.put(&self.name, content).map_err(|error| error.source);
        }
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        while !self.in_flight.is_empty() {
            self.wait_for_part()?;
        }
        let completed = match &mut self.parts {
            Some(parts) => runtime()?.block_on(parts.complete()).map(drop),
            None => Ok(()),
        };
        // If the response to the first request was lost, the store may refuse the repeated request although
        // the object exists.
        if let Err(error) = completed
            && self.size_in_store() != Some(self.bytes)
        {
            return Err(failure(&error));
        }
        self.parts = None; // the upload is complete, so its parts are not deleted
        Ok(())
    }

    /// The size of the object; None if the store does not confirm that it exists.
    fn size_in_store(&self) -> Option<u64> {
        self.dir.sizes(std::slice::from_ref(&self.name)).ok()?.first().copied().flatten()
    }

    fn send_part(&mut self) -> io::Result<()> {
        if self.parts.is_none() {
            self.parts = Some(self.dir.begin_parts(&self.name).map_err(|error| error.source)?);
        }
        while self.in_flight.len() >= PARTS_IN_FLIGHT {
            self.wait_for_part()?;
        }
        if let Some(parts) = &mut self.parts {
            let part = parts.put_part(PutPayload::from(std::mem::take(&mut self.buffer)));
            self.in_flight.push_back(runtime()?.spawn(part));
        }
        Ok(())
    }

    fn wait_for_part(&mut self) -> io::Result<()> {
        let Some(part) = self.in_flight.pop_front() else { return Ok(()) };
        runtime()?.block_on(part).map_err(io::Error::other)?.map_err(|error| failure(&error))
    }
}

impl Write for Upload {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.buffer.len() == PART_BYTES {
            self.send_part()?;
        }
        let taken = &data[..data.len().min(PART_BYTES - self.buffer.len())];
        self.buffer.extend_from_slice(taken);
        self.hasher.update(taken);
        self.bytes += taken.len() as u64;
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.in_flight.drain(..).for_each(|part| part.abort());
        if let (Some(mut parts), Ok(runtime)) = (self.parts.take(), runtime()) {
            // Only the error that ended the upload is reported. Parts that remain are deleted by a lifecycle
            // rule of the bucket, if it has one.
            let _ = runtime.block_on(async { tokio::time::timeout(ABORT_TIMEOUT, parts.abort()).await });
        }
    }
}
