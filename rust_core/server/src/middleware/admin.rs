//! Administrative requests and statistics, which concern all servers.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use persia_types::TablesError;
use persia_types::tables::Snapshot;
use persia_wire::auth::{Role, require};
use persia_wire::error::{describe, to_status};
use persia_wire::proto;
use persia_wire::rpc::Unary;
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Status};

use super::{MiddlewareService, ServerClient, deadline, error_of, late, named};
use crate::service::check_version;

/// The timeout of a snapshot or restore whose caller sets none.
const LONG: Duration = Duration::from_secs(3600);
/// The timeout of statistics.
const STATS_TIMEOUT: Duration = Duration::from_secs(4);

/// Call every server. If several servers fail, the error of the first one in the list is returned.
async fn everywhere<R: Unary + Clone>(
    servers: &[Arc<ServerClient>],
    deadline: Instant,
    request: &R,
) -> Result<Vec<R::Reply>, Status> {
    let calls = servers.iter().map(|server| async move {
        let mut rpc = server.admin();
        match timeout_at(deadline, rpc.unary(Request::new(request.clone()))).await {
            Ok(reply) => reply.map_err(|status| named(server, &status)),
            Err(_) => Err(to_status(&late(server, &format!("{} request", R::NAME)))),
        }
    });
    // Wait for all calls, even after an error, so that no call outlives the request.
    join_all(calls).await.into_iter().collect()
}

/// Let every server check a request before the first server executes it. With `check_only`, no server executes the
/// request. A single server is not asked to check it first, because it checks the request when it executes it.
async fn check_everywhere_first<R: Unary + Clone>(
    servers: &[Arc<ServerClient>],
    deadline: Instant,
    check_only: bool,
    request: impl Fn(bool) -> R,
) -> Result<(), Status> {
    if servers.len() > 1 || check_only {
        everywhere(servers, deadline, &request(true)).await?;
    }
    if !check_only {
        everywhere(servers, deadline, &request(false)).await?;
    }
    Ok(())
}

/// Check that the server at `index` in a list of `count` servers is configured with this index and this number of
/// servers. Returns its response.
fn check_place(
    server: &ServerClient,
    index: usize,
    count: usize,
    reply: proto::StatsReply,
) -> Result<Vec<proto::ServerStats>, Status> {
    let own = reply.answered.first().map_or(index, |answer| answer.server as usize);
    if (own, reply.servers as usize) == (index, count) {
        return Ok(reply.answered);
    }
    let what = format!(
        "it is server {own} of {}, but --servers or infer_config.servers of the middleware lists it as server {index} \
         of {count}; list all servers, in the order of their REPLICA_INDEX",
        reply.servers
    );
    Err(to_status(&TablesError::Incompatible { peer: server.peer.clone(), what }))
}

impl MiddlewareService {
    async fn all_servers<R: Unary>(
        &self,
        request: &Request<R>,
        timeout: Duration,
    ) -> Result<(Vec<Arc<ServerClient>>, Instant), Status> {
        require(request.extensions(), R::METHOD, &[Role::Admin])?;
        let deadline = deadline(request.metadata(), timeout);
        Ok((self.servers.all().await.map_err(|error| to_status(&error))?, deadline))
    }

    /// Forward a request whose reply is empty to every server.
    pub(super) async fn forward<R: Unary + Clone>(&self, request: Request<R>) -> Result<R::Reply, Status> {
        let (servers, deadline) = self.all_servers(&request, self.timeout).await?;
        everywhere(&servers, deadline, &request.into_inner()).await?;
        Ok(R::Reply::default())
    }

    pub(super) async fn serve_begin(
        &self,
        request: Request<proto::BeginRequest>,
    ) -> Result<proto::BeginReply, Status> {
        let (servers, deadline) = self.all_servers(&request, self.timeout).await?;
        let request = request.into_inner();
        check_version(&self.peer, &request)?;
        let begin = |check_only| proto::BeginRequest { check_only, ..request.clone() };
        check_everywhere_first(&servers, deadline, request.check_only, begin).await?;
        Ok(proto::BeginReply {})
    }

    pub(super) async fn serve_write_snapshot(
        &self,
        request: Request<proto::WriteSnapshotRequest>,
    ) -> Result<proto::WriteSnapshotReply, Status> {
        let (servers, deadline) = self.all_servers(&request, LONG).await?;
        let mut whole = Snapshot::default();
        for part in everywhere(&servers, deadline, &request.into_inner()).await? {
            let part = Snapshot::from(part);
            whole.files.extend(part.files);
            whole.rows.resize(whole.rows.len().max(part.rows.len()), 0);
            whole.rows.iter_mut().zip(part.rows).for_each(|(sum, rows)| *sum += rows);
        }
        Ok(whole.into())
    }

    pub(super) async fn serve_restore(
        &self,
        request: Request<proto::RestoreRequest>,
    ) -> Result<proto::RestoreReply, Status> {
        let (servers, deadline) = self.all_servers(&request, LONG).await?;
        let request = request.into_inner();
        let restore = |check_only| proto::RestoreRequest { check_only, ..request.clone() };
        check_everywhere_first(&servers, deadline, request.check_only, restore).await?;
        Ok(proto::RestoreReply {})
    }

    /// Return the statistics of the servers that respond.
    ///
    /// # Errors
    /// A server refuses the credentials, or is recovering. A listed server is configured with an index that is not its
    /// position in the list, or with another number of servers.
    pub(super) async fn serve_stats(
        &self,
        request: Request<proto::StatsRequest>,
    ) -> Result<proto::StatsReply, Status> {
        let deadline = deadline(request.metadata(), STATS_TIMEOUT).min(Instant::now() + STATS_TIMEOUT);
        let mut known = self.servers.known();
        if known.is_empty() {
            let found = self.servers.all().await.map_err(|error| to_status(&error))?;
            known = found.into_iter().map(Some).collect();
        }
        let (listed, count) = (self.servers.is_listed(), known.len());
        let found = known.iter().enumerate().filter_map(|(index, server)| Some((index, server.as_ref()?)));
        let calls = found.map(|(index, server)| async move {
            match timeout_at(deadline, server.data().unary(Request::new(proto::StatsRequest {}))).await {
                Ok(Ok(reply)) if listed => check_place(server, index, count, reply),
                Ok(Ok(reply)) => Ok(reply.answered),
                // Wrong credentials are not a temporary failure.
                Ok(Err(status)) if status.code() == tonic::Code::Unauthenticated => {
                    Err(named(server, &status))
                }
                // The caller waits for a server that recovers from its log.
                Ok(Err(status)) if matches!(error_of(server, &status), TablesError::Recovering { .. }) => {
                    Err(named(server, &status))
                }
                Ok(Err(status)) => {
                    tracing::warn!("cannot read the statistics of {}: {}", server.peer, describe(&status));
                    Ok(Vec::new())
                }
                Err(_) => {
                    tracing::warn!("{}", late(server, "request for statistics"));
                    Ok(Vec::new())
                }
            }
        });
        let answered: Vec<_> = try_join_all(calls).await?.into_iter().flatten().collect();
        if answered.len() < known.len() {
            self.servers.refresh();
        }
        Ok(proto::StatsReply { servers: known.len() as u32, answered })
    }
}
