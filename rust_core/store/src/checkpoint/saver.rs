//! One save: everything is staged and made durable, then the manifest is published, then the directory is tidied up.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use persia_types::tables::FileEntry;

use super::content;
use super::disk::{self, Lock, crash_point};
use super::error::{CheckpointError, Result};
use super::manifest::{FORMAT, Head, Manifest};
use super::names::{self, MANIFEST, MARKER};
use super::recover;

/// A save that is being made into a directory. Dropped before [`Saver::commit`] it leaves no trace.
pub struct Saver {
    dir: PathBuf,
    staging: PathBuf,
    revision: u64,
    files: Vec<FileEntry>,
    /// Names of the checkpoint that is replaced.
    previous: BTreeSet<String>,
    /// From the moment the manifest may be in place, the staged files are the checkpoint's.
    published: bool,
    /// What is staged stays.
    left: bool,
    /// The directory is this save's.
    made: bool,
    _lock: Lock,
}

impl Saver {
    /// Begin a save into `dir`, which is created if need be. First finishes, or removes, what an interrupted save
    /// left there.
    ///
    /// # Errors
    /// `Busy` while another process saves here; `Corrupt` or `Future` when the checkpoint in `dir` cannot be
    /// read, so that it is not known which files are its own; `Io`.
    pub fn begin(dir: &Path) -> Result<Self> {
        let made = !dir.is_dir();
        disk::create_dirs(dir)?;
        let lock = disk::lock(dir)?;
        let (manifest, revision) = recover::settle(dir)?;
        let previous = manifest.into_iter().flat_map(|old| old.files).map(|entry| entry.name).collect();
        let staging = dir.join(names::staging(revision));
        let saver = Self {
            dir: dir.into(),
            staging,
            revision,
            files: Vec::new(),
            previous,
            published: false,
            left: false,
            made,
            _lock: lock,
        };
        disk::create_dir(&saver.staging)?;
        disk::mark(&saver.staging)?;
        Ok(saver)
    }

    /// Where files are put before [`Self::add`] or [`Self::add_file`].
    pub fn staging(&self) -> &Path {
        &self.staging
    }

    /// Where to put the file `name` before it is added.
    ///
    /// # Errors
    /// `BadSave` and `Occupied` as of [`Self::add`], before anything is written.
    pub fn staged(&self, name: &str) -> Result<PathBuf> {
        self.check_name(name)?;
        Ok(self.staging.join(name))
    }

    /// Make a file that was written to the staging directory, and made durable, part of the checkpoint.
    ///
    /// # Errors
    /// `BadSave` for a name that no checkpoint may hold or that was added before, or a file of another size;
    /// `Occupied` when a foreign file of that name stands in the checkpoint's directory; `Io`.
    pub fn add(&mut self, entry: FileEntry) -> Result<()> {
        let path = self.staging.join(&entry.name);
        self.check_name(&entry.name)?;
        if !content::is_hash(&entry.blake3) {
            return Err(CheckpointError::bad_save(&path, format!("{:?} is no blake3", entry.blake3)));
        }
        let bytes = disk::Input::open(&path)?.len()?;
        if bytes != entry.bytes {
            let what = format!("has {bytes} bytes, its writer says {}", entry.bytes);
            return Err(CheckpointError::bad_save(&path, what));
        }
        self.files.push(entry);
        Ok(())
    }

    /// As [`Self::add`], for a file that was written without a hash (`torch.save`): measured and made durable here.
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

    /// Publish the checkpoint. From here on it is the one in the directory, in full, whatever happens.
    ///
    /// # Errors
    /// `BadSave` when the staging directory holds a file that was not added; `Io`. After an `Io` the directory
    /// holds the checkpoint from before or this one, and the next save tidies up.
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

    /// Give the save up without removing what is staged, because somebody may still be writing there. The next save into the
    /// directory removes it, and stages elsewhere.
    pub fn leave(mut self) {
        self.left = true;
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
                    "{name:?} is no name for a file of a checkpoint: want [A-Za-z0-9._-]{{1,128}}, not hidden"
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

    /// What was staged and not added would be lost without a word.
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
        if !self.published && !self.left {
            // An error cannot be returned from here; the next save removes what is left.
            let _ = recover::sweep(&self.staging);
            if self.made {
                let _ = disk::remove_empty_dir(&self.dir);
            }
        }
    }
}
