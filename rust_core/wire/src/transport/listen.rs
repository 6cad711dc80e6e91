//! [`Listener`]: accepts a limited number of connections, and closes those that stay silent or
//! unauthenticated.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::Stream;
use persia_types::limits::MAX_CONNECTIONS;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::either::Either;
use tonic::transport::server::Connected;

use crate::peer::{AUTHENTICATION_TIMEOUT, PeerInfo, Unauthenticated};
use crate::settings::{Endpoint, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT};

/// The time limit for a new connection to send the HTTP/2 preface or to begin TLS.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(5);
/// The time without a byte after which a connection is closed. A live peer responds to a ping within this time.
const SILENCE: Duration =
    KEEPALIVE_INTERVAL.saturating_add(KEEPALIVE_TIMEOUT).saturating_add(Duration::from_secs(15));
/// The size of the HTTP/2 connection preface, in bytes.
const FIRST_BYTES: usize = 24;
/// The pause after a failed accept, which usually fails for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound socket.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    endpoint: Endpoint,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix { socket: UnixListener, _file: SocketFile },
}

/// Removes the file of a Unix socket when it is dropped.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::debug!(path = %self.0.display(), %error, "cannot remove the socket file");
        }
    }
}

impl Listener {
    /// Bind `endpoint`. A socket file on which no process listens is replaced.
    ///
    /// # Errors
    /// The operating system's error, which does not name the endpoint.
    pub async fn bind(endpoint: &Endpoint) -> io::Result<Self> {
        match endpoint {
            Endpoint::Tcp { host, port } => {
                let socket = TcpListener::bind((host.as_str(), *port)).await?;
                let endpoint = Endpoint::Tcp { host: host.clone(), port: socket.local_addr()?.port() };
                Ok(Self { socket: Socket::Tcp(socket), endpoint })
            }
            Endpoint::Unix(path) => {
                remove_stale(path).await?;
                let socket = UnixListener::bind(path)?;
                let socket = Socket::Unix { socket, _file: SocketFile(path.clone()) };
                Ok(Self { socket, endpoint: endpoint.clone() })
            }
        }
    }

    /// The bound address. Port 0 is replaced by the chosen port.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Accept connections, at most [`MAX_CONNECTIONS`] at a time. Further connections wait in the socket's
    /// backlog.
    pub fn connections(self) -> impl Stream<Item = io::Result<Connection>> + Send {
        self.limited(MAX_CONNECTIONS)
    }

    fn limited(self, connections: usize) -> impl Stream<Item = io::Result<Connection>> + Send {
        let permits = Arc::new(Semaphore::new(connections));
        let state = (self.socket, permits, Unauthenticated::default());
        futures_util::stream::unfold(state, |(socket, permits, unauthenticated)| async move {
            let permit = Arc::clone(&permits).acquire_owned().await.ok()?;
            let (stream, peer) = loop {
                match socket.accept().await {
                    Ok((stream, address)) => match unauthenticated.admit(address) {
                        Some(peer) => break (stream, peer),
                        None => tracing::debug!(
                            address = address.map(|address| address.to_string()),
                            "closed a connection: its address has too many unauthenticated connections"
                        ),
                    },
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        sleep(ACCEPT_PAUSE).await;
                    }
                }
            };
            let timer = Box::pin(sleep(FIRST_BYTES_TIMEOUT));
            let now = Instant::now();
            let connection =
                Connection { stream, peer, timer, accepted: now, heard: now, read: 0, _permit: permit };
            Some((Ok(connection), (socket, permits, unauthenticated)))
        })
    }
}

impl Socket {
    async fn accept(&self) -> io::Result<(SocketStream, Option<SocketAddr>)> {
        match self {
            Self::Tcp(socket) => {
                let (stream, peer) = socket.accept().await?;
                stream.set_nodelay(true)?;
                Ok((Either::Left(stream), Some(peer)))
            }
            Self::Unix { socket, .. } => Ok((Either::Right(socket.accept().await?.0), None)),
        }
    }
}

async fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    if is_socket
        && let Err(error) = UnixStream::connect(path).await
        && error.kind() == io::ErrorKind::ConnectionRefused
    {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

type SocketStream = Either<TcpStream, UnixStream>;

/// An accepted connection.
#[derive(Debug)]
pub struct Connection {
    stream: SocketStream,
    peer: PeerInfo,
    /// A timer that expires at the deadline for the next byte, or earlier.
    timer: Pin<Box<Sleep>>,
    accepted: Instant,
    /// The time at which the last byte arrived.
    heard: Instant,
    read: usize,
    _permit: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.peer.clone()
    }
}

impl Connection {
    /// The time at which the connection is closed, what the peer must send before that time, and the time
    /// limit.
    fn deadline(&self) -> (Instant, &'static str, Duration) {
        let due = |since: Instant, missing, limit| (since + limit, missing, limit);
        if self.read < FIRST_BYTES {
            return due(self.accepted, "HTTP/2 preface", FIRST_BYTES_TIMEOUT);
        }
        let silent = due(self.heard, "byte, and no response to a ping,", SILENCE);
        if self.peer.has_authenticated() {
            return silent;
        }
        silent.min(due(self.accepted, "call with a valid token", AUTHENTICATION_TIMEOUT))
    }

    fn check_deadline(&self) -> io::Result<Instant> {
        let (end, missing, limit) = self.deadline();
        if Instant::now() < end {
            return Ok(end);
        }
        let what = format!("no {missing} within {} s", limit.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, what))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if polled.is_ready() {
            self.read = self.read.saturating_add(buf.filled().len() - before);
            self.heard = Instant::now();
            if !self.peer.has_authenticated() {
                self.check_deadline()?; // a connection that sends bytes continuously never polls the timer
            }
            return polled;
        }
        loop {
            ready!(self.timer.as_mut().poll(cx));
            let end = self.check_deadline()?;
            self.timer.as_mut().reset(end);
        }
    }
}

impl AsyncWrite for Connection {
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

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    async fn bound() -> (Listener, String) {
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.endpoint().to_string();
        (listener, at)
    }

    #[test]
    fn a_connection_without_a_preface_is_closed() {
        run(async {
            let (listener, at) = bound().await;
            let mut connections = Box::pin(listener.connections());
            let mut client = TcpStream::connect(at).await.unwrap();
            client.write_all(b"PRI").await.unwrap();
            let mut connection = connections.next().await.unwrap().unwrap();
            let mut bytes = [0; 64];
            assert_eq!(connection.read(&mut bytes).await.unwrap(), 3);
            let error = connection.read(&mut bytes).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(error.to_string().contains("preface"), "{error}");
        });
    }

    #[test]
    fn a_silent_connection_is_closed_and_an_answering_one_is_not() {
        run(async {
            let (listener, at) = bound().await;
            let mut connections = Box::pin(listener.connections());
            let mut client = TcpStream::connect(at).await.unwrap();
            client.write_all(&[b'P'; FIRST_BYTES]).await.unwrap();
            let mut connection = connections.next().await.unwrap().unwrap();
            connection.peer.set_authenticated();
            let mut bytes = [0; 64];
            assert_eq!(connection.read(&mut bytes).await.unwrap(), FIRST_BYTES);
            tokio::time::pause();
            for _ in 0..3 {
                tokio::time::advance(SILENCE - Duration::from_secs(1)).await;
                let silent =
                    tokio::time::timeout(Duration::from_millis(1), connection.read(&mut bytes)).await;
                assert!(silent.is_err(), "{silent:?}");
                client.write_all(b"pong").await.unwrap();
                tokio::time::resume();
                assert_eq!(connection.read(&mut bytes).await.unwrap(), 4);
                tokio::time::pause();
            }
            let since = Instant::now();
            let error = connection.read(&mut bytes).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(since.elapsed() >= SILENCE - Duration::from_secs(1), "{error}");
        });
    }

    #[test]
    fn a_connection_that_does_not_authenticate_is_closed_even_if_it_sends() {
        run(async {
            let (listener, at) = bound().await;
            let mut connections = Box::pin(listener.connections());
            let mut clients = Vec::new();
            for sends in [true, false] {
                let mut client = TcpStream::connect(&at).await.unwrap();
                client.write_all(&[b'P'; FIRST_BYTES]).await.unwrap();
                let mut connection = connections.next().await.unwrap().unwrap();
                let mut bytes = [0; 64];
                assert_eq!(connection.read(&mut bytes).await.unwrap(), FIRST_BYTES);
                tokio::time::pause();
                tokio::time::advance(AUTHENTICATION_TIMEOUT).await;
                tokio::time::resume();
                if sends {
                    client.write_all(b"ping").await.unwrap();
                }
                let error = connection.read(&mut bytes).await.unwrap_err();
                assert_eq!(error.to_string(), "no call with a valid token within 10 s");
                clients.push(client);
            }
        });
    }

    #[test]
    fn one_more_connection_waits_until_another_ends() {
        run(async {
            let (listener, at) = bound().await;
            let mut connections = Box::pin(listener.limited(2));
            let _clients = [TcpStream::connect(&at).await.unwrap(), TcpStream::connect(&at).await.unwrap()];
            let first = connections.next().await.unwrap().unwrap();
            let _second = connections.next().await.unwrap().unwrap();
            let _third = TcpStream::connect(&at).await.unwrap();
            let mut next = connections.next();
            assert!(futures_util::poll!(&mut next).is_pending());
            drop(first);
            next.await.unwrap().unwrap();
        });
    }

    #[test]
    fn a_stale_socket_file_is_replaced_and_a_live_one_is_not() {
        run(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            assert!(path.exists());
            let endpoint = Endpoint::Unix(path.clone());
            let living = Listener::bind(&endpoint).await.unwrap();
            assert_eq!(Listener::bind(&endpoint).await.unwrap_err().kind(), io::ErrorKind::AddrInUse);
            drop(living);
            assert!(!path.exists());
        });
    }
}
