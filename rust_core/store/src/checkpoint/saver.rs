//! [`Saver`]: files are staged and synced, then the manifest is published, then the staging directory is removed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use persia_types::tables::FileEntry;

use super::content;
use super::disk::{self, Lock, crash_point};
use super::error::{CheckpointError, Result};
use super::manifest::{FORMAT, Head, Manifest};
use super::names::{self, MANIFEST, MARKER};
use super::recover;

/// A save into a directory. If it is dropped before [`Saver::commit`], it leaves no files.
pub struct Saver {
    dir: PathBuf,
    staging: PathBuf,
    revision: u64,
    files: Vec<FileEntry>,
    /// The files of the checkpoint that is replaced.
    previous: BTreeSet<String>,
    /// Whether the manifest may be in place: the staged files then belong to the checkpoint.
    published: bool,
    /// Whether the staged files are kept.
    abandoned: bool,
    /// Whether this save created the directory.
    made: bool,
    _lock: Lock,
}

impl Saver {
    /// Begin a save into `dir`, which is created if it does not exist. First [recovers](recover::recover) it.
    ///
    /// # Errors
    /// `Busy` while another process saves here; `Corrupt` or `Future` if the checkpoint in `dir` cannot be read, so that its
    /// files are unknown; `Io`.
    pub fn begin(dir: &Path) -> Result<Self> {
        let made = !dir.is_dir();
        disk::create_dirs(dir)?;
        let lock = disk::lock(dir)?;
        let (manifest, revision) = recover::recover_locked(dir)?;
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

    /// The directory for files that are to be added.
    pub fn staging(&self) -> &Path {
        &self.staging
    }

    /// The path of a file that is to be added.
    ///
    /// # Errors
    /// `BadSave` and `Occupied` as in [`Self::add`].
    pub fn staged(&self, name: &str) -> Result<PathBuf> {
        self.check_name(name)?;
        Ok(self.staging.join(name))
    }

    /// Add a file to the checkpoint. It is in the staging directory and synced.
    ///
    /// # Errors
    /// `BadSave` for an invalid name, one that was added before, or a file of another size; `Occupied` if the checkpoint's
    /// directory has a foreign file of that name; `Io`.
    pub fn add(&mut self, entry: FileEntry) -> Result<()> {
        let path = self.staging.join(&entry.name);
        self.check_name(&entry.name)?;
        if !content::is_hash(&entry.blake3) {
            return Err(CheckpointError::bad_save(&path, format!("{:?} is not a blake3 hash", entry.blake3)));
        }
        let bytes = disk::Input::open(&path)?.len()?;
        if bytes != entry.bytes {
            let what = format!("has {bytes} bytes, its writer reported {}", entry.bytes);
            return Err(CheckpointError::bad_save(&path, what));
        }
        self.files.push(entry);
        Ok(())
    }

    /// Like [`Self::add`], for a file without a hash (`torch.save`). Computes size and hash, and syncs the file.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn add_file(&mut self, name: &str) -> Result<()> {
        self.check_name(name)?;
        let entry = content::adopt(&self.staging, name)?;
        crash_point!("ckpt.mid_dense");
        self.files.push(entry);
        Ok(())
    }

    /// Publish the checkpoint: from now on the directory contains the complete checkpoint.
    ///
    /// # Errors
    /// `BadSave` if a staged file was not added; `Io`. After an `Io` the directory contains the previous checkpoint or
    /// this one, and the next save removes the remaining files.
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

    /// Abandon the save without removing staged files, because another process may still write there. The next save removes
    /// them, and uses another staging directory.
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
            return Err(CheckpointError::bad_save(
                &self.dir,
                format!(
                    "{name:?} is not a name for a file of a checkpoint: want [A-Za-z0-9._-]{{1,128}}, not hidden"
                ),
            ));
        }
        if self.files.iter().any(|entry| entry.name == name) {
            return Err(CheckpointError::bad_save(&path, "was added before"));
        }
        if !self.previous.contains(name) && disk::kind(&path)?.is_some() {
            return Err(CheckpointError::Occupied { path });
        }
        Ok(())
    }

    /// A staged file that was not added would be lost silently.
    fn check_staging(&self) -> Result<()> {
        for (name, _) in disk::entries(&self.staging)? {
            let added = self.files.iter().any(|entry| name == entry.name.as_str());
            if !added && name != MARKER {
                return Err(CheckpointError::bad_save(
                    &self.staging.join(name),
                    "was staged but never added",
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
