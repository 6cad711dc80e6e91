//! [`Discovery`]: a connection to NATS, for announcements and searches.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::service::ServiceExt;
use async_nats::{Client, ConnectOptions, Event, StatusCode};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::error::{DiscoveryError, without_password};
use super::peer::{Announcement, Peer, Service, check_job_name};
use crate::auth::RoleToken;
use crate::backoff;
use crate::error::with_causes;

/// The time without a further response after which a search ends.
const QUIET: Duration = Duration::from_millis(150);
/// The interval between pings to NATS.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const USER: &str = "persia";

/// The options of a connection: the address of NATS, and the job.
#[derive(Debug, Clone)]
pub struct DiscoveryOptions {
    /// The address of NATS: `nats://host:port` or `host:port`.
    pub url: String,
    /// The job. Processes of other jobs are not found.
    pub job: String,
    /// The token of the role `nats`, if NATS requires one.
    pub token: Option<RoleToken>,
}

#[derive(Debug)]
struct Connection {
    client: Client,
    url: String,
    job: String,
    /// The last error, if any, since the connection was last established.
    error: Arc<Mutex<Option<String>>>,
    /// The errors about malformed announcements that have been logged.
    logged: Mutex<HashSet<String>>,
}

/// A connection to NATS that reconnects automatically. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Discovery {
    connection: Arc<Connection>,
}

/// Keeps a process announced, even if NATS is restarted. Dropping it withdraws the announcement.
#[derive(Debug)]
pub struct Announced {
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Discovery {
    /// Connect in the background, on the current tokio runtime. If NATS is unreachable, connecting is retried
    /// forever.
    ///
    /// # Errors
    /// `BadJob`, `BadUrl`.
    pub async fn connect(options: DiscoveryOptions) -> Result<Self, DiscoveryError> {
        let DiscoveryOptions { url, job, token } = options;
        check_job_name(&job)?;
        let shown = without_password(&url);
        let error: Arc<Mutex<Option<String>>> = Arc::default();
        let mut connect = ConnectOptions::new()
            .name(format!("persia {job}"))
            .retry_on_initial_connect()
            .max_reconnects(None)
            .ping_interval(PING_INTERVAL)
            .reconnect_delay_callback(|attempt| backoff::pause(attempt.saturating_sub(1) as u32))
            .event_callback({
                let (error, url) = (Arc::clone(&error), shown.clone());
                move |event| {
                    note(&mut error.lock(), &url, event);
                    async {}
                }
            });
        if let Some(token) = token {
            connect = connect.user_and_password(USER.into(), token.reveal().into());
        }
        let client = connect
            .connect(&url)
            .await
            .map_err(|error| DiscoveryError::BadUrl { url: shown.clone(), what: with_causes(&error) })?;
        let connection = Connection { client, url: shown, job, error, logged: Mutex::default() };
        Ok(Self { connection: Arc::new(connection) })
    }

    /// The job.
    pub fn job(&self) -> &str {
        &self.connection.job
    }

    /// The address of NATS, without a password.
    pub fn url(&self) -> &str {
        &self.connection.url
    }

    /// Whether the connection is up.
    pub fn is_connected(&self) -> bool {
        self.connection.client.connection_state() == async_nats::connection::State::Connected
    }

    /// Wait until the connection is up. Without a `limit`, this waits forever.
    ///
    /// # Errors
    /// With a limit: `NotConnected` after the limit; `Refused` immediately.
    pub async fn wait_connected(&self, limit: Option<Duration>) -> Result<(), DiscoveryError> {
        let start = Instant::now();
        while !self.is_connected() {
            if let Some(limit) = limit {
                if let Some(refused @ DiscoveryError::Refused { .. }) = self.last_error() {
                    return Err(refused);
                }
                if start.elapsed() >= limit {
                    return Err(self.not_connected_after(limit));
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// The reason why the connection is down; None while it is up, and until an attempt has failed.
    pub fn last_error(&self) -> Option<DiscoveryError> {
        if self.is_connected() {
            return None;
        }
        let what = self.connection.error.lock().clone()?;
        let url = self.connection.url.clone();
        Some(if what.to_lowercase().contains("authorization") {
            DiscoveryError::Refused { url, what }
        } else {
            DiscoveryError::NotConnected { url, what: Some(what), waited: None }
        })
    }

    /// The error of a caller that waited for the connection.
    fn not_connected_after(&self, waited: Duration) -> DiscoveryError {
        let (url, waited) = (self.connection.url.clone(), Some(waited));
        match self.last_error() {
            Some(DiscoveryError::NotConnected { what, .. }) => {
                DiscoveryError::NotConnected { url, what, waited }
            }
            Some(other) => other,
            None => DiscoveryError::NotConnected { url, what: None, waited },
        }
    }

    /// The error of an operation that needs the connection and failed for `reason`.
    pub(super) fn not_connected(&self, reason: &str) -> DiscoveryError {
        let url = self.connection.url.clone();
        match self.last_error() {
            Some(DiscoveryError::NotConnected { what: Some(what), waited, .. }) => {
                DiscoveryError::NotConnected { url, what: Some(format!("{what} ({reason})")), waited }
            }
            Some(refused @ DiscoveryError::Refused { .. }) => refused,
            _ => DiscoveryError::NotConnected { url, what: Some(reason.to_owned()), waited: None },
        }
    }

    /// Announce this process as soon as NATS is connected, and until the guard is dropped.
    ///
    /// # Errors
    /// `NotConnected` or `Refused` if the connection is closed.
    pub async fn announce(&self, announcement: Announcement) -> Result<Announced, DiscoveryError> {
        let closed = |error: async_nats::Error| self.not_connected(&error.to_string());
        let name = announcement.service.name();
        let service = self
            .connection
            .client
            .service_builder()
            .description(announcement.service.description())
            .metadata(announcement.metadata(&self.connection.job))
            .start(name, crate::VERSION)
            .await
            .map_err(closed)?;
        // Use a separate subject, so that a request reaches this process and no other replica.
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
                            tracing::debug!(%error, "a reply to a readiness request was lost");
                        }
                    }
                }
            }
            if let Err(error) = service.stop().await {
                tracing::debug!(%error, "cannot withdraw an announcement");
            }
        });
        Ok(Announced { _stop: stop })
    }

    /// Find the job's processes of `service`, sorted by index. The search ends 150 ms after the last
    /// response, and at the latest after `limit`, which includes the wait for the connection. It ends
    /// immediately if NATS knows no process of this service.
    ///
    /// # Errors
    /// `NotConnected`, `Refused`.
    pub async fn find(&self, service: Service, limit: Duration) -> Result<Vec<Peer>, DiscoveryError> {
        let end = Instant::now() + limit;
        self.wait_connected(Some(limit)).await?;
        let client = &self.connection.client;
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
                Ok(peer) if peer.job == self.connection.job => peers.push(peer),
                Ok(_) => {}
                Err(what) => self.log_malformed(service, &what),
            }
        }
        if !self.is_connected() {
            return Err(self.not_connected("the connection broke during a search"));
        }
        peers.sort_by(|a, b| (a.index, &a.id).cmp(&(b.index, &b.id)));
        Ok(peers)
    }

    fn log_malformed(&self, service: Service, what: &str) {
        if self.connection.logged.lock().insert(what.to_owned()) {
            tracing::warn!(service = service.name(), what, "ignored a malformed announcement");
        }
    }
}

/// Record the last error, and log each change of state once.
fn note(error: &mut Option<String>, url: &str, event: Event) {
    let (what, lost) = match event {
        Event::Connected => {
            *error = None;
            tracing::info!(url, "connected to NATS");
            return;
        }
        Event::Disconnected => ("the connection broke".to_owned(), true),
        Event::ClientError(client) => (client.to_string().replace("nats: ", ""), false),
        Event::ServerError(server) => (server.to_string().replace("nats: ", ""), false),
        other => {
            tracing::debug!(url, %other, "event of NATS");
            return;
        }
    };
    if error.is_none() {
        let said = if lost { "lost the connection to NATS; reconnecting" } else { "waiting for NATS" };
        tracing::warn!(url, what, "{said}");
    }
    // "authorization violation" is kept, because it explains the disconnection that follows.
    if !lost || error.is_none() {
        *error = Some(what);
    }
}
