//! [`Fanout`]: the queues from one request to the servers; [`SlowestServer`]: the server that blocks the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::SERVER_QUEUE;

const NONE: usize = usize::MAX;

/// A queue to each server that is called. The messages of a request are sent one after another, so a server whose
/// queue is full blocks the messages to the other servers. That server is recorded as the cause of a timeout.
pub(super) struct Fanout<T> {
    queues: Vec<Option<mpsc::Sender<T>>>,
    slowest: SlowestServer,
    deadline: Instant,
}

impl<T> Fanout<T> {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { queues: Vec::new(), slowest: SlowestServer(Arc::new(AtomicUsize::new(NONE))), deadline }
    }

    /// Add the queue to the next server, with `head` as the first message.
    pub(super) fn open(&mut self, head: T) -> mpsc::Receiver<T> {
        let (queue, messages) = mpsc::channel(SERVER_QUEUE);
        // A new queue has space.
        let _ = queue.try_send(head);
        self.queues.push(Some(queue));
        messages
    }

    /// Record that the next server is not called.
    pub(super) fn skip(&mut self) {
        self.queues.push(None);
    }

    pub(super) fn slowest(&self) -> SlowestServer {
        self.slowest.clone()
    }

    /// Send `message` if the server is called. A closed queue is ignored, because the call to its server reports the
    /// error.
    pub(super) async fn send(&self, server: usize, message: T) {
        let Some(queue) = self.queues.get(server).and_then(Option::as_ref) else { return };
        if let Err(mpsc::error::TrySendError::Full(message)) = queue.try_send(message) {
            if Instant::now() >= self.deadline {
                return; // keep the record of the server that blocked until the deadline
            }
            self.slowest.0.store(server, Ordering::Relaxed);
            if queue.send(message).await.is_ok() {
                self.slowest.0.store(NONE, Ordering::Relaxed);
            }
        }
    }

    /// Whether any of the called servers has closed its queue.
    pub(super) fn any_closed(&self) -> bool {
        self.queues.iter().flatten().any(mpsc::Sender::is_closed)
    }

    /// Whether all called servers have closed their queues, so that they need no more messages.
    pub(super) fn all_closed(&self) -> bool {
        self.queues.iter().flatten().all(mpsc::Sender::is_closed)
    }
}

/// The server, if any, that blocks the messages of the request to the other servers.
#[derive(Clone)]
pub(super) struct SlowestServer(Arc<AtomicUsize>);

impl SlowestServer {
    /// The server that blocks the request, or `own` if none does.
    pub(super) fn or(&self, own: usize) -> usize {
        match self.0.load(Ordering::Relaxed) {
            NONE => own,
            server => server,
        }
    }
}
