//! The life cycle of both binaries: parse flags, start logs and metrics, listen, announce the process, and stop on a
//! signal.

use std::collections::BTreeMap;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{CommandFactory, FromArgMatches};
use persia_types::config::GlobalConfig;
use persia_wire::auth::{Guard, Role, Secret};
use persia_wire::backoff::pause;
use persia_wire::discovery::{
    Announced, Announcement, Discovery, DiscoveryError, DiscoveryOptions, advertised_host,
};
use persia_wire::listen::Listener;
use persia_wire::settings::Endpoint;
use persia_wire::trace;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tonic::transport::ClientTlsConfig;

use crate::args::{self, CommonArgs};
use crate::exit::Exit;
use crate::kind::Kind;
use crate::serve::{Health, HealthService, Host};
use crate::{allocator, logs, metrics, probe, watchdog};

/// The default port for metrics.
const METRICS_PORT: u16 = 9464;
/// The time for which NATS may refuse the token before the first connection. NATS may not have read the current token
/// yet.
const NATS_AUTH_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval at which the values of histograms are aggregated. Without this, memory grows if no metrics
/// are read.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// The state of a server or middleware before it serves.
pub struct Process {
    /// The common flags.
    pub args: CommonArgs,
    /// The kind of the process.
    pub kind: Kind,
    /// The job.
    pub job: String,
    /// The global configuration.
    pub global: GlobalConfig,
    /// The job's secret.
    pub secret: Option<Secret>,
    /// The TLS settings for calls to other processes.
    pub client_tls: Option<ClientTlsConfig>,
    /// The connection to NATS, if configured. An infer job never has one.
    pub discovery: Option<Discovery>,
    /// Whether the process serves.
    pub ready: Arc<AtomicBool>,
    /// The socket.
    pub listener: Listener,
    host: Host,
    health: Health,
    since: Instant,
}

/// Run a binary. `common` returns the common flags, and `main` serves. Returns the exit code.
pub fn run<A, F>(
    kind: Kind,
    common: impl Fn(&A) -> &CommonArgs,
    main: impl FnOnce(Process, HealthService, A) -> F,
) -> ExitCode
where
    A: CommandFactory + FromArgMatches,
    F: Future<Output = Result<(), Exit>>,
{
    allocator::keep_freed_memory();
    let ended = args::parse::<A>().and_then(|args| {
        let common = common(&args).clone();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Exit::Again(format!("cannot start threads: {error}")))?;
        let ended = runtime.block_on(async {
            // A container engine runs the probe with the container's own variables, without the corrections of the
            // entry point. The probe therefore skips `check`.
            if common.health {
                return probe::ask(&common, kind).await;
            }
            common.check()?;
            let (process, health) = Process::start(common, kind).await?;
            let discovery = process.discovery.clone();
            tokio::select! {
                ended = main(process, health, args) => ended.map(|()| ExitCode::SUCCESS),
                exit = refused_by_nats(discovery) => Err(exit),
            }
        });
        // A request that is still running on a thread must not delay the end.
        runtime.shutdown_timeout(Duration::from_secs(1));
        trace::stop();
        ended
    });
    ended.unwrap_or_else(|exit| {
        report(&exit);
        ExitCode::from(exit.code())
    })
}

/// Print, in one line, the reason why the process ends.
#[allow(clippy::print_stderr, reason = "logs may not have started yet")]
fn report(exit: &Exit) {
    eprintln!("error: {}", exit.to_string().replace('\n', "; "));
}

impl Process {
    async fn start(args: CommonArgs, kind: Kind) -> Result<(Self, HealthService), Exit> {
        let since = Instant::now();
        logs::start(args.log_format, &args.log_level, kind.service.name(), args.replica_index)?;
        watchdog::start().map_err(|error| Exit::Again(format!("cannot start a thread: {error}")))?;
        let global = args.global()?;
        let job = args.job(&global)?;
        persia_wire::logs::name_run(&job);
        let (service, replica) = (kind.service.name(), args.replica_index);
        trace::start(trace::Process { service, replica, run_id: job.clone(), every: 0 })
            .map_err(|error| Exit::Usage(error.to_string()))?;
        let secret = args.secret()?;
        let tls = args.tls();
        let unusable = |error: persia_wire::tls::TlsError| Exit::Usage(error.to_string());
        let (server_tls, client_tls) = (tls.server().map_err(unusable)?, tls.client().map_err(unusable)?);
        let listen = args.listen(kind.port)?;
        let guard = Guard::new(secret.clone(), &listen).map_err(|error| Exit::Auth(error.to_string()))?;
        let listener =
            Listener::bind(&listen).await.map_err(|error| cannot_bind("PERSIA_LISTEN", &listen, &error))?;
        let discovery = match &args.nats_url {
            None => None,
            // persia-launcher sets a default address of NATS, which an infer job does not use.
            Some(_) if global.infer.is_some() => None,
            Some(url) => Some(connect(url, &job, secret.as_ref()).await?),
        };
        let (health, health_service) = Health::new(kind.grpc).await;
        let grace = Duration::from_secs(args.stop_grace);
        let host = Host { guard, tls: server_tls, grace, health: health.clone() };
        let ready = Arc::new(AtomicBool::new(false));
        let endpoint = listener.endpoint();
        tracing::info!(%endpoint, job, version = args::version(), pid = std::process::id(), "listening");
        Ok((
            Self {
                args,
                kind,
                job,
                global,
                secret,
                client_tls,
                discovery,
                ready,
                listener,
                host,
                health,
                since,
            },
            health_service,
        ))
    }

    /// Serve metrics. `refresh` sets gauges before each reading, and `waits_for` returns why the process does not serve
    /// yet. Returns the address; None if metrics are off.
    ///
    /// # Errors
    /// `Auth` if other hosts can reach the address and there is no token file; `Usage` for an address that
    /// cannot be used, such as one that is in use.
    pub async fn serve_metrics(
        &self,
        refresh: impl Fn() + Send + Sync + 'static,
        waits_for: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> Result<Option<Endpoint>, Exit> {
        let render =
            metrics::start().map_err(|error| Exit::Usage(format!("cannot start the metrics: {error}")))?;
        metrics::describe_process(self.kind.service.name(), self.args.replica_index);
        let upkeep = render.clone();
        tokio::spawn(async move {
            let mut interval = tokio::time::interval(UPKEEP_INTERVAL);
            loop {
                interval.tick().await;
                upkeep.run_upkeep();
            }
        });
        let enabled = self.global.enable_metrics;
        let Some(listen) = self.args.metrics_listen(METRICS_PORT, enabled)? else { return Ok(None) };
        if self.secret.is_none() && !listen.is_local() {
            return Err(Exit::Auth(format!(
                "PERSIA_METRICS_LISTEN: refusing to listen on {listen} without a token: any host on the network \
                 could connect; set PERSIA_TOKEN_FILE, or listen on 127.0.0.1"
            )));
        }
        let Endpoint::Tcp { host, port } = &listen else {
            return Err(Exit::Usage(format!(
                "PERSIA_METRICS_LISTEN={listen}: metrics are served over TCP only; set it to HOST:PORT or off"
            )));
        };
        let mut bound = TcpListener::bind((host.as_str(), *port)).await;
        if self.args.metrics_listen.is_none() && is_in_use(&bound) {
            bound = TcpListener::bind((host.as_str(), 0)).await; // another process of this host uses the default port
        }
        let bound = bound.and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
        let (port, listener) =
            bound.map_err(|error| cannot_bind("PERSIA_METRICS_LISTEN", &listen, &error))?;
        let page = metrics::Page {
            metrics: render,
            ready: Arc::clone(&self.ready),
            refresh: Arc::new(refresh),
            waits_for: Arc::new(waits_for),
        };
        tokio::spawn(metrics::serve(listener, page));
        let endpoint = Endpoint::Tcp { host: host.clone(), port };
        tracing::info!(%endpoint, "serving metrics");
        Ok(Some(endpoint))
    }

    /// The host to announce; None if it depends on NATS.
    fn fixed_host(&self) -> Result<Option<String>, Exit> {
        let interface = std::env::var("PERSIA_SOCKET_IFNAME").ok().filter(|name| !name.is_empty());
        let advertise = self.args.advertise.as_deref();
        if advertise.is_none() && interface.is_none() {
            return Ok(None);
        }
        let nats = self.args.nats_url.as_deref().unwrap_or_default();
        advertised_host(nats, advertise, interface.as_deref())
            .map(Some)
            .map_err(|error| Exit::Usage(format!("PERSIA_SOCKET_IFNAME: {error}")))
    }

    /// Announce the process to NATS, if configured, wait for `others`, and then report that the process
    /// serves. Dropping the result withdraws the announcement, and `/health` no longer reports that the
    /// process serves.
    ///
    /// # Errors
    /// `Usage` for a network interface that does not exist.
    pub fn announce(
        &self,
        metrics: Option<Endpoint>,
        others: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Announcing, Exit> {
        let host = self.fixed_host()?;
        let endpoint = self.listener.endpoint().clone();
        let announcement = Announcement {
            service: self.kind.service,
            index: self.args.replica_index,
            replicas: self.args.replica_size,
            address: None,
            metrics: None,
            more: BTreeMap::from([("build".to_owned(), args::BUILD.to_owned())]),
        };
        let (discovery, health, ready, since) =
            (self.discovery.clone(), self.health.clone(), Arc::clone(&self.ready), self.since);
        let task = tokio::spawn(async move {
            let _announced = match discovery {
                None => None,
                Some(discovery) => {
                    let mut host = host;
                    if host.is_none()
                        && [Some(&endpoint), metrics.as_ref()].into_iter().flatten().any(is_open)
                    {
                        host = Some(host_towards(discovery.url()).await);
                    }
                    let reached = |endpoint| reached_by(endpoint, host.as_deref());
                    let metrics = metrics.map(|endpoint| reached(endpoint).to_string());
                    let announcement =
                        Announcement { address: Some(reached(endpoint)), metrics, ..announcement };
                    announce(&discovery, announcement).await
                }
            };
            others.await;
            health.set(true).await;
            ready.store(true, Ordering::Relaxed);
            metrics::started(since);
            tracing::info!("ready");
            std::future::pending::<()>().await;
        });
        Ok(Announcing { task, ready: Arc::clone(&self.ready) })
    }

    /// The listener, and the options for [`serve`](crate::serve::serve).
    pub fn into_serving(self) -> (Listener, Host) {
        (self.listener, self.host)
    }
}

async fn announce(discovery: &Discovery, announcement: Announcement) -> Option<Announced> {
    // There is no timeout. Discovery logs once that it waits for NATS.
    let announced = match discovery.wait_connected(None).await {
        Ok(()) => discovery.announce(announcement).await,
        Err(error) => Err(error),
    };
    announced
        .map_err(|error| {
            tracing::error!(
                "cannot announce this process to NATS, so other processes do not find it: {error}"
            );
        })
        .ok()
}

/// The announcement of a process, and its report that it serves.
pub struct Announcing {
    task: tokio::task::JoinHandle<()>,
    ready: Arc<AtomicBool>,
}

impl Drop for Announcing {
    fn drop(&mut self) {
        self.ready.store(false, Ordering::Relaxed);
        self.task.abort();
    }
}

async fn connect(url: &str, job: &str, secret: Option<&Secret>) -> Result<Discovery, Exit> {
    let token = secret.map(|secret| secret.token(Role::Nats));
    let options = DiscoveryOptions { url: url.to_owned(), job: job.to_owned(), token };
    Discovery::connect(options).await.map_err(|error| Exit::Usage(error.to_string()))
}

/// Wait until NATS has refused the token for [`NATS_AUTH_TIMEOUT`] before the first connection. A later
/// refusal must not end the process, because a run that has found its servers no longer needs NATS.
async fn refused_by_nats(discovery: Option<Discovery>) -> Exit {
    let Some(discovery) = discovery else { return std::future::pending().await };
    let mut since = None;
    while !discovery.is_connected() {
        match discovery.last_error() {
            Some(error @ DiscoveryError::Refused { .. }) => {
                if since.get_or_insert_with(Instant::now).elapsed() >= NATS_AUTH_TIMEOUT {
                    return Exit::Auth(error.to_string());
                }
            }
            _ => since = None,
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    std::future::pending().await
}

/// Whether an endpoint is the wildcard address, which means all addresses of this host.
fn is_open(endpoint: &Endpoint) -> bool {
    let Endpoint::Tcp { host, .. } = endpoint else { return false };
    host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_unspecified())
}

/// Replace the host in `endpoint` by `host`, which other processes use, unless it is a Unix socket.
fn reached_by(endpoint: Endpoint, host: Option<&str>) -> Endpoint {
    match (endpoint, host) {
        (Endpoint::Tcp { port, .. }, Some(host)) => Endpoint::Tcp { host: host.to_owned(), port },
        (endpoint, _) => endpoint,
    }
}

/// The address from which this host reaches NATS. Waits until the host name of NATS can be resolved.
async fn host_towards(url: &str) -> String {
    let mut failures = 0;
    loop {
        let nats = url.to_owned();
        let found = tokio::task::spawn_blocking(move || advertised_host(&nats, None, None)).await;
        match found {
            Ok(Ok(host)) => return host,
            Ok(Err(error)) if failures == 0 => tracing::warn!("waiting for NATS: {error}"),
            Ok(Err(_)) => {}
            Err(error) => tracing::error!(%error, "cannot determine the address of this host"),
        }
        failures += 1;
        tokio::time::sleep(pause(failures)).await;
    }
}

fn is_in_use(bound: &io::Result<TcpListener>) -> bool {
    bound.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

fn cannot_bind(variable: &str, endpoint: &Endpoint, error: &io::Error) -> Exit {
    let is_socket = matches!(endpoint, Endpoint::Unix(_));
    let why = match error.kind() {
        // A file that is not a socket is not replaced.
        io::ErrorKind::AddrInUse if is_socket => format!(
            "a process listens there, or the file is not a socket; stop the process, or set {variable} to another \
             address"
        ),
        io::ErrorKind::AddrInUse => {
            format!(
                "the address is in use; stop the process that listens there, or set {variable} to another address"
            )
        }
        io::ErrorKind::PermissionDenied if is_socket => {
            format!("{error}; the folder of the socket must be writable")
        }
        io::ErrorKind::PermissionDenied => format!("{error}; ports below 1024 need privileges"),
        _ => error.to_string(),
    };
    Exit::Usage(format!("cannot listen on {endpoint}: {why}"))
}

/// Counts the SIGTERM and SIGINT signals received.
#[derive(Debug, Clone)]
pub struct StopSignals {
    count: watch::Receiver<u32>,
}

impl StopSignals {
    /// Wait until this many signals have arrived.
    pub fn reached(&self, count: u32) -> impl Future<Output = ()> + Send + use<> {
        let mut arrived = self.count.clone();
        async move {
            if arrived.wait_for(|arrived| *arrived >= count).await.is_err() {
                // The sender lives as long as the process.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Start to count SIGTERM and SIGINT. Requires a running tokio runtime.
///
/// # Errors
/// `Again` if signals cannot be handled.
pub fn stop_signals() -> Result<StopSignals, Exit> {
    let failed = |error: io::Error| Exit::Again(format!("cannot handle signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let (arrived, count) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => tracing::info!("received SIGTERM"),
                _ = interrupt.recv() => tracing::info!("received SIGINT"),
            }
            arrived.send_modify(|count| *count += 1);
        }
    });
    Ok(StopSignals { count })
}
