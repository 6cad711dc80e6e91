//! The checkpoints of a run: subdirectories of one parent directory, or prefixes below one URL.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use super::disk::{self, Input};
use super::error::{CheckpointError, Result};
use super::manifest::Manifest;
use super::names::{self, LATEST, MANIFEST, REMOVED};
use super::{object, recover};

/// The action of [`publish_latest`] in messages.
pub(super) const PUBLISH: &str = "point LATEST to";
/// The maximum length of the directory name in [`LATEST`], in bytes.
pub(super) const MAX_HINT_BYTES: u64 = 255;

/// A subdirectory with a checkpoint or an unfinished save; at a URL, a name below it with a checkpoint.
#[derive(Debug)]
pub struct Listed {
    /// The path of the subdirectory, or the URL.
    pub path: PathBuf,
    /// The manifest, or the reason why it cannot be used. To check the files too, call [`Manifest::verify`].
    pub manifest: Result<Manifest>,
}

impl Listed {
    /// The key by which checkpoints are ordered by age: generation, then step; None if the manifest cannot be
    /// used.
    fn age(&self) -> Option<(u64, u64)> {
        self.manifest.as_ref().ok().map(|manifest| (manifest.head.run.generation, manifest.head.step))
    }
}

/// The checkpoints below `parent`, newest first. Those that cannot be used, and unfinished saves, come last.
///
/// # Errors
/// `Io` if `parent`, or a directory in it, cannot be listed. Directories without permission are skipped.
pub fn list(parent: &Path) -> Result<Vec<Listed>> {
    let mut listed = match object::place(parent)? {
        Some(place) => object::series::list(&place)?,
        None => list_folders(parent)?,
    };
    listed.sort_by_key(|one| std::cmp::Reverse(one.age()));
    Ok(listed)
}

fn list_folders(parent: &Path) -> Result<Vec<Listed>> {
    let mut listed = Vec::new();
    for (name, kind) in disk::entries(parent)? {
        let path = parent.join(name);
        if kind.is_dir() && has_save(&path)? {
            listed.push(Listed { manifest: Manifest::open(&path), path });
        }
    }
    Ok(listed)
}

/// Like [`list`], but fails if a manifest could not be read, because it may belong to the newest checkpoint.
fn list_readable(parent: &Path) -> Result<Vec<Listed>> {
    let mut listed = list(parent)?;
    fail_on(&mut listed, |one| matches!(one.manifest, Err(CheckpointError::Io { .. })))?;
    Ok(listed)
}

/// Return the error of the first entry for which `fatal` is true.
fn fail_on(listed: &mut Vec<Listed>, fatal: impl Fn(&Listed) -> bool) -> Result<()> {
    match listed.iter().position(fatal).map(|index| listed.swap_remove(index).manifest) {
        Some(Err(error)) => Err(error),
        _ => Ok(()),
    }
}

/// The newest checkpoint below `parent`. If several are equally new, it is the one that `LATEST` names. If
/// there is nothing below `parent`, it is the checkpoint in `parent` itself.
///
/// # Errors
/// `Missing` if there is no checkpoint. If the checkpoint that `LATEST` names, or one that may be newer,
/// cannot be used, its error is returned, because an older checkpoint must not be used silently. `Io`,
/// including for an unreadable manifest.
pub fn latest(parent: &Path) -> Result<(PathBuf, Manifest)> {
    let hint = read_hint(parent)?;
    let hinted = |one: &Listed| one.path.file_name().and_then(|name| name.to_str()) == hint.as_deref();
    let mut listed = list_readable(parent)?;
    let newest =
        listed.iter().filter_map(|one| one.manifest.as_ref().ok()).map(|manifest| manifest.head.step).max();
    let unusable = |one: &Listed| {
        let damaged =
            matches!(&one.manifest, Err(error) if !matches!(error, CheckpointError::Missing { .. }));
        damaged && !is_older(one, newest)
    };
    fail_on(&mut listed, |one| hinted(one) && one.manifest.is_err() || unusable(one))?;
    let newest = listed.into_iter().max_by_key(|one| (one.age(), hinted(one)));
    match newest {
        Some(Listed { path, manifest }) => manifest.map(|manifest| (path, manifest)),
        None => Manifest::open(parent).map(|manifest| (parent.into(), manifest)),
    }
}

/// Whether a checkpoint with a damaged manifest is older than step `newest`, judging by its name, `step-N`.
fn is_older(one: &Listed, newest: Option<u64>) -> bool {
    let name = one.path.file_name().and_then(|name| name.to_str());
    let step = name.and_then(|name| name.strip_prefix("step-")?.parse::<u64>().ok());
    step.zip(newest).is_some_and(|(step, newest)| step < newest)
}

/// Write the name of `dir` to `LATEST` in its parent directory: a hint for people and for [`latest`]. Call it
/// after the commit.
///
/// # Errors
/// `BadSave` if `dir` has no name, or its name is not UTF-8 or contains a line break; `Occupied` if `LATEST`
/// exists but was not written by a save; `Io`.
pub fn publish_latest(dir: &Path) -> Result<()> {
    if let Some(place) = object::place(dir)? {
        return object::series::publish_latest(&place);
    }
    let parent = disk::parent(dir);
    let name = dir.file_name().and_then(|name| name.to_str()).filter(|name| !name.contains('\n'));
    let bad_name = || {
        CheckpointError::cannot(PUBLISH, dir, "its name is not UTF-8, or contains a line break; rename it")
    };
    let name = name.ok_or_else(bad_name)?;
    let hint = parent.join(LATEST);
    if disk::kind(&hint)?.is_some() && read_hint(&parent)?.is_none() {
        return Err(CheckpointError::Occupied { path: hint });
    }
    disk::replace_file(&hint, format!("{name}\n").as_bytes())
}

/// Delete all but the `keep_last` newest checkpoints below `parent`, and the files of abandoned saves. Never
/// deletes the newest checkpoint that passes verification (at a URL: that has all its files), a checkpoint
/// that cannot be read, or a file that belongs to no checkpoint. If no checkpoint passes verification, all
/// are kept. Returns the deleted checkpoints.
///
/// # Errors
/// `Busy` if another process saves into one of the checkpoints; `Corrupt` or `Future` if the manifest of a
/// checkpoint that is being deleted cannot be read; `Io`. Some checkpoints may already have been deleted.
pub fn prune(parent: &Path, keep_last: NonZeroUsize) -> Result<Vec<PathBuf>> {
    if let Some(place) = object::place(parent)? {
        return object::series::prune(&place, keep_last);
    }
    finish_removals(parent)?;
    let mut listed = list_readable(parent)?;
    sweep_unfinished(&listed)?;
    listed.retain(|one| one.manifest.is_ok());
    if listed.len() <= keep_last.get() {
        return Ok(Vec::new());
    }
    let Some(newest_whole) = first_whole(&listed)? else { return Ok(Vec::new()) };
    let mut removed = Vec::new();
    for (index, Listed { path, .. }) in listed.into_iter().enumerate() {
        if index >= keep_last.get() && index != newest_whole {
            recover::remove(&path)?;
            removed.push(path);
        }
    }
    Ok(removed)
}

/// Delete the checkpoint at a URL: its manifest, then its files.
///
/// # Errors
/// `Corrupt` or `Future` if its manifest cannot be read; `BadSave` for a folder; `Io`.
pub fn remove_object(dir: &Path) -> Result<()> {
    match object::place(dir)? {
        Some(place) => object::series::remove(&place),
        None => {
            let what = "expected the URL of an object store, but it is a path of this machine";
            Err(CheckpointError::cannot("delete the checkpoint", dir, what))
        }
    }
}

/// Remove the staged files of directories without a checkpoint, and the directories that are then empty,
/// unless a process saves into the directory.
fn sweep_unfinished(listed: &[Listed]) -> Result<()> {
    let unfinished = |one: &&Listed| matches!(one.manifest, Err(CheckpointError::Missing { .. }));
    for Listed { path, .. } in listed.iter().filter(unfinished) {
        match sweep_one(path) {
            // Skip the directory: another process saves there, or it belongs to another user. It contains no
            // checkpoint.
            Err(CheckpointError::Busy { .. } | CheckpointError::Io { .. }) => {}
            other => other?,
        }
    }
    Ok(())
}

fn sweep_one(path: &Path) -> Result<()> {
    let _lock = disk::lock(path)?;
    recover::recover_locked(path)?;
    disk::remove_empty_dir(path).map(drop)
}

/// The index of the first checkpoint that passes verification, if there is one.
fn first_whole(listed: &[Listed]) -> Result<Option<usize>> {
    for (index, one) in listed.iter().enumerate() {
        let Ok(manifest) = &one.manifest else { continue };
        match manifest.verify(&one.path) {
            Ok(()) => return Ok(Some(index)),
            // A file that could not be read is not necessarily damaged.
            Err(problems) => {
                let unread = |problem: &CheckpointError| matches!(problem, CheckpointError::Io { .. });
                if let Some(error) = problems.into_iter().find(unread) {
                    return Err(error);
                }
            }
        }
    }
    Ok(None)
}

fn has_save(dir: &Path) -> Result<bool> {
    let unfinished =
        |(name, _): &(OsString, _)| name.to_str().is_some_and(|name| names::revision(name).is_some());
    let found = disk::kind(&dir.join(MANIFEST))
        .and_then(|kind| Ok(kind.is_some() || disk::entries(dir)?.iter().any(unfinished)));
    unless_forbidden(found)
}

/// Treat a directory that may not be read, such as `lost+found`, as one without a checkpoint.
fn unless_forbidden(found: Result<bool>) -> Result<bool> {
    match found {
        Err(CheckpointError::Io { source, .. }) if source.kind() == ErrorKind::PermissionDenied => Ok(false),
        other => other,
    }
}

fn finish_removals(parent: &Path) -> Result<()> {
    for (name, kind) in disk::entries(parent)? {
        let dir = parent.join(name);
        if kind.is_dir() && unless_forbidden(disk::kind(&dir.join(REMOVED)).map(|kind| kind.is_some()))? {
            let lock = disk::lock(&dir)?;
            recover::finish_removal(&dir)?;
            drop(lock);
            disk::remove_empty_dir(&dir)?;
        }
    }
    Ok(())
}

/// The name in `LATEST`; None if `LATEST` does not exist or its content cannot be the name of a subdirectory.
fn read_hint(parent: &Path) -> Result<Option<String>> {
    if let Some(place) = object::place(parent)? {
        return object::series::hint(&place);
    }
    let path = parent.join(LATEST);
    if !disk::kind(&path)?.is_some_and(|kind| kind.is_file()) {
        return Ok(None);
    }
    let mut input = Input::open(&path)?;
    let mut text = Vec::new();
    if input.len()? <= MAX_HINT_BYTES + 1 {
        input.read_pieces(|piece| text.extend_from_slice(piece))?;
    }
    Ok(hint_of(text))
}

/// The name of a subdirectory in the content of [`LATEST`]; None if the content cannot be one.
pub(super) fn hint_of(text: Vec<u8>) -> Option<String> {
    let name = String::from_utf8(text).ok().and_then(|text| text.strip_suffix('\n').map(str::to_owned));
    name.filter(|name| !name.is_empty() && !name.contains(['/', '\n', '\0']) && name != "." && name != "..")
}
