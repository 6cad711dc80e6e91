//! [`CheckpointRoot`]: the directory or URL below which a server writes and reads checkpoints.

use std::io;
use std::path::{Path, PathBuf};

use persia_types::limits::MAX_NAME_BYTES;
use persia_types::{TablesError, is_url};

/// The directory or URL for snapshots, if there is one.
#[derive(Debug, Clone, Default)]
pub struct CheckpointRoot(Option<PathBuf>);

impl CheckpointRoot {
    /// Allow the directories or URLs below `root`. If it is a directory or None, all URLs are allowed too.
    pub fn new(root: Option<PathBuf>) -> Self {
        Self(root)
    }

    /// The directory `relative` below the root, or the URL `relative`. Requests are not trusted: each
    /// component of a directory must match `[A-Za-z0-9._-]{1,128}` and must not be `.`, `..` or a symbolic
    /// link.
    ///
    /// # Errors
    /// `BadShape` for a name or URL that is not allowed, or for a directory if the root is not one; `Io` if
    /// the directory does not exist or is not a directory.
    pub fn resolve(&self, relative: &str) -> Result<PathBuf, TablesError> {
        let bad = |what: String| Err(TablesError::BadShape { what });
        if is_url(Path::new(relative)) {
            return self.resolve_url(relative);
        }
        let Some(root) = &self.0 else {
            return bad("this server has no folder for checkpoints: start it with PERSIA_CKPT_DIR".into());
        };
        if is_url(root) {
            return bad(format!(
                "checkpoint folder {relative:?}: PERSIA_CKPT_DIR of this server is {}; set the same value for trainers \
                 and servers",
                root.display()
            ));
        }
        let mut path = root.clone();
        for name in relative.split('/').filter(|_| !relative.is_empty()) {
            if !is_name(name) {
                return bad(format!(
                    "checkpoint folder {relative:?}: the name {name:?} is not allowed: expected \
                     [A-Za-z0-9._-]{{1,128}}, except . and .."
                ));
            }
            path.push(name);
            if is_link(&path)? {
                return bad(format!(
                    "checkpoint folder {relative:?}: {name:?} is a symbolic link, which is not allowed"
                ));
            }
        }
        let source = match path.metadata() {
            Ok(found) if found.is_dir() => return Ok(path),
            Ok(_) => io::Error::new(
                io::ErrorKind::NotADirectory,
                "this path is a file on the server, not a folder; delete the file, or use another folder for \
                 checkpoints",
            ),
            Err(error) if error.kind() == io::ErrorKind::NotFound => io::Error::new(
                io::ErrorKind::NotFound,
                "this folder does not exist on the server; set PERSIA_CKPT_DIR of all trainers and servers to one \
                 folder on shared storage or, if the folder was deleted, use another checkpoint",
            ),
            Err(error) => error,
        };
        Err(TablesError::Io { path, source })
    }

    /// Check the URL of an object store. If the root is also a URL, `url` must be below it. Otherwise, only the
    /// credentials of this server limit the URLs that it can access.
    fn resolve_url(&self, url: &str) -> Result<PathBuf, TablesError> {
        let bad = |what: String| Err(TablesError::BadShape { what });
        let path = Path::new(url);
        if url.split('/').skip(3).any(|part| matches!(part, "" | "." | "..")) {
            return bad(format!(
                "checkpoint {url:?}: expected a URL such as s3://BUCKET/PREFIX, without an empty component, . or .."
            ));
        }
        if let Some(root) = self.0.as_deref().filter(|root| is_url(root) && !path.starts_with(root)) {
            return bad(format!(
                "checkpoint {url:?}: PERSIA_CKPT_DIR of this server is {}; set the same value for trainers and servers, or \
                 save below it",
                root.display()
            ));
        }
        Ok(path.to_owned())
    }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        && name != "."
        && name != ".."
}

fn is_link(path: &Path) -> Result<bool, TablesError> {
    match path.symlink_metadata() {
        Ok(found) => Ok(found.is_symlink()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(TablesError::Io { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_directories_below_the_root_are_found() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("run/step-7/.saving-1")).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("run/link")).unwrap();
        let root = CheckpointRoot::new(Some(dir.path().to_owned()));
        assert_eq!(root.resolve("run/step-7/.saving-1").unwrap(), dir.path().join("run/step-7/.saving-1"));
        assert_eq!(root.resolve("").unwrap(), dir.path());
        let refused =
            ["..", "run/../..", "/etc", "run//step-7", "run/.", "a b", "run/link/tmp", "run\0", "é"];
        for name in refused {
            let error = root.resolve(name).unwrap_err();
            assert!(matches!(error, TablesError::BadShape { .. }), "{name}: {error}");
        }
        std::fs::write(dir.path().join("run/file"), "").unwrap();
        let error = root.resolve("run/file").unwrap_err().to_string();
        assert!(
            error.contains("run/file: this path is a file on the server, not a folder; delete the file"),
            "{error}"
        );
        let error = root.resolve("run/other").unwrap_err();
        assert!(matches!(error, TablesError::Io { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("run/other: this folder does not exist on the server; set PERSIA_CKPT_DIR"),
            "{text}"
        );
        assert!(CheckpointRoot::new(None).resolve("run").is_err());
    }

    #[test]
    fn a_root_that_is_a_url_is_the_limit_of_urls() {
        let url = "s3://bucket/runs/a/step-7/.saving-1";
        for root in [None, Some("/checkpoints".into()), Some("s3://bucket/runs".into())] {
            assert_eq!(CheckpointRoot::new(root).resolve(url).unwrap(), Path::new(url));
        }
        let root = CheckpointRoot::new(Some("s3://bucket/runs".into()));
        let outside =
            ["s3://bucket/runs2/a", "s3://other/runs/a", "s3://bucket/runs/../x", "s3://bucket/runs//a", "a"];
        for name in outside {
            let error = root.resolve(name).unwrap_err();
            assert!(matches!(&error, TablesError::BadShape { .. }), "{name}: {error}");
            assert!(error.to_string().contains("s3://bucket/runs"), "{error}");
        }
    }
}
