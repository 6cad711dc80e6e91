//! The ways from one request to the servers, and which of them holds it up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::INLET;

const NOBODY: usize = usize::MAX;

/// A way to each server that is asked. Messages of one request are passed on one after another, so a server that takes no
/// more keeps the others from theirs; it is remembered, so that it is blamed and not they.
pub(super) struct Inlets<T> {
    to: Vec<Option<mpsc::Sender<T>>>,
    held_up: HeldUp,
    deadline: Instant,
}

impl<T> Inlets<T> {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { to: Vec::new(), held_up: HeldUp(Arc::new(AtomicUsize::new(NOBODY))), deadline }
    }

    /// The way to the next server, with its first message under way.
    pub(super) fn open(&mut self, head: T) -> mpsc::Receiver<T> {
        let (inlet, messages) = mpsc::channel(INLET);
        // There is room for it: the channel is new.
        let _ = inlet.try_send(head);
        self.to.push(Some(inlet));
        messages
    }

    /// The next server is not asked.
    pub(super) fn skip(&mut self) {
        self.to.push(None);
    }

    pub(super) fn held_up(&self) -> HeldUp {
        self.held_up.clone()
    }

    /// Pass `message` on, if the server is asked. One that takes no more has failed: its call says why.
    pub(super) async fn send(&self, server: usize, message: T) {
        let Some(inlet) = self.to.get(server).and_then(Option::as_ref) else { return };
        if let Err(mpsc::error::TrySendError::Full(message)) = inlet.try_send(message) {
            if Instant::now() >= self.deadline {
                return; // it is over, and whoever held it up until now is to blame
            }
            self.held_up.0.store(server, Ordering::Relaxed);
            if inlet.send(message).await.is_ok() {
                self.held_up.0.store(NOBODY, Ordering::Relaxed);
            }
        }
    }

    /// Whether any server that is asked takes no more.
    pub(super) fn any_closed(&self) -> bool {
        self.to.iter().flatten().any(mpsc::Sender::is_closed)
    }

    /// Whether no server takes any more: the request is over.
    pub(super) fn all_closed(&self) -> bool {
        self.to.iter().flatten().all(mpsc::Sender::is_closed)
    }
}

/// Who is waited for.
#[derive(Clone)]
pub(super) struct HeldUp(Arc<AtomicUsize>);

impl HeldUp {
    /// The server that holds the request up, else `own`.
    pub(super) fn by(&self, own: usize) -> usize {
        match self.0.load(Ordering::Relaxed) {
            NOBODY => own,
            server => server,
        }
    }
}
