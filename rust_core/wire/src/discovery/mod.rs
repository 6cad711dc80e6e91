//! Where the processes of a job are, by the NATS services API (`$SRV.*`). Nothing else goes through NATS.

mod blocking;
mod host;
mod peer;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::service::ServiceExt;
use async_nats::{Client, ConnectOptions, Event, StatusCode};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

pub use self::blocking::BlockingDiscovery;
pub use self::host::advertised_host;
pub use self::peer::{Announcement, MAX_JOB_BYTES, Peer, Service, check_job_name};
use crate::auth::RoleToken;
use crate::backoff;

/// Silence after an answer that counts as "all have answered".
const QUIET: Duration = Duration::from_millis(150);
/// How often NATS is asked whether it is there.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const USER: &str = "persia";

/// How to reach NATS, and which job this is.
#[derive(Debug, Clone)]
pub struct DiscoveryOptions {
    /// `nats://host:port`, or `host:port`.
    pub url: String,
    /// Peers of other jobs are not seen.
    pub job: String,
    /// The token of role `nats`, where NATS wants one.
    pub token: Option<RoleToken>,
}

/// What discovery cannot do.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DiscoveryError {
    /// A job's name that is not one.
    #[error(
        "job name {name:?}: want 1 to {MAX_JOB_BYTES} of A-Z a-z 0-9 . _ -; PERSIA_JOB or global_config.yml sets it"
    )]
    BadJob {
        /// The name.
        name: String,
    },
    /// A text that is no address of NATS.
    #[error("PERSIA_NATS_URL={url:?}: {what}; want nats://host:4222")]
    BadUrl {
        /// The text.
        url: String,
        /// What is wrong.
        what: String,
    },
    /// NATS does not answer.
    #[error("NATS at {url} cannot be reached: {what}")]
    NotConnected {
        /// Its address.
        url: String,
        /// The last try's error, or how long was waited.
        what: String,
    },
    /// NATS does not take our token.
    #[error(
        "NATS at {url} refused: {what}; NATS and this process need the same token file (PERSIA_TOKEN_FILE)"
    )]
    Refused {
        /// Its address.
        url: String,
        /// What it said.
        what: String,
    },
    /// A network interface that does not exist.
    #[error("network interface {name} does not exist or has no IPv4 address; there are {}", .there.join(", "))]
    NoInterface {
        /// Asked for.
        name: String,
        /// Those that have an IPv4 address, with it.
        there: Vec<String>,
    },
    /// This host's address towards NATS.
    #[error("no address of this host towards NATS at {url}: {what}; set PERSIA_ADVERTISE")]
    NoAddress {
        /// NATS's address.
        url: String,
        /// Why.
        what: String,
    },
}

#[derive(Debug)]
struct Shared {
    client: Client,
    url: String,
    job: String,
    trouble: Arc<Mutex<Option<String>>>,
    /// Ids of services whose metadata made no sense and was logged.
    strangers: Mutex<HashSet<String>>,
}

/// A connection to NATS that comes back by itself. Clones share it.
#[derive(Debug, Clone)]
pub struct Discovery {
    shared: Arc<Shared>,
}

/// Keeps a process announced, also after NATS was away; dropping it withdraws the announcement.
#[derive(Debug)]
pub struct Announced {
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Discovery {
    /// Connect in the background, for as long as it takes. Needs a running tokio runtime, which from then on carries
    /// the connection.
    ///
    /// # Errors
    /// `BadJob`, `BadUrl`. NATS being unreachable is none.
    pub async fn connect(options: DiscoveryOptions) -> Result<Self, DiscoveryError> {
        let DiscoveryOptions { url, job, token } = options;
        check_job_name(&job)?;
        let shown = without_password(&url);
        let trouble: Arc<Mutex<Option<String>>> = Arc::default();
        let mut connect = ConnectOptions::new()
            .name(format!("persia {job}"))
            .retry_on_initial_connect()
            .max_reconnects(None)
            .ping_interval(PING_INTERVAL)
            .reconnect_delay_callback(|attempt| backoff::pause(attempt.saturating_sub(1) as u32))
            .event_callback({
                let (trouble, url) = (Arc::clone(&trouble), shown.clone());
                move |event| {
                    note(&mut trouble.lock(), &url, event);
                    async {}
                }
            });
        if let Some(token) = token {
            connect = connect.user_and_password(USER.into(), token.reveal().into());
        }
        let client = connect.connect(&url).await.map_err(|error| {
            let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
            DiscoveryError::BadUrl {
                url: shown.clone(),
                what: format!("{error}{}", source.unwrap_or_default()),
            }
        })?;
        let shared = Shared { client, url: shown, job, trouble, strangers: Mutex::default() };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The job whose peers are seen.
    pub fn job(&self) -> &str {
        &self.shared.job
    }

    /// NATS's address, without a password.
    pub fn url(&self) -> &str {
        &self.shared.url
    }

    /// Whether NATS answers now.
    pub fn is_connected(&self) -> bool {
        self.shared.client.connection_state() == async_nats::connection::State::Connected
    }

    /// Wait until NATS answers; without a limit for ever.
    ///
    /// # Errors
    /// `NotConnected` after `limit`, `Refused` when NATS does not take the token (at once, if there is a limit).
    pub async fn wait_connected(&self, limit: Option<Duration>) -> Result<(), DiscoveryError> {
        let start = Instant::now();
        while !self.is_connected() {
            if let Some(limit) = limit {
                if let Some(refused @ DiscoveryError::Refused { .. }) = self.trouble() {
                    return Err(refused);
                }
                if start.elapsed() >= limit {
                    return Err(self.not_connected(&format!("waited {} s", limit.as_secs_f32())));
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// What the last try to connect met; None while connected.
    pub fn trouble(&self) -> Option<DiscoveryError> {
        if self.is_connected() {
            return None;
        }
        let what = self.shared.trouble.lock().clone()?;
        let url = self.shared.url.clone();
        Some(if what.to_lowercase().contains("authorization") {
            DiscoveryError::Refused { url, what }
        } else {
            DiscoveryError::NotConnected { url, what }
        })
    }

    fn not_connected(&self, waited: &str) -> DiscoveryError {
        match self.trouble() {
            Some(DiscoveryError::NotConnected { url, what }) => {
                DiscoveryError::NotConnected { url, what: format!("{what} ({waited})") }
            }
            Some(other) => other,
            None => DiscoveryError::NotConnected { url: self.shared.url.clone(), what: waited.to_owned() },
        }
    }

    /// Answer for this process until the guard is dropped. The announcement is made as soon as NATS answers.
    ///
    /// # Errors
    /// `NotConnected` when the connection was closed for good.
    pub async fn announce(&self, announcement: Announcement) -> Result<Announced, DiscoveryError> {
        let closed = |error: async_nats::Error| self.not_connected(&error.to_string());
        let name = announcement.service.name();
        let service = self
            .shared
            .client
            .service_builder()
            .description(announcement.service.description())
            .metadata(announcement.metadata(&self.shared.job))
            .start(name, crate::VERSION)
            .await
            .map_err(closed)?;
        // Its subject is the process's own: a request reaches this one and no other replica.
        let own = format!("persia.{}", service.info().await.id);
        let mut ready = service.group(own).endpoint("ready").await.map_err(closed)?;
        let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = &mut stopped => break,
                    request = ready.next() => {
                        let Some(request) = request else { break };
                        if let Err(error) = request.respond(Ok("ready".into())).await {
                            tracing::debug!(%error, "an answer to a request for readiness was lost");
                        }
                    }
                }
            }
            if let Err(error) = service.stop().await {
                tracing::debug!(%error, "an announcement could not be withdrawn");
            }
        });
        Ok(Announced { _stop: stop })
    }

    /// The processes of the job that offer `service`, by index: those that answer until there is silence for 150 ms, or
    /// `limit` is over.
    ///
    /// # Errors
    /// `NotConnected`, `Refused`.
    pub async fn find(&self, service: Service, limit: Duration) -> Result<Vec<Peer>, DiscoveryError> {
        let end = Instant::now() + limit;
        self.wait_connected(Some(limit)).await?;
        let client = &self.shared.client;
        let failed = |error: &dyn std::fmt::Display| self.not_connected(&error.to_string());
        let inbox = client.new_inbox();
        let mut answers = client.subscribe(inbox.clone()).await.map_err(|error| failed(&error))?;
        let subject = format!("$SRV.INFO.{}", service.name());
        client.publish_with_reply(subject, inbox, "".into()).await.map_err(|error| failed(&error))?;
        let mut peers: Vec<Peer> = Vec::new();
        let mut quiet = end;
        while let Ok(Some(answer)) = timeout_at(quiet.min(end), answers.next()).await {
            if answer.status == Some(StatusCode::NO_RESPONDERS) {
                break;
            }
            quiet = Instant::now() + QUIET;
            match Peer::parse(service, &answer.payload) {
                Ok(peer) if peer.job == self.shared.job => peers.push(peer),
                Ok(_) => {}
                Err(what) => self.note_stranger(service, &what),
            }
        }
        if !self.is_connected() {
            return Err(self.not_connected("it went away while it was asked"));
        }
        peers.sort_by(|a, b| (a.index, &a.id).cmp(&(b.index, &b.id)));
        Ok(peers)
    }

    fn note_stranger(&self, service: Service, what: &str) {
        if self.shared.strangers.lock().insert(what.to_owned()) {
            tracing::warn!(service = service.name(), what, "ignored an announcement that makes no sense");
        }
    }
}

/// Keep the last trouble, and log each change of state once, not every try.
fn note(trouble: &mut Option<String>, url: &str, event: Event) {
    let (what, lost) = match event {
        Event::Connected => {
            *trouble = None;
            tracing::info!(url, "connected to NATS");
            return;
        }
        Event::Disconnected => ("the connection broke".to_owned(), true),
        Event::ClientError(error) => (error.to_string().replace("nats: ", ""), false),
        Event::ServerError(error) => (error.to_string().replace("nats: ", ""), false),
        other => {
            tracing::debug!(url, %other, "NATS");
            return;
        }
    };
    if trouble.is_none() {
        tracing::warn!(url, what, "{}", if lost { "lost NATS, trying again" } else { "waiting for NATS" });
    }
    // "authorization violation" stays: it explains the broken connection that follows it.
    if !lost || trouble.is_none() {
        *trouble = Some(what);
    }
}

fn without_password(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (scheme, rest));
    match rest.rsplit_once('@') {
        Some((_, host)) if scheme.is_empty() => host.to_owned(),
        Some((_, host)) => format!("{scheme}://{host}"),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::without_password;

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(without_password("nats://user:pass@host:4222"), "nats://host:4222");
        assert_eq!(without_password("user:p@ss@host"), "host");
        assert_eq!(without_password("nats://host:4222"), "nats://host:4222");
    }
}
