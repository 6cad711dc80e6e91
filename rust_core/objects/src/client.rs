//! The client of a bucket, and the runtime of its requests.

use std::collections::HashMap;
use std::env;
use std::ffi::OsString;
use std::io;
use std::process;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::{ClientConfigKey, RetryConfig};
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

use crate::place::Patience;

/// The number of threads of the runtime. The threads wait for the network and compute the hashes of requests.
const THREADS: usize = 2;
/// The time limit of one request, unless AWS_TIMEOUT sets one. One part in 60 s corresponds to 140 kB/s.
const REQUEST_TIMEOUT: &str = "60s";
/// The number of times that a request is retried, within [`RETRY_TIMEOUT`], after a status of 408, 429 or 5xx
/// or after a failed connection. A request that must not be repeated is retried only if it was not sent or
/// had such a status.
const RETRIES: usize = 12;
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// Like [`RETRIES`], for the check before training.
const PROBE_RETRIES: usize = 2;

/// The runtime of this process. A forked process creates a new one, because a fork does not copy threads.
pub(crate) fn runtime() -> io::Result<&'static Runtime> {
    static CURRENT: Mutex<Option<(u32, &'static Runtime)>> = Mutex::new(None);
    let mut current = CURRENT.lock();
    match *current {
        Some((process, runtime)) if process == process::id() => Ok(runtime),
        _ => {
            let made = Builder::new_multi_thread()
                .worker_threads(THREADS)
                .thread_name("persia-object-store")
                .enable_all()
                .build()?;
            let made: &'static Runtime = Box::leak(Box::new(made));
            *current = Some((process::id(), made));
            Ok(made)
        }
    }
}

/// What a client depends on: the process, the bucket, how long requests are retried, and the environment
/// variables `AWS_*`, for credentials, region and endpoint.
#[derive(PartialEq, Eq, Hash)]
struct Settings {
    process: u32,
    bucket: String,
    patience: Patience,
    environment: Vec<(OsString, OsString)>,
}

/// The client of a bucket. Clients and their connections are reused as long as their [`Settings`] are the
/// same.
pub(crate) fn client(bucket: &str, patience: Patience) -> object_store::Result<Arc<AmazonS3>> {
    /// The maximum number of clients that are kept. A process normally uses fewer. At the limit, all clients are
    /// dropped.
    const KEPT: usize = 16;
    static CLIENTS: Mutex<Option<HashMap<Settings, Arc<AmazonS3>>>> = Mutex::new(None);
    let mut environment: Vec<_> = env::vars_os()
        .filter(|(name, _)| name.to_str().is_some_and(|name| name.starts_with("AWS_")))
        .collect();
    environment.sort();
    let settings = Settings { process: process::id(), bucket: bucket.into(), patience, environment };
    let mut clients = CLIENTS.lock();
    let clients = clients.get_or_insert_default();
    if let Some(client) = clients.get(&settings) {
        return Ok(Arc::clone(client));
    }
    if clients.len() >= KEPT {
        clients.clear();
    }
    let client = Arc::new(build(bucket, patience)?);
    clients.insert(settings, Arc::clone(&client));
    Ok(client)
}

fn build(bucket: &str, patience: Patience) -> object_store::Result<AmazonS3> {
    // The call fails only if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let key = AmazonS3ConfigKey::Client;
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        // The store compares the content of each request with this checksum.
        .with_checksum_algorithm(Checksum::SHA256)
        .with_retry(RetryConfig {
            max_retries: match patience {
                Patience::Save => RETRIES,
                Patience::Probe => PROBE_RETRIES,
            },
            retry_timeout: RETRY_TIMEOUT,
            ..RetryConfig::default()
        });
    if env::var_os("AWS_TIMEOUT").is_none() {
        builder = builder.with_config(key(ClientConfigKey::Timeout), REQUEST_TIMEOUT);
    }
    if endpoint().is_some_and(|endpoint| endpoint.starts_with("http://")) {
        builder = builder.with_config(key(ClientConfigKey::AllowHttp), "true");
    }
    builder.build()
}

/// The endpoint in the environment; None means the endpoint of the region.
pub(crate) fn endpoint() -> Option<String> {
    ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"].iter().find_map(|name| env::var(name).ok())
}
