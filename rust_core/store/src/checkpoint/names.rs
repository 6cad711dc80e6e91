//! The file names in a checkpoint. Manifests are not trusted: a name with a path separator is refused, unless
//! it begins with a staging directory.

use std::path::{Path, PathBuf};

use persia_types::limits::MAX_NAME_BYTES;
use persia_types::{VIRTUAL_SHARDS, is_url};

/// The manifest: a directory with this file is a checkpoint.
pub(super) const MANIFEST: &str = "MANIFEST.json";
/// The manifest of a checkpoint that is being deleted.
pub(super) const REMOVED: &str = ".REMOVED.json";
/// The file that names the last checkpoint of a run, in the parent directory of the checkpoints.
pub(super) const LATEST: &str = "LATEST";
/// The file that marks a staging directory as created by a save.
pub(super) const MARKER: &str = ".persia-save";

const STAGING_PREFIX: &str = ".saving-";

/// Whether a checkpoint may contain a file of this name. The name must match `[A-Za-z0-9._-]{1,128}`, must not be
/// hidden, and must be neither [`MANIFEST`] nor [`LATEST`].
pub(super) fn is_file_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        && !name.starts_with('.')
        && name != MANIFEST
        && name != LATEST
}

/// The message that says why a name is refused.
pub(super) fn refusal(name: &str) -> String {
    format!(
        "{name:?} cannot be the name of a checkpoint file; allowed: 1 to 128 letters (A-Z, a-z), digits, `.`, `_` \
         and `-`, no dot at the start, and neither {MANIFEST} nor {LATEST}"
    )
}

/// The name of the staging directory of the save with this revision.
pub(super) fn staging(revision: u64) -> String {
    format!("{STAGING_PREFIX}{revision}")
}

/// The revision in the name of a staging directory; None for any other name.
pub(super) fn revision(name: &str) -> Option<u64> {
    let revision = name.strip_prefix(STAGING_PREFIX)?.parse().ok()?;
    (staging(revision) == name).then_some(revision)
}

/// The path without staging directories, as messages show it. In a folder, this is the path that the file has
/// after the save.
pub(crate) fn without_staging(path: &Path) -> PathBuf {
    if let Some(url) = path.to_str().filter(|_| is_url(path)) {
        return url.split('/').filter(|part| revision(part).is_none()).collect::<Vec<_>>().join("/").into();
    }
    path.iter().filter(|part| part.to_str().and_then(revision).is_none()).collect()
}

/// Split the name of an entry into the staging directory, if any, and the file name; None for a name that is
/// not allowed.
pub(super) fn split(name: &str) -> Option<(Option<&str>, &str)> {
    let (staged, file) = match name.split_once('/') {
        Some((dir, file)) => (Some(dir), file),
        None => (None, name),
    };
    let valid = staged.is_none_or(|dir| revision(dir).is_some()) && is_file_name(file);
    valid.then_some((staged, file))
}

/// The file name of a virtual shard.
pub(super) fn shard_file(shard: usize) -> String {
    format!("shard-{shard:03}.arrow")
}

/// The virtual shard of an entry; None if the entry is not a shard file.
pub(crate) fn shard_of_entry(name: &str) -> Option<usize> {
    split(name).and_then(|(_, file)| shard_of_file(file))
}

/// The virtual shard of a file; None if the file is not a shard file.
pub(super) fn shard_of_file(name: &str) -> Option<usize> {
    let shard = name.strip_prefix("shard-")?.strip_suffix(".arrow")?.parse().ok()?;
    (shard < VIRTUAL_SHARDS && shard_file(shard) == name).then_some(shard)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_never_a_path() {
        for name in ["shard-003.arrow", "dense.pt", "rank-0.state", "a", &"x".repeat(128)] {
            assert!(is_file_name(name), "{name}");
        }
        let long = "x".repeat(129);
        for name in
            ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a\0", "é", "a b", MANIFEST, LATEST, &long]
        {
            assert!(!is_file_name(name), "{name:?}");
        }
    }

    #[test]
    fn only_our_staging_directories_may_precede_a_name() {
        assert_eq!(split("dense.pt"), Some((None, "dense.pt")));
        assert_eq!(split(".saving-7/dense.pt"), Some((Some(".saving-7"), "dense.pt")));
        for name in
            ["x/dense.pt", ".saving-07/a", ".saving-/a", ".saving-1/../a", ".saving-1/.saving-1/a", "/a"]
        {
            assert_eq!(split(name), None, "{name}");
        }
    }

    #[test]
    fn messages_name_the_path_after_the_save() {
        for (path, named) in [
            ("/runs/a/.saving-7/shard-003.arrow", "/runs/a/shard-003.arrow"),
            ("a/.saving-7", "a"),
            ("/runs/.saving-07/dense.pt", "/runs/.saving-07/dense.pt"),
            ("../a/./b", "../a/b"),
            ("s3://bucket/runs/.saving-7/dense.pt", "s3://bucket/runs/dense.pt"),
        ] {
            assert_eq!(without_staging(Path::new(path)), Path::new(named));
        }
    }

    #[test]
    fn shard_files_are_named_in_one_way() {
        assert_eq!(shard_of_file("shard-255.arrow"), Some(255));
        for name in
            ["shard-256.arrow", "shard-3.arrow", "shard-+03.arrow", "shard-003.arrows", "shard-0003.arrow"]
        {
            assert_eq!(shard_of_file(name), None, "{name}");
        }
    }
}
