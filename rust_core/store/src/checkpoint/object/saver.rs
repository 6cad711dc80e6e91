//! [`ObjectSaver`]: puts files under names that no other save uses, and then puts the manifest.

use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use persia_objects::{Patience, Place, Put, Upload, Version};
use persia_types::tables::FileEntry;

use super::{check_sizes, place};
use crate::checkpoint::content;
use crate::checkpoint::disk::crash_point;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::manifest::{self, FORMAT, Head, Manifest};
use crate::checkpoint::names::{self, MANIFEST};

/// The number of bits of a random revision. If the checkpoint is copied to a folder, each save into that
/// folder increments the revision. The unused upper bits leave room for many such saves.
const RANDOM_BITS: u32 = 52;

/// The advice to a user whose save found a damaged manifest at its URL.
const SAVE_ELSEWHERE: &str = "save to a different URL";

/// A save below a URL. If it is dropped before [`ObjectSaver::commit`], it deletes its files.
pub struct ObjectSaver {
    dir: Place,
    staging: PathBuf,
    revision: u64,
    files: Vec<FileEntry>,
    /// The checkpoint to be replaced, and the version of its object.
    previous: Option<(Manifest, Version)>,
    /// Whether the manifest may have been put. If so, the files may belong to the checkpoint.
    published: bool,
    /// Whether the files are kept when this is dropped.
    abandoned: bool,
}

impl ObjectSaver {
    /// Begin a save below the URL `dir`.
    ///
    /// # Errors
    /// `BadSave` if `dir` is not a URL; `Corrupt` or `Future` if the manifest at `dir` cannot be read,
    /// because the files to replace are then unknown; `Io`.
    pub fn begin(dir: &Path) -> Result<Self> {
        let wrong = || CheckpointError::bad_save(dir, "expected a URL");
        let place = place(dir)?.ok_or_else(wrong)?;
        // Training waits for this request, so it is retried only twice. If it fails, the caller retries the
        // save later.
        let hurried = Place::find(dir, Patience::Probe)?.ok_or_else(wrong)?;
        let found = hurried.get(MANIFEST, manifest::MAX_BYTES).map_err(CheckpointError::from);
        let previous = match found.map_err(|error| error.with_next(SAVE_ELSEWHERE))? {
            None => None,
            Some(found) => {
                let manifest = manifest::parse(&place.url_of(MANIFEST), &found.content)
                    .map_err(|error| error.with_next(SAVE_ELSEWHERE))?;
                Some((manifest, found.version))
            }
        };
        let revision = random();
        let staging = place.url_of(&names::staging(revision));
        Ok(Self {
            dir: place,
            staging,
            revision,
            files: Vec::new(),
            previous,
            published: false,
            abandoned: false,
        })
    }

    /// The URL below which the files to add are put.
    pub fn staging(&self) -> &Path {
        &self.staging
    }

    /// Add a file that a server has put below [`Self::staging`].
    ///
    /// # Errors
    /// `BadSave` for an invalid name, a name that was added before, or an invalid hash.
    pub fn add(&mut self, entry: FileEntry) -> Result<()> {
        self.check_name(&entry.name)?;
        if !content::is_hash(&entry.blake3) {
            let what = format!("{:?} is not a BLAKE3 hash", entry.blake3);
            return Err(CheckpointError::bad_save(&self.dir.url_of(&entry.name), what));
        }
        self.files.push(entry);
        Ok(())
    }

    /// Put a file and add it to the checkpoint.
    ///
    /// # Errors
    /// `BadSave`, as for [`Self::add`]; `Io`.
    pub fn add_content(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.check_name(name)?;
        let mut upload = Upload::new(self.dir.child(&names::staging(self.revision)), name);
        upload.write_all(content).map_err(|error| CheckpointError::io(&self.dir.url_of(name), error))?;
        let (bytes, blake3) = upload.finish()?;
        crash_point!("ckpt.mid_dense");
        self.files.push(FileEntry { name: name.into(), bytes, blake3 });
        Ok(())
    }

    /// Put the manifest. After that, the URL has the complete checkpoint.
    ///
    /// # Errors
    /// `BadSave` if an added file is missing or has another size, for example because its server writes to
    /// another store, or if no reader would accept the manifest. `Busy` if another save has put its manifest
    /// since this one began. `Io`: the URL has either the previous checkpoint or this one, and a later save
    /// there or [`prune`](crate::checkpoint::prune) deletes the remaining files.
    pub fn commit(mut self, head: Head) -> Result<Manifest> {
        self.files.sort_by(|a, b| a.name.cmp(&b.name));
        let files = std::mem::take(&mut self.files);
        let manifest =
            Manifest { format: FORMAT, revision: self.revision, head, files, replaces: Vec::new() };
        self.check_files(&manifest)?;
        let others = self.others(&manifest)?;
        let text = manifest.to_text(&self.dir.url_of(MANIFEST))?;
        crash_point!("ckpt.before_manifest");
        self.published = true;
        let over = self.previous.as_ref().map(|(_, version)| version.clone());
        let put = self.dir.put_over(MANIFEST, text.clone().into_bytes(), over);
        // If a response was lost and the request was repeated, the manifest at the URL may be that of this
        // save although the put did not return `Done`.
        if !matches!(put, Ok(Put::Done)) && !self.is_published(&text)? {
            put?;
            self.published = false; // the manifest was not put, so this save deletes its files
            return Err(CheckpointError::Busy { path: self.dir.url().into() });
        }
        crash_point!("ckpt.after_manifest");
        if let Err(error) = self.dir.delete(others) {
            // The checkpoint is complete. The next save to this URL deletes the files that remain.
            let checkpoint = self.dir.url();
            tracing::warn!(
                checkpoint,
                "saved, but cannot delete the files of earlier saves; the next save to this URL deletes them: {error}"
            );
        }
        Ok(manifest)
    }

    /// Whether the manifest at the URL has this text.
    fn is_published(&self, text: &str) -> Result<bool> {
        Ok(self.dir.get(MANIFEST, manifest::MAX_BYTES)?.is_some_and(|found| found.content == text.as_bytes()))
    }

    /// Abandon the save without deleting its files. Call this if another process may still put files there. A
    /// later save or [`prune`](crate::checkpoint::prune) deletes them.
    pub fn abandon(mut self) {
        self.abandoned = true;
    }

    /// Check that every file exists, with its size. Servers put their files themselves, possibly into another
    /// store, and the manifest must not name a missing file.
    fn check_files(&self, manifest: &Manifest) -> Result<()> {
        let Some(problem) = check_sizes(&self.dir, &manifest.all())?.into_iter().next() else {
            return Ok(());
        };
        let what = match problem {
            CheckpointError::Corrupt { path, what, .. } => format!("{} {what}", path.display()),
            other => other.to_string(),
        };
        let what = format!(
            "{what}; trainers and servers must write to the same store: compare AWS_ENDPOINT_URL and AWS_REGION"
        );
        Err(CheckpointError::bad_save(&self.dir.url_of(MANIFEST), what))
    }

    /// The files to delete after the commit: those of other attempts so far, and those of the replaced
    /// checkpoint. Call this before the manifest is put. An attempt that has put a file by then began with an
    /// earlier manifest or none, so its commit fails after the commit of this save. An attempt that begins
    /// with this manifest starts after the put, so none of its files is listed. On a store without
    /// conditional puts, only one process saves at a time.
    fn others(&self, manifest: &Manifest) -> Result<Vec<String>> {
        let staged = |name: &str| name.split_once('/').and_then(|(staging, _)| names::revision(staging));
        let listed = self.dir.list()?.into_iter().map(|object| object.name);
        let mut old: Vec<String> = listed
            .filter(|name| staged(name).is_some_and(|revision| revision != manifest.revision))
            .collect();
        if let Some((previous, _)) = &self.previous {
            // These names are known even if the listing is out of date.
            old.extend(previous.all().into_iter().map(|entry| entry.name));
            old.extend(previous.files.iter().map(|entry| entry.name.clone()));
        }
        old.sort();
        old.dedup();
        Ok(old)
    }

    /// Check the name of a file to add.
    ///
    /// # Errors
    /// `BadSave`, as for [`Self::add`].
    pub fn check_name(&self, name: &str) -> Result<()> {
        if !names::is_file_name(name) {
            return Err(CheckpointError::bad_save(Path::new(self.dir.url()), names::refusal(name)));
        }
        if self.files.iter().any(|entry| entry.name == name) {
            return Err(CheckpointError::bad_save(&self.dir.url_of(name), "it was added before"));
        }
        Ok(())
    }
}

impl Drop for ObjectSaver {
    fn drop(&mut self) {
        if !self.published && !self.abandoned {
            // Errors cannot be returned here. A later save deletes the remaining files.
            if let Ok(Some(dir)) = Place::find(Path::new(self.dir.url()), Patience::Probe) {
                let _ = delete_staged(&dir, self.revision);
            }
        }
    }
}

/// Delete the files of one attempt that the listing shows.
fn delete_staged(dir: &Place, revision: u64) -> Result<()> {
    let staging = dir.child(&names::staging(revision));
    Ok(staging.delete(staging.list()?.into_iter().map(|object| object.name))?)
}

/// A random revision, which no other attempt is expected to have.
fn random() -> u64 {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    // `RandomState` is seeded with random numbers of the operating system.
    (RandomState::new().hash_one((nanos, std::process::id())) >> (u64::BITS - RANDOM_BITS)).max(1)
}
