//! [`Tracked`]: a connection that is counted as long as it is open.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tonic::transport::server;

use crate::metrics;

/// Makes a note for every connection.
pub(crate) struct Notes(mpsc::Sender<()>);

/// Knows when all connections are closed.
pub(crate) struct Open(mpsc::Receiver<()>);

/// Two halves: one makes notes, the other waits for the end of all.
pub(crate) fn track() -> (Notes, Open) {
    let (held, all) = mpsc::channel(1);
    (Notes(held), Open(all))
}

impl Notes {
    /// A note that belongs to one connection.
    pub(crate) fn note(&self) -> Note {
        Note { _held: self.0.clone(), _counted: metrics::Connected::count() }
    }
}

impl Open {
    /// Wait until [`Notes`] and every note are gone.
    pub(crate) async fn all_closed(mut self) {
        // Nothing is ever sent: this ends when the last sender goes.
        self.0.recv().await;
    }
}

/// Lives as long as its connection.
pub(crate) struct Note {
    _held: mpsc::Sender<()>,
    _counted: metrics::Connected,
}

/// See the module's documentation.
pub(crate) struct Tracked<S> {
    stream: S,
    _note: Note,
}

impl<S> Tracked<S> {
    pub(crate) fn new(stream: S, note: Note) -> Self {
        Self { stream, _note: note }
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
