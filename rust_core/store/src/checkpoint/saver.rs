//! [`Saver`]: stages and syncs files, publishes the manifest, and then removes the staging directory.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use persia_types::is_url;
use persia_types::tables::FileEntry;

use super::content;
use super::disk::{self, Lock, crash_point};
use super::error::{CheckpointError, Result};
use super::manifest::{FORMAT, Head, Manifest};
use super::names::{self, MANIFEST, MARKER};
use super::recover;

/// The advice to a user whose save found a damaged file in its directory.
const SAVE_ELSEWHERE: &str = "save to a different folder";

/// A save into a directory. If it is dropped before [`Saver::commit`], it removes its files.
pub struct Saver {
    dir: PathBuf,
    staging: PathBuf,
    revision: u64,
    files: Vec<FileEntry>,
    /// The files of the checkpoint to be replaced.
    previous: BTreeSet<String>,
    /// Whether the manifest may have been published. If so, the staged files may belong to the checkpoint.
    published: bool,
    /// Whether the staged files are kept when this is dropped.
    abandoned: bool,
    /// Whether this save created the directory.
    made: bool,
    _lock: Lock,
}

impl Saver {
    /// Begin a save into `dir`. Creates the directory if it does not exist, and [recovers](recover::recover)
    /// it first.
    ///
    /// # Errors
    /// `Busy` while another process saves into `dir`; `Corrupt` or `Future` if the manifest in `dir` cannot be read,
    /// because the files to replace are then unknown; `BadSave` for a URL; `Io`.
    pub fn begin(dir: &Path) -> Result<Self> {
        if is_url(dir) {
            return Err(CheckpointError::bad_save(dir, "expected a folder, not a URL"));
        }
        let made = !dir.is_dir();
        disk::create_dirs(dir)?;
        let lock = disk::lock(dir)?;
        let (manifest, highest) =
            recover::recover_locked(dir).map_err(|error| error.with_next(SAVE_ELSEWHERE))?;
        let revision = highest.checked_add(1).ok_or_else(|| {
            let what = format!("its last save has the highest possible number, {highest}; {SAVE_ELSEWHERE}");
            CheckpointError::bad_save(dir, what)
        })?;
        let previous = manifest.into_iter().flat_map(|old| old.files).map(|entry| entry.name).collect();
        let staging = dir.join(names::staging(revision));
        let saver = Self {
            dir: dir.into(),
            staging,
            revision,
            files: Vec::new(),
            previous,
            published: false,
            abandoned: false,
            made,
            _lock: lock,
        };
        disk::create_dir(&saver.staging)?;
        disk::mark(&saver.staging)?;
        Ok(saver)
    }

    /// The directory in which the caller creates the files to add.
    pub fn staging(&self) -> &Path {
        &self.staging
    }

    /// The path of a file to add.
    ///
    /// # Errors
    /// `BadSave`, `Occupied` and `Io`, as for [`Self::add`].
    pub fn staged(&self, name: &str) -> Result<PathBuf> {
        self.check_name(name)?;
        Ok(self.staging.join(name))
    }

    /// Add a file to the checkpoint. The caller has written it to the staging directory and synced it.
    ///
    /// # Errors
    /// `BadSave` for an invalid name, a name that was added before, an invalid hash, or a file of a different
    /// size; `Occupied` if the checkpoint's directory contains a file of that name that belongs to no
    /// checkpoint; `Corrupt` if the staged file is not a regular file; `Io`.
    pub fn add(&mut self, entry: FileEntry) -> Result<()> {
        let path = self.staging.join(&entry.name);
        self.check_name(&entry.name)?;
        if !content::is_hash(&entry.blake3) {
            return Err(CheckpointError::bad_save(&path, format!("{:?} is not a BLAKE3 hash", entry.blake3)));
        }
        let bytes = disk::Input::open(&path)
            .and_then(|input| input.len())
            .map_err(|error| error.with_next(SAVE_ELSEWHERE))?;
        if bytes != entry.bytes {
            let what = format!("it has {bytes} bytes, but its writer reported {}", entry.bytes);
            return Err(CheckpointError::bad_save(&path, what));
        }
        self.files.push(entry);
        Ok(())
    }

    /// Like [`Self::add`], for a file whose hash is unknown, such as one that `torch.save` wrote. Computes the
    /// size and hash, and syncs the file.
    ///
    /// # Errors
    /// Those of [`Self::add`].
    pub fn add_file(&mut self, name: &str) -> Result<()> {
        self.check_name(name)?;
        let entry = content::adopt(&self.staging, name).map_err(|error| error.with_next(SAVE_ELSEWHERE))?;
        crash_point!("ckpt.mid_dense");
        self.files.push(entry);
        Ok(())
    }

    /// Write a file and add it to the checkpoint.
    ///
    /// # Errors
    /// Those of [`Self::add`].
    pub fn add_content(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.check_name(name)?;
        let path = self.staging.join(name);
        let mut file = disk::Output::create(&path)?;
        file.write_all(content).map_err(|error| CheckpointError::io(&path, error))?;
        let (bytes, blake3) = file.finish()?;
        crash_point!("ckpt.mid_dense");
        self.files.push(FileEntry { name: name.into(), bytes, blake3 });
        Ok(())
    }

    /// Publish the checkpoint. After that, the directory contains the complete checkpoint.
    ///
    /// # Errors
    /// `BadSave` if a staged file was not added, or if no reader would accept the manifest; `Io`. After `Io`,
    /// the directory contains either the previous checkpoint or this one, and the next save removes the
    /// remaining files.
    pub fn commit(mut self, head: Head) -> Result<Manifest> {
        self.check_staging()?;
        self.files.sort_by(|a, b| a.name.cmp(&b.name));
        let files = std::mem::take(&mut self.files);
        let mut replaces = std::mem::take(&mut self.previous);
        replaces.retain(|name| files.iter().all(|entry| entry.name != *name));
        let replaces = replaces.into_iter().collect();
        let manifest = Manifest { format: FORMAT, revision: self.revision, head, files, replaces };
        let text = manifest.to_text(&self.dir.join(MANIFEST))?;
        disk::write_new(&self.staging.join(MANIFEST), text.as_bytes())?;
        disk::sync_dir(&self.staging)?;
        disk::sync_dir(&self.dir)?;
        crash_point!("ckpt.after_sync");
        self.publish()?;
        recover::tidy(&self.dir, &manifest)?;
        Ok(manifest)
    }

    /// Abandon the save without removing staged files. Call this if another process may still write to the staging
    /// directory. The next save removes the files and uses another staging directory.
    pub fn abandon(mut self) {
        self.abandoned = true;
    }

    fn publish(&mut self) -> Result<()> {
        crash_point!("ckpt.before_manifest");
        self.published = true;
        disk::rename_durably(&self.staging.join(MANIFEST), &self.dir.join(MANIFEST))?;
        crash_point!("ckpt.after_manifest");
        Ok(())
    }

    fn check_name(&self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        if !names::is_file_name(name) {
            return Err(CheckpointError::bad_save(&self.dir, names::refusal(name)));
        }
        if self.files.iter().any(|entry| entry.name == name) {
            return Err(CheckpointError::bad_save(&path, "it was added before"));
        }
        if !self.previous.contains(name) && disk::kind(&path)?.is_some() {
            return Err(CheckpointError::Occupied { path });
        }
        Ok(())
    }

    /// Check that every staged file was added. A file that was not added would be lost silently.
    fn check_staging(&self) -> Result<()> {
        for (name, _) in disk::entries(&self.staging)? {
            let added = self.files.iter().any(|entry| name == entry.name.as_str());
            if !added && name != MARKER {
                return Err(CheckpointError::bad_save(
                    &self.staging.join(name),
                    "it was written, but never added to the checkpoint",
                ));
            }
        }
        Ok(())
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if !self.published && !self.abandoned {
            // Errors cannot be returned here. The next save removes the remaining files.
            let _ = recover::sweep(&self.staging);
            if self.made {
                let _ = disk::remove_empty_dir(&self.dir);
            }
        }
    }
}
