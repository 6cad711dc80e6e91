//! [`Manifest`]: the file that makes a directory a checkpoint.

use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};

use persia_types::is_url;
use persia_types::tables::{FileEntry, Run, TableStats};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::content;
use super::disk::{self, Input};
use super::error::{CheckpointError, Result};
use super::names::{self, MANIFEST};
use super::object;
use crate::snapshot::run_jobs;

/// The format version of manifests. It is increased when an older reader could misread a checkpoint.
pub const FORMAT: u32 = 1;

/// The maximum size of a manifest, in bytes. A manifest of 256 shards and 4096 tables is far smaller.
pub(super) const MAX_BYTES: u64 = 64 << 20;
const MAX_REVISION: u64 = 1 << 53;
/// The number of files of an object store that are verified concurrently.
const READERS: usize = 8;

/// The caller's part of a manifest: the state of a run at one step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Head {
    /// The global step.
    pub step: u64,
    /// The number of ranks.
    pub world_size: u32,
    /// The run, with its job, generation, schema, seed and settings.
    pub run: Run,
    /// The number of rows of each table.
    pub rows: BTreeMap<String, u64>,
    /// The highest sequence number applied for each rank.
    pub tokens: BTreeMap<u32, u64>,
    /// The position of each data source, as JSON. The text is kept verbatim, so that no number changes.
    pub cursors: BTreeMap<String, Box<RawValue>>,
    /// The versions and features of the writer.
    pub build: BTreeMap<String, String>,
    /// The wall-clock time in RFC 3339. It is informative only: checkpoints are not ordered by it.
    pub created_at: String,
    /// The names of the model's inputs in the model's order, as JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<Box<RawValue>>,
    /// The vocabulary statistics of each table at the cut, with counters since the run began; empty if they are
    /// unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TableStats>,
}

/// The table of contents of a checkpoint. In every format version, the first field is `format` and the last is
/// `blake3`, the hash of the text before it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    /// The format version of the checkpoint, at most [`FORMAT`].
    pub format: u32,
    /// In a directory, one more than the highest revision that the save found there. In an object store, a
    /// random number. The name of the staging directory contains the revision.
    #[serde(rename = "generation")]
    pub revision: u64,
    /// The state of the run.
    pub head: Head,
    /// All files, sorted by name. Names omit the staging directory.
    pub files: Vec<FileEntry>,
    /// Files of the previous checkpoint in the directory that are not part of this one; empty in an object
    /// store.
    pub replaces: Vec<String>,
}

impl Manifest {
    /// Read the manifest of the checkpoint in `dir`, but no other file. To check the files, call
    /// [`Self::verify`].
    ///
    /// # Errors
    /// `Missing`, with the content of the directory; `Corrupt`, `Future`, `Io`.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::find(dir, MANIFEST)?
            .ok_or_else(|| CheckpointError::Missing { path: dir.into(), found: describe(dir) })
    }

    /// Read the manifest called `name`; None if the file does not exist.
    pub(super) fn find(dir: &Path, name: &str) -> Result<Option<Self>> {
        let path = dir.join(name);
        if let Some(place) = object::place(dir)? {
            return place.get(name, MAX_BYTES)?.map(|found| parse(&path, &found.content)).transpose();
        }
        if !dir.is_dir() || disk::kind(&path)?.is_none() {
            return Ok(None);
        }
        let mut input = Input::open(&path)?;
        if input.len()? > MAX_BYTES {
            return Err(CheckpointError::corrupt(&path, format!("is larger than {MAX_BYTES} bytes")));
        }
        let mut text = Vec::new();
        input.read_pieces(|piece| text.extend_from_slice(piece))?;
        parse(&path, &text).map(Some)
    }

    /// The entry of a file; None if the manifest does not list it. With the entry, a reader finds the file
    /// even if the save was interrupted.
    pub fn entry(&self, name: &str) -> Option<FileEntry> {
        self.files.iter().find(|entry| entry.name == name).map(|entry| self.staged(entry))
    }

    /// The entries of the embedding rows, for `Tables::restore`.
    pub fn shards(&self) -> Vec<FileEntry> {
        let shards = self.files.iter().filter(|entry| names::shard_of_file(&entry.name).is_some());
        shards.map(|entry| self.staged(entry)).collect()
    }

    /// A nonzero hash of the step, the names and dimensions of the tables, and the names and hashes of the
    /// shard files. Different content has the same hash only by a collision.
    pub fn identity(&self) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.head.step.to_le_bytes());
        for table in &self.head.run.schema.tables {
            hasher.update(table.name.as_bytes()).update(&table.dim.to_le_bytes());
        }
        for entry in self.files.iter().filter(|entry| names::shard_of_file(&entry.name).is_some()) {
            hasher.update(entry.name.as_bytes()).update(entry.blake3.as_bytes());
        }
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        u64::from_le_bytes(first).max(1)
    }

    /// The current path of a file. For a checkpoint at a URL, this is the URL next to the manifest. Only a
    /// replica has the file at that URL.
    ///
    /// # Errors
    /// `Corrupt` if the manifest does not list the file; `Io`.
    pub fn locate(&self, dir: &Path, name: &str) -> Result<PathBuf> {
        content::locate(dir, &self.listed(dir, name)?.name)
    }

    /// Read a file and check it against its entry.
    ///
    /// # Errors
    /// `Corrupt` if the manifest does not list the file or the file differs from its entry; `Io`.
    pub fn read(&self, dir: &Path, name: &str) -> Result<Vec<u8>> {
        let mut content = Vec::new();
        content::read(dir, &self.listed(dir, name)?, &mut content)?;
        Ok(content)
    }

    fn listed(&self, dir: &Path, name: &str) -> Result<FileEntry> {
        self.entry(name).ok_or_else(|| {
            CheckpointError::corrupt(&dir.join(MANIFEST), format!("does not list the file {name:?}"))
        })
    }

    /// The entries of all files.
    pub(super) fn all(&self) -> Vec<FileEntry> {
        self.files.iter().map(|entry| self.staged(entry)).collect()
    }

    /// Check the size and hash of every file.
    ///
    /// # Errors
    /// One error for each file that differs from its entry or cannot be read.
    pub fn verify(&self, dir: &Path) -> std::result::Result<(), Vec<CheckpointError>> {
        let check = |entry: &FileEntry| content::verify(dir, &self.staged(entry)).err();
        let problems: Vec<_> = if is_url(dir) {
            // Requests to the store take most of the time, so several run concurrently.
            let Ok(found) = run_jobs(
                self.files.len(),
                READERS,
                || (),
                |(), at| Ok::<_, Infallible>(self.files.get(at).and_then(check)),
            );
            found.into_iter().flatten().collect()
        } else {
            self.files.iter().filter_map(check).collect()
        };
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// The total size of all files, in bytes. The sum saturates, because a manifest may claim any size.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, entry| sum.saturating_add(entry.bytes))
    }

    /// The text that [`Self::open`] parses.
    pub(super) fn to_text(&self, path: &Path) -> Result<String> {
        let body = serde_json::to_string_pretty(self)
            .map_err(|error| CheckpointError::bad_save(path, format!("it cannot be encoded: {error}")))?;
        let body = body.strip_suffix("\n}").unwrap_or(&body);
        let text = format!("{body}{HASH_KEY}{}{END}", blake3::hash(body.as_bytes()).to_hex());
        // The manifest must be readable again. A manifest with an infinite learning rate, for example, is not.
        parse(path, text.as_bytes()).map_err(|error| {
            let what = match error {
                CheckpointError::Corrupt { what, .. } => format!("no reader would accept it: it {what}"),
                other => other.to_string(),
            };
            CheckpointError::bad_save(path, what)
        })?;
        Ok(text)
    }

    fn staged(&self, entry: &FileEntry) -> FileEntry {
        FileEntry { name: format!("{}/{}", names::staging(self.revision), entry.name), ..entry.clone() }
    }

    fn check(&self) -> std::result::Result<(), String> {
        if !(1..=MAX_REVISION).contains(&self.revision) {
            return Err(format!("has revision {}, expected 1 to {MAX_REVISION}", self.revision));
        }
        let mut seen = HashSet::new();
        for name in self.files.iter().map(|entry| &entry.name).chain(&self.replaces) {
            if !names::is_file_name(name) {
                return Err(format!("names a file {name:?}, which is not allowed in a checkpoint"));
            }
            if !seen.insert(name) {
                return Err(format!("names the file {name:?} twice"));
            }
        }
        match self.files.iter().find(|entry| !content::is_hash(&entry.blake3)) {
            Some(entry) => Err(format!("has no valid BLAKE3 hash of {}", entry.name)),
            None => Ok(()),
        }
    }
}

/// The text before the hash at the end of a manifest.
const HASH_KEY: &str = ",\n  \"blake3\": \"";
/// The text after the hash at the end of a manifest.
const END: &str = "\"\n}\n";

pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Manifest> {
    let corrupt = |what: String| CheckpointError::corrupt(path, what);
    let changed = || {
        corrupt(
            "has changed since it was written, or is incomplete: its own BLAKE3 hash does not match".into(),
        )
    };
    let (body, hash) = split_hash(text).ok_or_else(changed)?;
    if blake3::hash(body).to_hex().as_bytes() != hash {
        return Err(changed());
    }
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let damaged = |error: serde_json::Error| corrupt(format!("is not a manifest: {error}"));
    let Format { format } = serde_json::from_slice(text).map_err(damaged)?;
    if format > FORMAT {
        return Err(CheckpointError::Future { path: path.into(), found: format, known: FORMAT });
    }
    let manifest: Manifest = serde_json::from_slice(text).map_err(damaged)?;
    manifest.check().map_err(corrupt)?;
    Ok(manifest)
}

fn split_hash(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let (rest, hash) = text.strip_suffix(END.as_bytes())?.split_last_chunk::<64>()?;
    Some((rest.strip_suffix(HASH_KEY.as_bytes())?, hash))
}

/// Describe the content of a directory without a manifest.
fn describe(dir: &Path) -> String {
    const SHOWN: usize = 8;
    if is_url(dir) {
        return format!("there is no object {MANIFEST}");
    }
    let found = match disk::entries(dir) {
        Ok(found) => found,
        Err(CheckpointError::Io { source, .. }) => return source.to_string(),
        Err(other) => return other.to_string(),
    };
    let names = || found.iter().filter_map(|(name, _)| name.to_str());
    let inside: Vec<&str> = names().filter(|name| dir.join(name).join(MANIFEST).is_file()).collect();
    if !inside.is_empty() {
        let more = if inside.len() > SHOWN { ", ..." } else { "" };
        return format!(
            "use one of the checkpoints in this folder: {}{more}",
            inside[..inside.len().min(SHOWN)].join(", ")
        );
    }
    if names().any(|name| names::revision(name).is_some()) {
        return "a save into this folder has not finished; use another checkpoint".into();
    }
    match found.len() {
        0 => "the folder is empty".into(),
        _ => format!("the folder has no {MANIFEST}, only other files or folders"),
    }
}
