//! Names in a checkpoint. Manifests are not trusted: a name is never a path.

use std::path::{Path, PathBuf};

use persia_types::VIRTUAL_SHARDS;
use persia_types::limits::MAX_NAME_BYTES;

/// The file that makes a directory a checkpoint.
pub(super) const MANIFEST: &str = "MANIFEST.json";
/// The manifest of a checkpoint that is being deleted.
pub(super) const REMOVED: &str = ".REMOVED.json";
/// Names the last checkpoint of a run, in their common directory.
pub(super) const LATEST: &str = "LATEST";
/// Marks a staging directory as created by a save.
pub(super) const MARKER: &str = ".persia-save";

const STAGING_PREFIX: &str = ".saving-";

/// Whether a checkpoint may have a file of this name: `[A-Za-z0-9._-]{1,128}`, not hidden, and none of the names above.
pub(super) fn is_file_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        && !name.starts_with('.')
        && name != MANIFEST
        && name != LATEST
}

/// The staging directory of the `revision`-th save into a directory.
pub(super) fn staging(revision: u64) -> String {
    format!("{STAGING_PREFIX}{revision}")
}

/// The revision in the name of a staging directory.
pub(super) fn revision(name: &str) -> Option<u64> {
    let revision = name.strip_prefix(STAGING_PREFIX)?.parse().ok()?;
    (staging(revision) == name).then_some(revision)
}

/// The path of a file after its save, without the staging directory, which has been removed by then.
pub(crate) fn published(path: &Path) -> PathBuf {
    path.iter().filter(|part| part.to_str().and_then(revision).is_none()).collect()
}

/// Split the name of an entry into its staging directory, if any, and the name of the file.
pub(super) fn split(name: &str) -> Option<(Option<&str>, &str)> {
    let (staged, file) = match name.split_once('/') {
        Some((dir, file)) => (Some(dir), file),
        None => (None, name),
    };
    let valid = staged.is_none_or(|dir| revision(dir).is_some()) && is_file_name(file);
    valid.then_some((staged, file))
}

/// The file of a virtual shard.
pub(super) fn shard_file(shard: usize) -> String {
    format!("shard-{shard:03}.arrow")
}

/// The virtual shard of an entry; None if it is not a shard file.
pub(crate) fn shard_of_entry(name: &str) -> Option<usize> {
    split(name).and_then(|(_, file)| shard_of_file(file))
}

/// The virtual shard of a file; None if it is not a shard file.
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
        ] {
            assert_eq!(published(Path::new(path)), Path::new(named));
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
