//! The binary of embedding servers. [`persia_server`] is its library.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use persia_server::args::ServerArgs;
use persia_server::exit::Exit;
use persia_server::kind::Kind;
use persia_server::metrics;
use persia_server::node::{
    CheckpointRoot, GenerationFile, LogOptions, Node, NodeOptions, ServableCheckpoint, checkpoint_dir,
};
use persia_server::process::{self, Process};
use persia_server::serve::{HealthService, serve};
use persia_server::service::{EmbeddingService, StartingNode};
use persia_store::default_request_threads;
use persia_types::config::LogSync;
use persia_wire::bounded;
use persia_wire::discovery::Service;
use persia_wire::proto::embedding_server_server::EmbeddingServerServer;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

const KIND: Kind = Kind { service: Service::Server, grpc: "persia.v1.EmbeddingServer", port: 8888 };

fn main() -> ExitCode {
    process::run(KIND, |args: &ServerArgs| &args.common, run)
}

/// The name of the log's directory, below the data directory. The name is that of the first version, for
/// compatibility.
const LOG_DIR: &str = "journal";

/// The options of the log; None without `durability: log`.
fn log_options(sync: Option<LogSync>, data_dir: Option<&Path>) -> Result<Option<LogOptions>, Exit> {
    match (sync, data_dir) {
        (None, _) => Ok(None),
        (Some(sync), Some(dir)) => Ok(Some(LogOptions { dir: dir.join(LOG_DIR), sync })),
        (Some(_), None) => Err(Exit::Usage(
            "durability: log needs a folder that outlives this process: set PERSIA_DATA_DIR".into(),
        )),
    }
}

/// The interval between log lines while the node recovers.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The source of a server's rows when it starts.
enum Rows {
    /// The rows come from the log, if there is one.
    Log(GenerationFile),
    /// The rows come from the checkpoint that an infer job serves.
    Checkpoint(Box<ServableCheckpoint>),
}

/// Recover from the log or load the checkpoint on another thread, because this may take long.
async fn resume(starting: &Arc<StartingNode>, options: NodeOptions, rows: Rows) -> Result<(), Exit> {
    let of_thread = Arc::clone(starting);
    let mut resuming = spawn_blocking(move || match rows {
        Rows::Log(generation) => Node::recovering(options, generation, of_thread.progress()),
        Rows::Checkpoint(checkpoint) => Node::serving(options, &checkpoint, of_thread.progress()),
    });
    loop {
        if let Ok(resumed) = timeout(REPORT_INTERVAL, &mut resuming).await {
            let node =
                resumed.map_err(|error| Exit::Again(format!("cannot start the server: {error}")))??;
            starting.resumed(Arc::new(node));
            return Ok(());
        }
        if let Err(error) = starting.node() {
            tracing::info!("{error}");
        }
    }
}

async fn run(process: Process, health: HealthService, args: ServerArgs) -> Result<(), Exit> {
    let signals = process::stop_signals()?;
    let (schema, rows) = match &process.global.infer {
        None => (args.common.embedding()?.schema, Rows::Log(GenerationFile::open(args.data_dir.as_deref())?)),
        Some(infer) => {
            let dir = checkpoint_dir(infer.checkpoint.as_deref())?;
            let configured = args.common.embedding_if_given()?.map(|config| config.schema);
            let dir = dir.to_owned();
            // Opening may wait for an object store.
            let opened = spawn_blocking(move || ServableCheckpoint::open(&dir, configured)).await;
            let checkpoint =
                opened.map_err(|error| Exit::Again(format!("cannot open the checkpoint: {error}")))??;
            (checkpoint.schema().clone(), Rows::Checkpoint(Box::new(checkpoint)))
        }
    };
    let options = NodeOptions {
        job: process.job.clone(),
        index: args.common.replica_index,
        servers: args.common.replica_size,
        schema,
        capacity: process.global.capacity,
        request_threads: process.global.request_threads.unwrap_or_else(default_request_threads),
        snapshot_threads: process.global.checkpoint_workers,
        max_copy_bytes: process.global.max_copy_bytes.unwrap_or(u64::MAX),
        checkpoints: CheckpointRoot::new(args.checkpoint_root),
        // A wait for a turn times out before the rank's attempt through a middleware does. The rank's error therefore
        // names the missing ranks.
        turn_timeout: Duration::from_secs(args.common.rpc_timeout) / 6,
        address: process.listener.endpoint().to_string(),
        log: log_options(process.global.log, args.data_dir.as_deref())?,
    };
    // The service starts before the node has recovered, so that callers wait for the node.
    let starting = Arc::new(StartingNode::new(&options));
    let (gauges, state) = (Arc::clone(&starting), Arc::clone(&starting));
    let waits_for = move || state.node().err().map(|error| error.to_string());
    let metrics = process.serve_metrics(move || metrics::set_gauges(&gauges), waits_for).await?;
    let (resumed, has_resumed) = oneshot::channel();
    let announced = process.announce(metrics, async move { drop(has_resumed.await) })?;
    let (listener, host) = process.into_serving();
    let service = bounded!(EmbeddingServerServer::new(EmbeddingService::starting(Arc::clone(&starting))));
    let (first, second) = (signals.reached(1), signals.reached(2));
    let stop = async move {
        first.await;
        drop(announced);
    };
    let mut serving = std::pin::pin!(serve(listener, service, host, health, stop, second));
    tokio::select! {
        ended = &mut serving => return ended,
        result = resume(&starting, options, rows) => result?,
    }
    let _ = resumed.send(()); // after a stop, nothing waits for the result
    serving.await
}
