//! The checkpoints of a run in an object store: the prefixes directly below a place.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use persia_objects::Place;

use super::check_sizes;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::manifest::{self, Manifest};
use crate::checkpoint::names::{self, LATEST, MANIFEST};
use crate::checkpoint::series::{Listed, MAX_HINT_BYTES, PUBLISH, hint_of};

/// A manifest and the time at which it was put; None if there is no manifest.
type Found = Result<Option<(Manifest, i64)>>;

/// The checkpoints below `parent`, in no particular order. They include the one that `LATEST` names, even if the
/// listing does not show it yet.
pub(in crate::checkpoint) fn list(parent: &Place) -> Result<Vec<Listed>> {
    let mut names = parent.names()?;
    names.extend(hint(parent)?);
    Ok(manifests(parent, &names.into_iter().collect::<Vec<_>>())?
        .into_iter()
        .filter_map(|(name, found)| {
            let manifest = found.map(|found| found.map(|(manifest, _)| manifest)).transpose()?;
            Some(Listed { path: parent.url_of(&name), manifest })
        })
        .collect())
}

/// The manifest below each name.
fn manifests(parent: &Place, names: &[String]) -> Result<Vec<(String, Found)>> {
    let places: Vec<Place> = names.iter().map(|name| parent.child(name)).collect();
    let found = Place::get_each(&places, MANIFEST, manifest::MAX_BYTES)?;
    let parsed = places.iter().zip(found).map(|(place, found)| -> Found {
        let Some(found) = found? else { return Ok(None) };
        let parsed = manifest::parse(&place.url_of(MANIFEST), &found.content)?;
        Ok(Some((parsed, found.modified)))
    });
    Ok(names.iter().cloned().zip(parsed).collect())
}

/// The name in `LATEST`; None if `LATEST` does not exist or its content cannot be the name of a checkpoint.
pub(in crate::checkpoint) fn hint(parent: &Place) -> Result<Option<String>> {
    match parent.get(LATEST, MAX_HINT_BYTES + 1).map_err(CheckpointError::from) {
        Ok(found) => Ok(found.and_then(|found| hint_of(found.content.to_vec()))),
        Err(CheckpointError::Corrupt { .. }) => Ok(None), // too large for a name
        Err(error) => Err(error),
    }
}

/// Write the name of `dir` to `LATEST` next to it.
///
/// # Errors
/// `BadSave` if `dir` is a whole bucket; `Occupied` if `LATEST` exists but was not written by a save; `Io`.
pub(in crate::checkpoint) fn publish_latest(dir: &Place) -> Result<()> {
    let Some((parent, name)) = dir.parent() else {
        let what =
            "it is a bucket, and LATEST cannot be put next to a bucket; save below a prefix of the bucket";
        return Err(CheckpointError::cannot(PUBLISH, Path::new(dir.url()), what));
    };
    if hint(&parent)?.is_none() && parent.sizes(&[LATEST.to_owned()])?.iter().any(Option::is_some) {
        return Err(CheckpointError::Occupied { path: parent.url_of(LATEST) });
    }
    Ok(parent.put(LATEST, format!("{name}\n").into_bytes())?)
}

/// Delete all but the `keep_last` newest checkpoints below `parent`, and the files of saves that were killed. Never
/// deletes the newest complete checkpoint, a checkpoint whose manifest cannot be read, or an object that no save has
/// put. If no checkpoint has all its files, nothing is deleted. Returns the deleted checkpoints.
///
/// # Errors
/// `Io`. Some checkpoints may already have been deleted.
pub(in crate::checkpoint) fn prune(parent: &Place, keep_last: NonZeroUsize) -> Result<Vec<PathBuf>> {
    let names: Vec<String> = parent.names()?.into_iter().collect();
    let mut whole = Vec::new();
    let mut others = Vec::new();
    for (name, found) in manifests(parent, &names)? {
        match found {
            Ok(Some((manifest, written))) => whole.push((name, manifest, written)),
            Ok(None) => others.push(name),
            Err(error @ CheckpointError::Io { .. }) => return Err(error),
            Err(_) => {} // a damaged checkpoint is kept
        }
    }
    whole.sort_by_key(|(_, manifest, _)| {
        std::cmp::Reverse((manifest.head.run.generation, manifest.head.step))
    });
    let Some(newest_whole) = first_whole(parent, &whole)? else { return Ok(Vec::new()) };
    let newest_written = whole.first().map(|(_, _, written)| *written);
    let mut removed = Vec::new();
    for (index, (name, manifest, _)) in whole.iter().enumerate() {
        if index >= keep_last.get() && index != newest_whole {
            remove_files(&parent.child(name), manifest)?;
            removed.push(parent.url_of(name));
        }
    }
    for name in others {
        delete_unfinished(&parent.child(&name), newest_written)?;
    }
    Ok(removed)
}

/// The index of the first checkpoint that has all its files, if there is one. The content of the files is not
/// read, because the store keeps it intact.
fn first_whole(parent: &Place, found: &[(String, Manifest, i64)]) -> Result<Option<usize>> {
    for (index, (name, manifest, _)) in found.iter().enumerate() {
        if check_sizes(&parent.child(name), &manifest.all())?.is_empty() {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// Delete a checkpoint: its manifest first, because a place with a manifest is a checkpoint.
pub(in crate::checkpoint) fn remove(dir: &Place) -> Result<()> {
    match dir.get(MANIFEST, manifest::MAX_BYTES)? {
        None => Ok(()),
        Some(found) => {
            let manifest = manifest::parse(&dir.url_of(MANIFEST), &found.content).map_err(|error| {
                error.with_next("its files are unknown: delete the objects with the tools of the store")
            })?;
            remove_files(dir, &manifest)
        }
    }
}

fn remove_files(dir: &Place, manifest: &Manifest) -> Result<()> {
    dir.delete([MANIFEST.to_owned()])?;
    // These names are known even if the listing is out of date.
    let mut files: Vec<String> = manifest.all().into_iter().map(|entry| entry.name).collect();
    files.extend(manifest.files.iter().map(|entry| entry.name.clone()));
    files.extend(staged_files(dir)?.into_iter().map(|(name, _)| name));
    files.sort();
    files.dedup();
    Ok(dir.delete(files)?)
}

/// Delete the files of saves below a place without a manifest, if all are older than the newest checkpoint.
///
/// This assumes that one process saves below the parent, one save after another. The files of a save in
/// progress are then newer than the newest checkpoint. If a second process saves, and puts no file while the
/// first one completes a checkpoint, the files of the second one's save are deleted. The commit of that save
/// then fails if it checks its files after the deletion.
fn delete_unfinished(dir: &Place, newest_written: Option<i64>) -> Result<()> {
    let files = staged_files(dir)?;
    if newest_written.is_some_and(|newest| files.iter().all(|(_, written)| *written < newest)) {
        dir.delete(files.into_iter().map(|(name, _)| name))?;
    }
    Ok(())
}

/// The files that saves have put below a place, and the times at which they were put.
fn staged_files(dir: &Place) -> Result<Vec<(String, i64)>> {
    let is_staged = |name: &str| matches!(names::split(name), Some((Some(_), _)));
    let listed = dir.list()?.into_iter().map(|object| (object.name, object.modified));
    Ok(listed.filter(|(name, _)| is_staged(name)).collect())
}
