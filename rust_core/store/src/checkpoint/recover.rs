//! Finishing or undoing what an interrupted save or removal left. Each function may be interrupted itself and
//! called again. Nothing is removed but files in a marked staging directory and files that a manifest names.

use std::path::Path;

use super::disk::{self, crash_point};
use super::error::{CheckpointError, Result};
use super::manifest::Manifest;
use super::names::{self, MANIFEST, MARKER, REMOVED};

/// Finish or undo what was interrupted in `dir`; returns the manifest of the checkpoint that is there.
///
/// # Errors
/// `Busy` while another process saves here; `Corrupt` or `Future` for a manifest that cannot be read; `Io`.
pub fn recover(dir: &Path) -> Result<Option<Manifest>> {
    let _lock = disk::lock(dir)?;
    Ok(settle(dir)?.0)
}

/// As [`recover`], for the holder of the lock; also returns the revision of the next save.
pub(super) fn settle(dir: &Path) -> Result<(Option<Manifest>, u64)> {
    finish_removal(dir)?;
    let manifest = Manifest::find(dir, MANIFEST)?;
    let current = manifest.as_ref().map_or(0, |manifest| manifest.revision);
    let mut highest = current;
    for (name, kind) in disk::entries(dir)? {
        let Some(revision) = name.to_str().and_then(names::revision) else { continue };
        match &manifest {
            // Not a directory: no save made it, and a link may lead anywhere.
            _ if !kind.is_dir() => {}
            Some(manifest) if revision == current => tidy(dir, manifest)?,
            _ => sweep(&dir.join(&name))?,
        }
        highest = highest.max(revision);
    }
    let next = highest.checked_add(1).ok_or_else(|| {
        CheckpointError::bad_save(
            dir,
            format!("{} leaves no number for another save", names::staging(highest)),
        )
    })?;
    Ok((manifest, next))
}

/// Move the files of a published checkpoint to where users look for them, over those they replace.
pub(super) fn tidy(dir: &Path, manifest: &Manifest) -> Result<()> {
    let staging = dir.join(names::staging(manifest.revision));
    // Not before the manifest is durable: it may be here by a rename that no one synced.
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

/// Remove a staging directory of ours. Without the marker it is someone else's, unless it is empty: then it is
/// what an interruption just after its creation, or just before its removal, leaves.
pub(super) fn sweep(staging: &Path) -> Result<()> {
    let entries = disk::entries(staging)?;
    let marked = entries.iter().any(|(name, kind)| name == MARKER && kind.is_file());
    if marked {
        for (name, _) in entries.iter().filter(|(name, _)| name != MARKER) {
            disk::remove_file(&staging.join(name))?;
        }
        disk::sync_dir(staging)?;
        if disk::entries(staging)?.iter().any(|(name, _)| name != MARKER) {
            return Ok(()); // a server still writes for a save that was given up; the next save finds it marked
        }
        disk::remove_file(&staging.join(MARKER))?;
    }
    if disk::remove_empty_dir(staging)? {
        return disk::sync_dir(&disk::parent(staging));
    }
    // Written to just now: still ours.
    if marked { disk::mark(staging) } else { Ok(()) }
}

/// Delete a checkpoint. It stops being one in a single step, before the first of its files goes.
pub(super) fn remove(dir: &Path) -> Result<()> {
    let lock = disk::lock(dir)?;
    settle(dir)?;
    disk::rename_durably(&dir.join(MANIFEST), &dir.join(REMOVED))?;
    crash_point!("ckpt.mid_remove");
    finish_removal(dir)?;
    drop(lock);
    if disk::remove_empty_dir(dir)? { disk::sync_dir(&disk::parent(dir)) } else { Ok(()) }
}

/// Delete the files of a checkpoint that is no longer one.
pub(super) fn finish_removal(dir: &Path) -> Result<()> {
    let Some(removed) = Manifest::find(dir, REMOVED)? else { return Ok(()) };
    // Someone may have put the checkpoint back, from a copy.
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
