//! [`serve`]: serves a gRPC service and reflection with authentication, and health checks without it, until
//! the process stops.

use std::convert::Infallible;
use std::time::Duration;

use futures_util::StreamExt;
use persia_wire::auth::Guard;
use persia_wire::error::with_causes;
use persia_wire::listen::Listener;
use persia_wire::proto::FILE_DESCRIPTOR_SET;
use persia_wire::settings::{self, Endpoint};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::ServerTlsConfig;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::HealthReporter;

use crate::auth::AuthInterceptor;
use crate::connection::{self, Tracked};
use crate::exit::Exit;

/// The options for serving, which servers and middlewares share.
pub struct Host {
    /// Authenticates calls.
    pub guard: Guard,
    /// The TLS settings of TCP connections.
    pub tls: Option<ServerTlsConfig>,
    /// The grace period for open connections after a stop.
    pub grace: Duration,
    /// Answers `grpc.health.v1`.
    pub health: Health,
}

/// The health of the process: whether it serves.
#[derive(Clone)]
pub struct Health {
    reporter: HealthReporter,
    service: &'static str,
}

/// The gRPC service that reports a [`Health`].
pub type HealthService = HealthServer<tonic_health::server::HealthService>;

impl Health {
    /// Return the health of a process that does not serve yet, and the gRPC service that reports it.
    pub async fn new(service: &'static str) -> (Self, HealthService) {
        let reporter = HealthReporter::new();
        let server =
            HealthServer::new(tonic_health::server::HealthService::from_health_reporter(reporter.clone()));
        let health = Self { reporter, service };
        health.set(false).await;
        (health, server)
    }

    /// Set whether the process serves.
    pub async fn set(&self, serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in ["", self.service] {
            self.reporter.set_service_status(name, status).await;
        }
    }
}

/// Serve until `shutdown`. Then accept no more connections, and wait until the open ones are closed, the grace period
/// ends, or `hurry` completes.
///
/// # Errors
/// `Usage` for a certificate that cannot be used; `Again` if connections cannot be accepted any more;
/// `Corrupt` if the description of the protocol in this build is damaged.
pub async fn serve<S>(
    listener: Listener,
    service: S,
    host: Host,
    health: HealthService,
    shutdown: impl Future<Output = ()> + Send,
    hurry: impl Future<Output = ()>,
) -> Result<(), Exit>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    let unusable = |error: &dyn std::error::Error| {
        Exit::Usage(format!("cannot use PERSIA_TLS_CERT and PERSIA_TLS_KEY: {}", with_causes(error)))
    };
    let tls = host.tls.filter(|_| matches!(listener.endpoint(), Endpoint::Tcp { .. }));
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(|error| Exit::Corrupt(format!("cannot read the description of the protocol: {error}")))?;
    let auth = AuthInterceptor::new(host.guard);
    let router = settings::server(tls)
        .map_err(|error| unusable(&error))?
        .add_service(health)
        .add_service(InterceptedService::new(reflection, auth.clone()))
        .add_service(InterceptedService::new(service, auth));

    let (tracker, open) = connection::track();
    let connections = listener
        .connections()
        .map(move |connection| connection.map(|connection| Tracked::new(connection, tracker.token())))
        .take_until(shutdown);
    router.serve_with_incoming(connections).await.map_err(|error| {
        Exit::Again(format!("cannot accept connections any more: {}", with_causes(&error)))
    })?;
    tracing::info!(grace_s = host.grace.as_secs(), "stopping: waiting for open connections to close");
    host.health.set(false).await;
    tokio::select! {
        closed = tokio::time::timeout(host.grace, open.all_closed()) => if closed.is_err() {
            tracing::warn!(
                "stopping, although connections are still open after {} s (PERSIA_STOP_GRACE)",
                host.grace.as_secs()
            );
        },
        () = hurry => tracing::warn!("stopping at the second signal, although connections are still open"),
    }
    Ok(())
}
