//! [`Place`]: a URL in an object store, and requests about the objects below it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::AmazonS3;
use object_store::path::Path as Key;
use object_store::{
    Error, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion,
};
use persia_types::is_url;

use crate::client;
use crate::failure::{Failure, failure, is_absent, is_beyond_end};

/// The result type of the requests.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// The maximum number of requests in flight when several objects are read or measured.
const REQUESTS: usize = 16;

/// How often requests are retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Patience {
    /// Retry for about a minute. This is for the requests of a save.
    Save,
    /// Retry twice, because a user waits for the result. A request without a response still takes its whole
    /// time limit.
    Probe,
}

/// A URL in an object store: a bucket and a prefix of its keys.
#[derive(Clone)]
pub struct Place {
    url: String,
    store: Arc<AmazonS3>,
    key: Key,
}

/// An object below a [`Place`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// The key, relative to the place.
    pub name: String,
    /// The size, in bytes.
    pub bytes: u64,
    /// The time at which it was written, by the clock of the store, in microseconds since 1970.
    pub modified: i64,
}

/// The content of a small object, and its version.
#[derive(Debug, Clone)]
pub struct Fetched {
    /// The whole content.
    pub content: Bytes,
    /// The version, for [`Place::put_over`].
    pub version: Version,
    /// The time at which it was written, by the clock of the store, in microseconds since 1970.
    pub modified: i64,
}

/// The version of an object.
#[derive(Debug, Clone)]
pub struct Version(UpdateVersion);

/// The outcome of a conditional put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// The object was put.
    Done,
    /// Nothing was put, because the object exists, or is not the expected version.
    Changed,
}

impl fmt::Debug for Place {
    /// Omits the client, which has credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

impl Place {
    /// The place that a URL names; None for a file system path, including one that is not UTF-8. No request
    /// is sent.
    ///
    /// # Errors
    /// The URL or the environment cannot be used.
    pub fn find(path: &Path, patience: Patience) -> Result<Option<Self>> {
        match path.to_str() {
            Some(url) if is_url(path) => Self::of(url, patience).map(Some),
            _ => Ok(None),
        }
    }

    fn of(url: &str, patience: Patience) -> Result<Self> {
        let url = url.trim_end_matches('/');
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let bad = |what: String| {
            // Messages show the URL without a password.
            let shown = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
            Failure::new(format!("{scheme}://{shown}"), io::ErrorKind::InvalidInput, what)
        };
        if !["s3", "s3a"].contains(&scheme) {
            return Err(bad(format!(
                "{scheme}:// is not supported; expected s3://BUCKET/PREFIX, also for another store with the S3 \
                 protocol (set AWS_ENDPOINT_URL)"
            )));
        }
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let is_bucket = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(is_bucket) {
            return Err(bad(
                "the bucket's name is not valid; expected s3://BUCKET/PREFIX, without credentials".into(),
            ));
        }
        if let Some(found) = key.chars().find(|found| "?#@\\".contains(*found) || found.is_control()) {
            return Err(bad(format!("{found:?} is not allowed; expected s3://BUCKET/PREFIX")));
        }
        if key.starts_with('/') || key.contains("//") {
            return Err(bad("the prefix has an empty segment; expected s3://BUCKET/PREFIX".into()));
        }
        let key = Key::parse(key).map_err(|error| bad(format!("{error}; expected s3://BUCKET/PREFIX")))?;
        let store = client::client(bucket, patience).map_err(|error| bad(failure(&error).to_string()))?;
        Ok(Self { url: url.into(), store, key })
    }

    /// The URL of the place.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The URL of an object below this place.
    pub fn url_of(&self, name: &str) -> PathBuf {
        format!("{}/{name}", self.url).into()
    }

    /// The parent place, and the name of this place in it; None for a bucket.
    pub fn parent(&self) -> Option<(Self, &str)> {
        let (url, name) = self.url.rsplit_once('/')?;
        let key = self.key.as_ref().rsplit_once('/').map_or("", |(key, _)| key);
        if self.key.as_ref().is_empty() {
            return None; // a bucket has no parent
        }
        Some((Self { url: url.into(), store: Arc::clone(&self.store), key: Key::parse(key).ok()? }, name))
    }

    /// The place `name` below this one.
    pub fn child(&self, name: &str) -> Self {
        Self { url: format!("{}/{name}", self.url), store: Arc::clone(&self.store), key: self.key_of(name) }
    }

    fn key_of(&self, name: &str) -> Key {
        name.split('/').fold(self.key.clone(), |key, part| key.join(part))
    }

    fn error(&self, name: &str, error: &Error) -> Failure {
        Failure {
            url: if name.is_empty() { (&self.url).into() } else { self.url_of(name) },
            source: failure(error),
        }
    }

    /// Run `work` on the runtime of this crate, and wait for it.
    fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let runtime = client::runtime().map_err(|source| Failure { url: (&self.url).into(), source })?;
        Ok(runtime.block_on(work))
    }

    /// Read an object of at most `most` bytes. Returns None if the object does not exist.
    ///
    /// # Errors
    /// The store refuses the request or does not respond; `InvalidData` if the object is larger.
    pub fn get(&self, name: &str, most: u64) -> Result<Option<Fetched>> {
        self.wait(self.fetch(name, most))?
    }

    /// Like [`Self::get`], for several places. Returns the result for each place.
    ///
    /// # Errors
    /// No request can be sent, because the runtime of this crate cannot start.
    pub fn get_each(places: &[Self], name: &str, most: u64) -> Result<Vec<Result<Option<Fetched>>>> {
        let Some(first) = places.first() else { return Ok(Vec::new()) };
        let work = stream::iter(places).map(|place| place.fetch(name, most)).buffered(REQUESTS).collect();
        first.wait(work)
    }

    async fn fetch(&self, name: &str, most: u64) -> Result<Option<Fetched>> {
        let found = match self.store.get(&self.key_of(name)).await {
            Ok(found) => found,
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) => return Err(self.error(name, &error)),
        };
        if found.meta.size > most {
            let what = format!("the object has {} bytes, but the limit is {most}", found.meta.size);
            return Err(Failure::new(self.url_of(name), io::ErrorKind::InvalidData, what));
        }
        let (e_tag, version) = (found.meta.e_tag.clone(), found.meta.version.clone());
        let version = Version(UpdateVersion { e_tag, version });
        let modified = found.meta.last_modified.timestamp_micros();
        let content = found.bytes().await.map_err(|error| self.error(name, &error))?;
        Ok(Some(Fetched { content, version, modified }))
    }

    /// Read at most `most` bytes of an object from `start`. Also returns the size of the whole object. Returns None
    /// if the object does not exist.
    ///
    /// # Errors
    /// The store refuses the request or does not respond.
    pub fn get_range(&self, name: &str, start: u64, most: u64) -> Result<Option<(Bytes, u64)>> {
        let options = object_store::GetOptions {
            range: Some(object_store::GetRange::Bounded(start..start.saturating_add(most))),
            ..Default::default()
        };
        let work = async {
            let found = self.store.get_opts(&self.key_of(name), options).await?;
            let size = found.meta.size;
            Ok::<_, Error>((found.bytes().await?, size))
        };
        match self.wait(work)? {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_absent(&error) => Ok(None),
            // The object ends before the first requested byte.
            Err(error) if is_beyond_end(&error) => {
                let size = self.wait(self.size(name))??;
                Ok(size.map(|size| (Bytes::new(), size)))
            }
            Err(error) => Err(self.error(name, &error)),
        }
    }

    /// The sizes of objects; None for those that do not exist.
    ///
    /// # Errors
    /// The store refuses the request or does not respond.
    pub fn sizes(&self, names: &[String]) -> Result<Vec<Option<u64>>> {
        let work = stream::iter(names).map(|name| self.size(name)).buffered(REQUESTS).try_collect();
        self.wait(work)?
    }

    async fn size(&self, name: &str) -> Result<Option<u64>> {
        match self.store.head(&self.key_of(name)).await {
            Ok(found) => Ok(Some(found.size)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(self.error(name, &error)),
        }
    }

    /// Put a whole object.
    ///
    /// # Errors
    /// The store refuses the request or does not respond.
    pub fn put(&self, name: &str, content: Vec<u8>) -> Result<()> {
        let key = self.key_of(name);
        let put = self.store.put(&key, PutPayload::from(content));
        self.wait(put)?.map(drop).map_err(|error| self.error(name, &error))
    }

    /// Put a whole object if it does not exist yet (`over` is None), or if its version is still `over`. If
    /// `AWS_CONDITIONAL_PUT` disables conditional puts, or `over` has no ETag, the object is replaced in any
    /// case. A store that ignores the condition also replaces the object.
    ///
    /// # Errors
    /// The store refuses the request or does not respond.
    pub fn put_over(&self, name: &str, content: Vec<u8>, over: Option<Version>) -> Result<Put> {
        let key = self.key_of(name);
        let payload = PutPayload::from(content);
        let mode = match over {
            None => PutMode::Create,
            Some(Version(over)) if over.e_tag.is_some() => PutMode::Update(over),
            Some(_) => PutMode::Overwrite, // the store has no ETags
        };
        let options = PutOptions { mode, ..Default::default() };
        let work = async {
            match self.store.put_opts(&key, payload.clone(), options).await {
                Err(Error::NotImplemented { .. }) => self.store.put(&key, payload).await,
                other => other,
            }
        };
        match self.wait(work)? {
            Ok(_) => Ok(Put::Done),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. } | Error::NotModified { .. }) => {
                Ok(Put::Changed)
            }
            Err(error) => Err(self.error(name, &error)),
        }
    }

    /// Start an upload in parts.
    ///
    /// # Errors
    /// The store refuses the request or does not respond.
    pub(crate) fn begin_parts(&self, name: &str) -> Result<Box<dyn MultipartUpload>> {
        let key = self.key_of(name);
        let work = self.store.put_multipart(&key);
        self.wait(work)?.map_err(|error| self.error(name, &error))
    }

    /// All objects below this place that the listing shows.
    ///
    /// # Errors
    /// The store refuses the request or does not respond.
    pub fn list(&self) -> Result<Vec<Object>> {
        let depth = self.key.parts().count();
        let listed = self.store.list(Some(&self.key)).map_ok(|found| Object {
            name: found
                .location
                .parts()
                .skip(depth)
                .map(|part| part.as_ref().to_owned())
                .collect::<Vec<_>>()
                .join("/"),
            bytes: found.size,
            modified: found.last_modified.timestamp_micros(),
        });
        self.wait(listed.try_collect())?.map_err(|error| self.error("", &error))
    }

    /// The names directly below this place that have objects below them. Only what the listing shows is
    /// found.
    ///
    /// # Errors
    /// The store refuses the request or does not respond.
    pub fn names(&self) -> Result<BTreeSet<String>> {
        let found = self.wait(self.store.list_with_delimiter(Some(&self.key)))?;
        let found = found.map_err(|error| self.error("", &error))?;
        Ok(found.common_prefixes.iter().filter_map(|key| key.filename().map(str::to_owned)).collect())
    }

    /// Delete objects. A key without an object counts as deleted.
    ///
    /// # Errors
    /// The store refuses the request or does not respond.
    pub fn delete(&self, names: impl IntoIterator<Item = String>) -> Result<()> {
        let keys: Vec<_> = names.into_iter().map(|name| Ok(self.key_of(&name))).collect();
        let deleted = self.store.delete_stream(stream::iter(keys).boxed());
        let absent = |result: object_store::Result<Key>| match result {
            Err(error) if is_absent(&error) => Ok(()),
            other => other.map(drop),
        };
        let work = deleted.map(absent).try_collect::<Vec<()>>();
        self.wait(work)?.map(drop).map_err(|error| self.error("", &error))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test: a panic is its verdict")]
mod tests {
    use super::*;

    #[test]
    fn a_url_without_a_bucket_or_of_another_scheme_says_what_is_expected() {
        for (url, what) in [
            ("gs://bucket/run", "gs:// is not supported; expected s3://BUCKET/PREFIX"),
            ("s3:///run", "the bucket's name is not valid"),
            ("s3://a b/run", "the bucket's name is not valid"),
            ("s3://bucket/run/../other", "expected s3://BUCKET/PREFIX"),
            ("s3://bucket//run", "expected s3://BUCKET/PREFIX"),
            ("s3://bucket/run?x", "'?' is not allowed"),
        ] {
            let error = Place::find(Path::new(url), Patience::Probe).unwrap_err().to_string();
            assert!(error.starts_with(url) && error.contains(what), "{url}: {error}");
        }
        let url = Path::new("s3://key:secret@bucket/run");
        let error = Place::find(url, Patience::Probe).unwrap_err().to_string();
        assert!(error.contains("without credentials") && !error.contains("secret"), "{error}");
        assert!(Place::find(Path::new("/runs"), Patience::Probe).unwrap().is_none());
    }

    #[test]
    fn places_are_related_by_their_names() {
        let step = Place::find(Path::new("s3://bucket/runs/a/step-5/"), Patience::Probe).unwrap().unwrap();
        assert_eq!(step.url(), "s3://bucket/runs/a/step-5");
        let (run, name) = step.parent().unwrap();
        assert_eq!((run.url(), name, run.key.as_ref()), ("s3://bucket/runs/a", "step-5", "runs/a"));
        assert_eq!(run.child("step-5").key, step.key);
        let bucket = Place::find(Path::new("s3://bucket"), Patience::Probe).unwrap().unwrap();
        assert!(bucket.parent().is_none());
        assert_eq!(bucket.child("LATEST").key.as_ref(), "LATEST");
        assert_eq!(step.url_of(".saving-7/a"), Path::new("s3://bucket/runs/a/step-5/.saving-7/a"));
    }
}
