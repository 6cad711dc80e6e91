//! The binary of middlewares. [`persia_server`] is its library.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use persia_server::args::MiddlewareArgs;
use persia_server::exit::Exit;
use persia_server::kind::Kind;
use persia_server::middleware::{Link, MiddlewareService, ServerPool};
use persia_server::process::{self, Process};
use persia_server::serve::{HealthService, serve};
use persia_wire::bounded;
use persia_wire::discovery::Service;
use persia_wire::proto::middleware_server::MiddlewareServer;

const KIND: Kind = Kind { service: Service::Middleware, grpc: "persia.v1.Middleware", port: 7777 };

fn main() -> ExitCode {
    process::run(KIND, |args: &MiddlewareArgs| &args.common, run)
}

async fn run(process: Process, health: HealthService, args: MiddlewareArgs) -> Result<(), Exit> {
    let signals = process::stop_signals()?;
    let link = Link { secret: process.secret.clone(), tls: process.client_tls.clone() };
    let listed = args.server_list(&process.global)?;
    let servers = match (&process.discovery, listed.as_slice()) {
        (None, []) => {
            return Err(Exit::Usage(
                "no servers are configured: set PERSIA_NATS_URL to the address of NATS, through which they are found"
                    .into(),
            ));
        }
        (Some(discovery), []) => ServerPool::discovered(discovery.clone(), link),
        (_, endpoints) => ServerPool::fixed(endpoints, &link)?,
    };
    let servers = Arc::new(servers);
    let metrics = process.serve_metrics(|| {}, || None).await?;
    let found = Arc::clone(&servers);
    let announced = process.announce(metrics, async move { found.found().await })?;
    let peer = format!("middleware {} at {}", args.common.replica_index, process.listener.endpoint());
    let timeout = Duration::from_secs(args.common.rpc_timeout);
    let (listener, host) = process.into_serving();
    let service = bounded!(MiddlewareServer::new(MiddlewareService::new(servers, timeout, peer)));
    let (first, second) = (signals.reached(1), signals.reached(2));
    let stop = async move {
        first.await;
        drop(announced);
    };
    serve(listener, service, host, health, stop, second).await
}
