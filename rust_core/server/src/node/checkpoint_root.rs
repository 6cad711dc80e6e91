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
            Ok(_) => io::Error::new(io::ErrorKind::NotADirectory, "it is not a folder on the server"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => io::Error::new(
                io::ErrorKind::NotFound,
                "no such folder on the server: PERSIA_CKPT_DIR must be a folder that trainers and servers share",
            ),
            Err(error) => error,
        };
        Err(TablesError::Io { path, source })
    }

    /// Check the URL of an object store. If the root is a URL, it must be below the root; otherwise any URL is allowed
    /// that the credentials of this server permit.
    fn resolve_url(&self, url: &str) -> Result<PathBuf, TablesError> {
        let path = Path::new(url);
        let root = self.0.as_deref().filter(|root| is_url(root));
        let is_plain = url.split('/').skip(3).all(|part| !matches!(part, "" | "." | ".."));
        if !is_plain || root.is_some_and(|root| !path.starts_with(root)) {
            let root = root.map_or_else(
                || "s3://BUCKET/PREFIX".into(),
                |root| format!("{} (PERSIA_CKPT_DIR of this server)", root.display()),
            );
            return Err(TablesError::BadShape {
                what: format!(
                    "checkpoint {url:?}: expected a URL below {root} without an empty component, . or .."
                ),
            });
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
        assert!(error.ends_with("run/file: it is not a folder on the server"), "{error}");
        let error = root.resolve("run/other").unwrap_err();
        assert!(matches!(error, TablesError::Io { .. }) && error.to_string().contains("PERSIA_CKPT_DIR"));
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
