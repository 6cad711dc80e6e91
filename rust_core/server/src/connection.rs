//! [`Tracked`]: a connection that holds a token while it is open.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tonic::transport::server;

use crate::metrics;

/// Issues a token for each connection.
pub(crate) struct Tracker(mpsc::Sender<()>);

/// Waits until all connections are closed.
pub(crate) struct OpenConnections(mpsc::Receiver<()>);

/// Create a tracker, and a handle that waits until its connections are closed.
pub(crate) fn track() -> (Tracker, OpenConnections) {
    let (open, closed) = mpsc::channel(1);
    (Tracker(open), OpenConnections(closed))
}

impl Tracker {
    /// Issue the token of one connection.
    pub(crate) fn token(&self) -> ConnectionToken {
        ConnectionToken { _open: self.0.clone(), _counted: metrics::Connected::count() }
    }
}

impl OpenConnections {
    /// Wait until the [`Tracker`] and all tokens are dropped.
    pub(crate) async fn all_closed(mut self) {
        // Nothing is sent: this returns when the last sender is dropped.
        self.0.recv().await;
    }
}

/// A token that lives as long as its connection.
pub(crate) struct ConnectionToken {
    _open: mpsc::Sender<()>,
    _counted: metrics::Connected,
}

/// A connection with its token.
pub(crate) struct Tracked<S> {
    stream: S,
    _token: ConnectionToken,
}

impl<S> Tracked<S> {
    pub(crate) fn new(stream: S, token: ConnectionToken) -> Self {
        Self { stream, _token: token }
    }
}

impl<S: server::Connected> server::Connected for Tracked<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Tracked<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Tracked<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
