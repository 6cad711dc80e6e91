//! Finishes or undoes an interrupted save or removal. Each function may be interrupted and called again. Only files
//! in marked staging directories and files that a manifest lists are removed.

use std::path::Path;

use super::disk::{self, crash_point};
use super::error::Result;
use super::manifest::Manifest;
use super::names::{self, MANIFEST, MARKER, REMOVED};

/// Finish or undo an interrupted save or removal in `dir`. Returns the manifest of the checkpoint in `dir`,
/// if any.
///
/// # Errors
/// `Busy` while another process saves into `dir`; `Corrupt` or `Future` if the manifest cannot be read; `Io`.
pub fn recover(dir: &Path) -> Result<Option<Manifest>> {
    let _lock = disk::lock(dir)?;
    Ok(recover_locked(dir)?.0)
}

/// Like [`recover`], for a caller that holds the lock. Also returns the highest revision of the manifest and
/// of the staging directories that were found; 0 if there is none.
pub(super) fn recover_locked(dir: &Path) -> Result<(Option<Manifest>, u64)> {
    finish_removal(dir)?;
    let manifest = Manifest::find(dir, MANIFEST)?;
    let current = manifest.as_ref().map_or(0, |manifest| manifest.revision);
    let mut highest = current;
    for (name, kind) in disk::entries(dir)? {
        let Some(revision) = name.to_str().and_then(names::revision) else { continue };
        match &manifest {
            // Skip everything but directories. A save creates no symbolic links, and a link could point
            // anywhere.
            _ if !kind.is_dir() => {}
            Some(manifest) if revision == current => tidy(dir, manifest)?,
            _ => sweep(&dir.join(&name))?,
        }
        highest = highest.max(revision);
    }
    Ok((manifest, highest))
}

/// Move the files of a committed checkpoint from its staging directory to `dir`, over the old files, and
/// remove the other files of the previous checkpoint.
pub(super) fn tidy(dir: &Path, manifest: &Manifest) -> Result<()> {
    let staging = dir.join(names::staging(manifest.revision));
    // The manifest must be durable first: its rename may not be synced yet.
    disk::sync_dir(dir)?;
    for entry in &manifest.files {
        let staged = staging.join(&entry.name);
        if disk::kind(&staged)?.is_some() {
            disk::rename(&staged, &dir.join(&entry.name))?;
        }
        crash_point!("ckpt.mid_tidy");
    }
    for name in &manifest.replaces {
        disk::remove_file(&dir.join(name))?;
    }
    disk::sync_dir(dir)?;
    sweep(&staging)
}

/// Remove a staging directory if it is marked or empty. A crash just after its creation or just before its removal
/// leaves it empty and without the marker. Any other directory without the marker was not created by a save.
pub(super) fn sweep(staging: &Path) -> Result<()> {
    let entries = disk::entries(staging)?;
    let marked = entries.iter().any(|(name, kind)| name == MARKER && kind.is_file());
    if marked {
        for (name, _) in entries.iter().filter(|(name, _)| name != MARKER) {
            disk::remove_file(&staging.join(name))?;
        }
        disk::sync_dir(staging)?;
        if disk::entries(staging)?.iter().any(|(name, _)| name != MARKER) {
            return Ok(()); // a server still writes files here, and the next save needs the marker
        }
        disk::remove_file(&staging.join(MARKER))?;
    }
    if disk::remove_empty_dir(staging)? {
        return disk::sync_dir(&disk::parent(staging));
    }
    // A file was written in the meantime: mark the directory again.
    if marked { disk::mark(staging) } else { Ok(()) }
}

/// Delete a checkpoint. The rename of its manifest is the commit. The files are removed afterwards.
pub(super) fn remove(dir: &Path) -> Result<()> {
    let lock = disk::lock(dir)?;
    recover_locked(dir)?;
    disk::rename_durably(&dir.join(MANIFEST), &dir.join(REMOVED))?;
    crash_point!("ckpt.mid_remove");
    finish_removal(dir)?;
    drop(lock);
    if disk::remove_empty_dir(dir)? { disk::sync_dir(&disk::parent(dir)) } else { Ok(()) }
}

/// Delete the files of a checkpoint whose manifest has been renamed to [`REMOVED`], if there is one.
pub(super) fn finish_removal(dir: &Path) -> Result<()> {
    let removed = Manifest::find(dir, REMOVED);
    let removed = removed.map_err(|error| {
        error.with_next("the checkpoint was being deleted: delete its remaining files, and this file last")
    })?;
    let Some(removed) = removed else { return Ok(()) };
    // The checkpoint may have been restored from a replica in the meantime.
    let current = Manifest::find(dir, MANIFEST)?;
    for entry in &removed.files {
        if current.as_ref().is_none_or(|current| current.entry(&entry.name).is_none()) {
            disk::remove_file(&dir.join(&entry.name))?;
        }
    }
    disk::sync_dir(dir)?;
    disk::remove_file(&dir.join(REMOVED))?;
    disk::sync_dir(dir)
}
