//! Sends the messages of a stream and receives its replies, on the caller's thread.

use std::pin::pin;

use persia_types::TablesError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// The maximum number of messages that are created before the connection accepts them.
const AHEAD: usize = 8;

/// Send `messages` while `exchange` runs with the stream of these messages. Returns when `exchange` ends.
pub(super) async fn while_sending<T, R>(
    messages: impl Iterator<Item = T>,
    exchange: impl AsyncFnOnce(ReceiverStream<T>) -> R,
) -> R {
    let (sender, receiver) = mpsc::channel(AHEAD);
    let (mut sending, mut exchange) =
        (pin!(send(sender, messages)), pin!(exchange(ReceiverStream::new(receiver))));
    let mut sent = false;
    loop {
        tokio::select! {
            biased;
            result = &mut exchange => return result,
            () = &mut sending, if !sent => sent = true,
        }
    }
}

/// Send until the receiver is dropped. The exchange then reports the reason.
async fn send<T>(sender: mpsc::Sender<T>, messages: impl Iterator<Item = T>) {
    for message in messages {
        if sender.send(message).await.is_err() {
            return;
        }
    }
}

/// The dimension of rows, given that `rows` rows have `floats` floats.
pub(super) fn dim_of(table: usize, floats: usize, rows: usize) -> Result<usize, TablesError> {
    let dim = floats.checked_div(rows).unwrap_or(0);
    if floats != rows * dim || (dim == 0 && rows > 0) {
        let what = format!("table {table}: {floats} floats do not fit the number of rows, {rows}");
        return Err(TablesError::BadShape { what });
    }
    Ok(dim)
}
