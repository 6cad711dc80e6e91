//! [`Rpc`]: calls the methods that both embedding servers and middlewares have.

use futures_util::Stream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::auth::Credentials;
use crate::discovery::Service;
use crate::error::{describe, with_causes};
use crate::proto;
use crate::settings::MAX_MESSAGE_BYTES;

/// The request of a method without streams.
pub trait Unary: prost::Message + 'static {
    /// The method's name in both services, such as "PrepareSnapshot".
    const METHOD: &'static str;
    /// The method's name in metrics and messages, such as "prepare_snapshot".
    const NAME: &'static str;
    /// The reply of the method.
    type Reply: prost::Message + Default + 'static;
}

macro_rules! unary {
    ($($name:literal $method:literal: $request:ident -> $reply:ident),+ $(,)?) => {
        $(impl Unary for proto::$request {
            const METHOD: &'static str = $method;
            const NAME: &'static str = $name;
            type Reply = proto::$reply;
        })+
    };
}

unary! {
    "begin" "Begin": BeginRequest -> BeginReply,
    "prepare_snapshot" "PrepareSnapshot": PrepareSnapshotRequest -> PrepareSnapshotReply,
    "abort_snapshot" "AbortSnapshot": AbortSnapshotRequest -> AbortSnapshotReply,
    "write_snapshot" "WriteSnapshot": WriteSnapshotRequest -> WriteSnapshotReply,
    "commit_snapshot" "CommitSnapshot": CommitSnapshotRequest -> CommitSnapshotReply,
    "restore" "Restore": RestoreRequest -> RestoreReply,
    "stats" "Stats": StatsRequest -> StatsReply,
    "clear" "Clear": ClearRequest -> ClearReply,
}

/// Calls one peer, a server or a middleware. Messages are limited to [`MAX_MESSAGE_BYTES`].
#[derive(Debug, Clone)]
pub struct Rpc {
    service: &'static str,
    grpc: Grpc<InterceptedService<Channel, Credentials>>,
}

impl Rpc {
    /// Create a client for the middleware or, with [`Service::Server`], for the server at the other end of
    /// `channel`.
    pub fn new(service: Service, channel: Channel, credentials: Credentials) -> Self {
        let service = match service {
            Service::Server => proto::embedding_server_server::SERVICE_NAME,
            _ => proto::middleware_server::SERVICE_NAME,
        };
        let grpc = Grpc::new(InterceptedService::new(channel, credentials))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Self { service, grpc }
    }

    /// Call the method of `request`.
    ///
    /// # Errors
    /// The status that the peer returns, or one that says why the call failed.
    pub async fn unary<R: Unary>(&mut self, request: Request<R>) -> Result<R::Reply, Status> {
        let path = self.ready(R::METHOD).await?;
        let reply = self.grpc.unary(request, path.clone(), ProstCodec::default()).await;
        reply.map(Response::into_inner).map_err(|status| named(&path, status))
    }

    /// Look up rows.
    ///
    /// # Errors
    /// Those of [`Self::unary`].
    pub async fn lookup(
        &mut self,
        request: Request<impl Stream<Item = proto::LookupRequest> + Send + 'static>,
    ) -> Result<Streaming<proto::LookupReply>, Status> {
        let path = self.ready("Lookup").await?;
        let replies = self.grpc.streaming(request, path.clone(), ProstCodec::default()).await;
        replies.map(Response::into_inner).map_err(|status| named(&path, status))
    }

    /// Push gradients.
    ///
    /// # Errors
    /// Those of [`Self::unary`].
    pub async fn push(
        &mut self,
        request: Request<impl Stream<Item = proto::PushRequest> + Send + 'static>,
    ) -> Result<proto::PushReply, Status> {
        let path = self.ready("Push").await?;
        let reply = self.grpc.client_streaming(request, path.clone(), ProstCodec::default()).await;
        reply.map(Response::into_inner).map_err(|status| named(&path, status))
    }

    /// Wait until the channel accepts a request for `method`.
    async fn ready(&mut self, method: &str) -> Result<PathAndQuery, Status> {
        let unknown = |error: &dyn std::error::Error| {
            Status::unknown(format!("cannot connect: {}", with_causes(error)))
        };
        self.grpc.ready().await.map_err(|error| unknown(&error))?;
        PathAndQuery::from_maybe_shared(format!("/{}/{method}", self.service))
            .map_err(|error| unknown(&error))
    }
}

/// Add the method's name to the status of a peer that does not have the method, because the status does not name it.
fn named(path: &PathAndQuery, status: Status) -> Status {
    if status.code() != Code::Unimplemented {
        return status;
    }
    Status::unimplemented(format!("{} ({})", path.path().trim_start_matches('/'), describe(&status)))
}
