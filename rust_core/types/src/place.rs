//! The location of checkpoints: a directory or the URL of an object store.

use std::path::Path;

/// Whether a path is the URL of an object store, such as `s3://bucket/prefix`.
pub fn is_url(path: &Path) -> bool {
    path.to_str().and_then(|text| text.split_once("://")).is_some_and(|(scheme, _)| {
        scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+.-".contains(&byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_paths() {
        for url in ["s3://bucket/run", "gs://bucket", "hdfs://host:1/x"] {
            assert!(is_url(Path::new(url)), "{url}");
        }
        for path in ["/runs/a", "runs/a", "a:b", "://x", "1s3://bucket", "s3:/bucket"] {
            assert!(!is_url(Path::new(path)), "{path}");
        }
    }
}
