//! An embedding server; see [`persia_server`].

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use persia_server::args::ServerArgs;
use persia_server::exit::Exit;
use persia_server::metrics;
use persia_server::node::{CheckpointRoot, EpochFile, Node, NodeOptions};
use persia_server::process::{self, Kind, Process};
use persia_server::serve::{HealthService, serve};
use persia_server::service::EmbeddingService;
use persia_wire::bounded;
use persia_wire::discovery::Service;
use persia_wire::proto::embedding_server_server::EmbeddingServerServer;

const KIND: Kind = Kind { service: Service::Server, grpc: "persia.v1.EmbeddingServer", port: 8888 };

fn main() -> ExitCode {
    process::run(KIND, |args: &ServerArgs| &args.common, run)
}

async fn run(process: Process, health: HealthService, args: ServerArgs) -> Result<(), Exit> {
    let stop = process::told_to_stop()?;
    let options = NodeOptions {
        job: process.job.clone(),
        index: args.common.replica_index,
        servers: args.common.replica_size,
        schema: args.common.embedding()?.schema,
        capacity: process.global.capacity,
        snapshot_threads: process.global.checkpoint_workers,
        checkpoints: CheckpointRoot::new(args.checkpoint_root),
        // Less than a middleware leaves of one try of a trainer, so that it hears who is missing.
        turn_timeout: Duration::from_secs(args.common.rpc_timeout) / 6,
        address: process.listener.endpoint().to_string(),
    };
    let epoch = EpochFile::open(args.data_dir.as_deref())?;
    let node = Node::new(options, epoch).map_err(|error| Exit::Usage(error.to_string()))?;
    let node = Arc::new(node);
    let gauges = Arc::clone(&node);
    let metrics = process.serve_metrics(move || metrics::set_gauges(&gauges)).await?;
    let announced = process.announce(metrics, std::future::ready(()))?;
    let (listener, host) = process.into_serving();
    let service = bounded!(EmbeddingServerServer::new(EmbeddingService::new(node)));
    let (first, second) = (stop.told(1), stop.told(2));
    let stop = async move {
        first.await;
        drop(announced);
    };
    serve(listener, service, host, health, stop, second).await
}
