//! [`Destination`]: one save, into a directory or an object store.

use std::path::Path;

use persia_types::is_url;
use persia_types::tables::FileEntry;

use super::error::Result;
use super::manifest::{Head, Manifest};
use super::object::ObjectSaver;
use super::saver::Saver;

/// A save into a directory, or below a URL. If it is dropped before [`Destination::commit`], it removes its
/// files.
pub enum Destination {
    /// A directory.
    Folder(Saver),
    /// A URL of an object store.
    Object(Box<ObjectSaver>),
}

impl Destination {
    /// Begin a save into `dir`, which is a directory or a URL.
    ///
    /// # Errors
    /// Those of [`Saver::begin`] and [`ObjectSaver::begin`].
    pub fn begin(dir: &Path) -> Result<Self> {
        if is_url(dir) {
            ObjectSaver::begin(dir).map(|saver| Self::Object(Box::new(saver)))
        } else {
            Saver::begin(dir).map(Self::Folder)
        }
    }

    /// The directory or URL in which the caller creates the files to add.
    pub fn staging(&self) -> &Path {
        match self {
            Self::Folder(saver) => saver.staging(),
            Self::Object(saver) => saver.staging(),
        }
    }

    /// Check that a file of this name can be added.
    ///
    /// # Errors
    /// `BadSave`, `Occupied` and `Io`, as for [`Self::add`].
    pub fn check_name(&self, name: &str) -> Result<()> {
        match self {
            Self::Folder(saver) => saver.staged(name).map(drop),
            Self::Object(saver) => saver.check_name(name),
        }
    }

    /// Add a file that is in [`Self::staging`].
    ///
    /// # Errors
    /// Those of [`Saver::add`] and [`ObjectSaver::add`].
    pub fn add(&mut self, entry: FileEntry) -> Result<()> {
        match self {
            Self::Folder(saver) => saver.add(entry),
            Self::Object(saver) => saver.add(entry),
        }
    }

    /// Write a file and add it.
    ///
    /// # Errors
    /// `BadSave`, `Occupied` and `Io`, as for [`Self::add`].
    pub fn add_content(&mut self, name: &str, content: &[u8]) -> Result<()> {
        match self {
            Self::Folder(saver) => saver.add_content(name, content),
            Self::Object(saver) => saver.add_content(name, content),
        }
    }

    /// Publish the checkpoint.
    ///
    /// # Errors
    /// Those of [`Saver::commit`] and [`ObjectSaver::commit`].
    pub fn commit(self, head: Head) -> Result<Manifest> {
        match self {
            Self::Folder(saver) => saver.commit(head),
            Self::Object(saver) => saver.commit(head),
        }
    }

    /// Abandon the save without removing its files. Call this if another process may still write to them.
    pub fn abandon(self) {
        match self {
            Self::Folder(saver) => saver.abandon(),
            Self::Object(saver) => saver.abandon(),
        }
    }
}
