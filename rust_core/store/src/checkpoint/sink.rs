//! [`Sink`]: a file being written, in a directory or an object store.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use persia_objects::{Patience, Place, Upload};
use persia_types::is_url;

use super::disk::Output;
use super::error::Result;

/// A file being written. If it is dropped before [`Sink::finish`], the file is removed.
pub(super) enum Sink {
    File(Output),
    Object(Upload),
}

impl Sink {
    /// Create a file at a path or URL. At a path, the file must not exist. At a URL, an existing object is
    /// replaced.
    pub(super) fn create(path: &Path) -> Result<Self> {
        Ok(match Upload::create(path)? {
            Some(upload) => Self::Object(upload),
            None => Self::File(Output::create(path)?),
        })
    }

    /// Make the content durable. Returns its size and BLAKE3 hash.
    pub(super) fn finish(self) -> Result<(u64, String)> {
        match self {
            Self::File(output) => output.finish(),
            Self::Object(upload) => Ok(upload.finish()?),
        }
    }
}

impl Write for Sink {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::File(output) => output.write(buffer),
            Self::Object(upload) => upload.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Make the names in a directory durable. Names in an object store are always durable.
pub(crate) fn sync_names(dir: &Path) -> io::Result<()> {
    if is_url(dir) { Ok(()) } else { File::open(dir)?.sync_all() }
}

/// Remove the files of a save that failed. The next save removes what remains, so errors do not matter. If the store
/// fails, requests are retried only twice, because the caller has an error to report.
pub(crate) fn discard(dir: &Path, names: &[String]) {
    match Place::find(dir, Patience::Probe) {
        Ok(Some(place)) => drop(place.delete(names.iter().cloned())),
        _ => names.iter().for_each(|name| drop(fs::remove_file(dir.join(name)))),
    }
}
