//! An embedding server; see [`persia_server`].

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use persia_server::args::ServerArgs;
use persia_server::exit::Exit;
use persia_server::kind::Kind;
use persia_server::metrics;
use persia_server::node::{CheckpointRoot, GenerationFile, LogOptions, Node, NodeOptions};
use persia_server::process::{self, Process};
use persia_server::serve::{HealthService, serve};
use persia_server::service::EmbeddingService;
use persia_types::config::LogSync;
use persia_wire::bounded;
use persia_wire::discovery::Service;
use persia_wire::proto::embedding_server_server::EmbeddingServerServer;

const KIND: Kind = Kind { service: Service::Server, grpc: "persia.v1.EmbeddingServer", port: 8888 };

fn main() -> ExitCode {
    process::run(KIND, |args: &ServerArgs| &args.common, run)
}

/// The directory of the log below the data directory; the name of the first version.
const LOG_DIR: &str = "journal";

/// The directory of the log, with `durability: log`.
fn log_options(sync: Option<LogSync>, data_dir: Option<&Path>) -> Result<Option<LogOptions>, Exit> {
    match (sync, data_dir) {
        (None, _) => Ok(None),
        (Some(sync), Some(dir)) => Ok(Some(LogOptions { dir: dir.join(LOG_DIR), sync })),
        (Some(_), None) => Err(Exit::Usage(
            "durability: log needs a directory that outlives this process: set PERSIA_DATA_DIR".into(),
        )),
    }
}

async fn run(process: Process, health: HealthService, args: ServerArgs) -> Result<(), Exit> {
    let signals = process::stop_signals()?;
    let options = NodeOptions {
        job: process.job.clone(),
        index: args.common.replica_index,
        servers: args.common.replica_size,
        schema: args.common.embedding()?.schema,
        capacity: process.global.capacity,
        snapshot_threads: process.global.checkpoint_workers,
        max_copy_bytes: process.global.max_copy_bytes.unwrap_or(u64::MAX),
        checkpoints: CheckpointRoot::new(args.checkpoint_root),
        // Less than one attempt of a trainer through a middleware, so that the trainer gets the names of missing ranks.
        turn_timeout: Duration::from_secs(args.common.rpc_timeout) / 6,
        address: process.listener.endpoint().to_string(),
        log: log_options(process.global.log, args.data_dir.as_deref())?,
    };
    let generation = GenerationFile::open(args.data_dir.as_deref())?;
    // It may replay a long log.
    let node = tokio::task::spawn_blocking(|| Node::new(options, generation)).await;
    let node = Arc::new(node.map_err(|error| Exit::Again(format!("the start failed: {error}")))??);
    let gauges = Arc::clone(&node);
    let metrics = process.serve_metrics(move || metrics::set_gauges(&gauges)).await?;
    let announced = process.announce(metrics, std::future::ready(()))?;
    let (listener, host) = process.into_serving();
    let service = bounded!(EmbeddingServerServer::new(EmbeddingService::new(node)));
    let (first, second) = (signals.reached(1), signals.reached(2));
    let stop = async move {
        first.await;
        drop(announced);
    };
    serve(listener, service, host, health, stop, second).await
}
