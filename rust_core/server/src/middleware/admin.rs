//! Administrative requests and statistics, on all servers at once.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use persia_types::TablesError;
use persia_types::tables::Snapshot;
use persia_wire::auth::{Role, require};
use persia_wire::error::to_status;
use persia_wire::proto;
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Response, Status};

use super::{Client, MiddlewareService, ServerClient, deadline, late, named};
use crate::service::check_version;

/// The timeout of a snapshot or a restore whose caller sets none.
const LONG: Duration = Duration::from_secs(3600);
/// The timeout of statistics.
const STATS_TIMEOUT: Duration = Duration::from_secs(4);

/// Call every server. Of several errors, that of the first server is returned.
async fn everywhere<T, F>(
    servers: &[Arc<ServerClient>],
    what: &str,
    deadline: Instant,
    call: impl Fn(Client) -> F,
) -> Result<Vec<T>, Status>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let call = &call;
    let calls = servers.iter().map(|server| async move {
        let mut attempt = std::pin::pin!(call(server.admin()));
        match timeout_at(deadline, &mut attempt).await {
            Ok(reply) => reply.map(Response::into_inner).map_err(|status| named(server, &status)),
            Err(_) => Err(to_status(&late(server, what))),
        }
    });
    // Waits for all of them, even after an error: no call outlives the request.
    join_all(calls).await.into_iter().collect()
}

impl MiddlewareService {
    async fn all_servers<T>(
        &self,
        request: &Request<T>,
        verb: &str,
        timeout: Duration,
    ) -> Result<(Vec<Arc<ServerClient>>, Instant), Status> {
        require(request.extensions(), verb, &[Role::Admin])?;
        let deadline = deadline(request.metadata(), timeout);
        Ok((self.servers.all().await.map_err(|error| to_status(&error))?, deadline))
    }

    /// Every server checks the run before the first one begins it.
    pub(super) async fn serve_begin(
        &self,
        request: Request<proto::BeginRequest>,
    ) -> Result<proto::BeginReply, Status> {
        let (servers, deadline) = self.all_servers(&request, "Begin", self.timeout).await?;
        let request = request.into_inner();
        check_version(&self.peer, &request)?;
        let begin = |check_only| {
            let request = proto::BeginRequest { check_only, ..request.clone() };
            everywhere(&servers, "begin", deadline, move |mut client| {
                let request = request.clone();
                async move { client.begin(request).await }
            })
        };
        if servers.len() > 1 || request.check_only {
            begin(true).await?;
        }
        if !request.check_only {
            begin(false).await?;
        }
        Ok(proto::BeginReply {})
    }

    pub(super) async fn serve_prepare_snapshot(
        &self,
        request: Request<proto::PrepareSnapshotRequest>,
    ) -> Result<proto::PrepareSnapshotReply, Status> {
        let (servers, deadline) = self.all_servers(&request, "PrepareSnapshot", self.timeout).await?;
        let request = request.into_inner();
        everywhere(&servers, "prepare_snapshot", deadline, |mut client| async move {
            client.prepare_snapshot(request).await
        })
        .await?;
        Ok(proto::PrepareSnapshotReply {})
    }

    pub(super) async fn serve_abort_snapshot(
        &self,
        request: Request<proto::AbortSnapshotRequest>,
    ) -> Result<proto::AbortSnapshotReply, Status> {
        let (servers, deadline) = self.all_servers(&request, "AbortSnapshot", self.timeout).await?;
        let request = request.into_inner();
        let abort = |mut client: Client| async move { client.abort_snapshot(request).await };
        everywhere(&servers, "abort_snapshot", deadline, abort).await?;
        Ok(proto::AbortSnapshotReply {})
    }

    pub(super) async fn serve_write_snapshot(
        &self,
        request: Request<proto::WriteSnapshotRequest>,
    ) -> Result<proto::WriteSnapshotReply, Status> {
        let (servers, deadline) = self.all_servers(&request, "WriteSnapshot", LONG).await?;
        let request = request.into_inner();
        let parts = everywhere(&servers, "write_snapshot", deadline, |mut client| {
            let request = request.clone();
            async move { client.write_snapshot(request).await }
        })
        .await?;
        let mut whole = Snapshot::default();
        for part in parts {
            let part = Snapshot::from(part);
            whole.files.extend(part.files);
            whole.rows.resize(whole.rows.len().max(part.rows.len()), 0);
            whole.rows.iter_mut().zip(part.rows).for_each(|(sum, rows)| *sum += rows);
        }
        Ok(whole.into())
    }

    pub(super) async fn serve_commit_snapshot(
        &self,
        request: Request<proto::CommitSnapshotRequest>,
    ) -> Result<proto::CommitSnapshotReply, Status> {
        let (servers, deadline) = self.all_servers(&request, "CommitSnapshot", self.timeout).await?;
        let request = request.into_inner();
        everywhere(&servers, "commit_snapshot", deadline, |mut client| {
            let request = request.clone();
            async move { client.commit_snapshot(request).await }
        })
        .await?;
        Ok(proto::CommitSnapshotReply {})
    }

    /// Every server reads and checks its files before the first one replaces its rows.
    pub(super) async fn serve_restore(
        &self,
        request: Request<proto::RestoreRequest>,
    ) -> Result<proto::RestoreReply, Status> {
        let (servers, deadline) = self.all_servers(&request, "Restore", LONG).await?;
        let request = request.into_inner();
        let restore = |check_only| {
            let request = proto::RestoreRequest { check_only, ..request.clone() };
            everywhere(&servers, "restore", deadline, move |mut client| {
                let request = request.clone();
                async move { client.restore(request).await }
            })
        };
        if servers.len() > 1 || request.check_only {
            restore(true).await?;
        }
        if !request.check_only {
            restore(false).await?;
        }
        Ok(proto::RestoreReply {})
    }

    pub(super) async fn serve_clear(
        &self,
        request: Request<proto::ClearRequest>,
    ) -> Result<proto::ClearReply, Status> {
        let (servers, deadline) = self.all_servers(&request, "Clear", self.timeout).await?;
        let request = request.into_inner();
        let clear = |mut client: Client| async move { client.clear(request).await };
        everywhere(&servers, "clear", deadline, clear).await?;
        Ok(proto::ClearReply {})
    }

    /// Statistics of the servers that answer.
    pub(super) async fn serve_stats(
        &self,
        request: Request<proto::StatsRequest>,
    ) -> Result<proto::StatsReply, Status> {
        let deadline = deadline(request.metadata(), STATS_TIMEOUT).min(Instant::now() + STATS_TIMEOUT);
        let known = self.servers.known();
        if known.is_empty() {
            let error = self.servers.all().await.err().unwrap_or(TablesError::Unreachable {
                peer: self.peer.clone(),
                what: "its servers have only now been found".into(),
            });
            return Err(to_status(&error));
        }
        let calls = known.iter().flatten().map(|server| async move {
            match timeout_at(deadline, server.data().stats(proto::StatsRequest {})).await {
                Ok(Ok(reply)) => Ok(reply.into_inner().answered),
                // Wrong credentials are not a temporary failure.
                Ok(Err(status)) if status.code() == tonic::Code::Unauthenticated => {
                    Err(named(server, &status))
                }
                Ok(Err(status)) => {
                    tracing::warn!("{}: {}", server.peer, status.message());
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
