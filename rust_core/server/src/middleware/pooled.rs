//! Pooling: collects rows of ids and pools them into vectors of samples. For pushes, collects gradients of samples
//! and sums them for each id. Results are computed chunk by chunk, at the pace of the receiver.

use std::sync::Arc;

use persia_kernels::Gradients;
use persia_types::ShardedIds;
use persia_wire::chunk::ChunkError;
use persia_wire::csr::ReceivedCsr;
use persia_wire::error::to_status;
use persia_wire::parts::{Part, Split};
use persia_wire::proto::{self, Chunk, lookup_reply, push_request};
use persia_wire::samples::RequestKind;
use persia_wire::scatter::Scatter;
use persia_wire::send::{gradient_chunks, pooled_chunks};
use tokio::sync::mpsc;
use tonic::Status;

use super::fanout::Fanout;
use super::{SERVER_QUEUE, bad_reply};
use crate::service::task_failed;

/// The lists of samples of each part of a request; None for parts whose rows are not pooled.
pub(super) type AllCsr = Vec<Option<ReceivedCsr>>;

/// Whether `chunk` belongs to a part with vectors of samples.
pub(super) fn of_samples(split: &Split, chunk: &Chunk) -> bool {
    split.parts().get(chunk.part as usize).is_some_and(|part| part.samples.is_some())
}

/// The memory that a middleware needs for a request, in bytes: the rows or gradients of parts with samples, and
/// their lists.
pub(super) fn kept_bytes(parts: &[Part], kind: RequestKind) -> u64 {
    let words = |part: &Part| {
        part.samples.as_ref().map_or(0, |samples| {
            let vectors = if kind == RequestKind::Lookup { part.len() } else { samples.samples };
            vectors * part.format.dim + samples.words(kind, part.len())
        })
    };
    parts.iter().map(words).sum::<usize>() as u64 * 4
}

/// The collected rows of each part; empty for a part without samples.
pub(super) struct CollectedRows {
    rows: Vec<Vec<f32>>,
    whole: Result<(), ChunkError>,
}

impl CollectedRows {
    /// Collect `chunks` until all servers have sent their rows.
    pub(super) async fn receive(split: &Split, mut chunks: mpsc::Receiver<Chunk>) -> Result<Self, Status> {
        let pooled = |part: &Part| match part.samples {
            Some(_) => part.clone().with_samples(None),
            None => Part::new(part.table, part.format, &ShardedIds::default()),
        };
        let parts: Vec<Part> = split.parts().iter().map(pooled).collect();
        let mut rows: Vec<Vec<f32>> = vec![Vec::new(); parts.len()];
        // Allocate memory only after a server has responded, because the server has then checked all its ids.
        let mut next = chunks.recv().await;
        if next.is_some() {
            rows = parts.iter().map(|part| vec![0.0; part.len() * part.format.dim]).collect();
        } else if parts.iter().any(|part| !part.is_empty()) {
            let what = "no rows arrived for the ids of the samples".into();
            return Ok(Self { rows, whole: Err(ChunkError::CutShort { what }) });
        }
        let csr = vec![None; parts.len()];
        let mut buffers: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
        let mut scatter = Scatter::new(&parts, &csr, &mut buffers).map_err(|error| to_status(&error))?;
        while let Some(chunk) = next {
            scatter.take(&chunk).map_err(|error| bad_reply("a server", error))?;
            next = chunks.recv().await;
        }
        let whole = scatter.finish();
        Ok(Self { rows, whole })
    }

    /// Pool the samples and send them to the caller. `peer` is the name of this middleware.
    pub(super) async fn send(
        self,
        split: Arc<Split>,
        csr: AllCsr,
        out: &mpsc::Sender<Result<proto::LookupReply, Status>>,
        peer: &str,
    ) -> Result<(), Status> {
        // If rows are missing, the call to their server reports the reason.
        self.whole?;
        if csr.iter().all(Option::is_none) {
            return Ok(());
        }
        let (computed_chunks, mut pooled) = mpsc::channel(SERVER_QUEUE);
        let work = computed(peer, move || {
            for (index, ((part, csr), rows)) in split.parts().iter().zip(&csr).zip(&self.rows).enumerate() {
                let Some(csr) = csr else { continue };
                for chunk in pooled_chunks(index as u32, part.format, rows, csr.bags()) {
                    if computed_chunks.blocking_send(chunk).is_err() {
                        return; // the receiver reports the reason
                    }
                }
            }
        });
        let forward = async {
            while let Some(chunk) = pooled.recv().await {
                let rows = Some(lookup_reply::Part::Rows(chunk));
                let sent = out.send(Ok(proto::LookupReply { part: rows })).await;
                sent.map_err(|_| Status::cancelled("the caller disconnected"))?;
            }
            Ok(())
        };
        tokio::try_join!(work, forward).map(drop)
    }
}

/// Sum the gradients of samples for each id and send the sums to the servers. `gradients` has the gradients of
/// samples of each part. `peer` is the name of this middleware.
pub(super) async fn send_sums(
    split: &Split,
    csr: AllCsr,
    gradients: Vec<Vec<f32>>,
    fanout: Fanout<proto::PushRequest>,
    peer: &str,
) -> Result<(), Status> {
    // Once every server has ended the push, no sums are needed.
    if csr.iter().all(Option::is_none) || fanout.all_closed() {
        return Ok(());
    }
    // If this future is dropped, the channel closes. This ends the computation even if a server blocks.
    let (computed_chunks, mut sums) = mpsc::channel(SERVER_QUEUE);
    let parts = split.parts().to_vec();
    let work = computed(peer, move || {
        for (index, ((part, csr), rows)) in parts.into_iter().zip(&csr).zip(&gradients).enumerate() {
            let Some(csr) = csr else { continue };
            let sum = csr.sum(rows, part.format.dim);
            let part = part.with_samples(None);
            for chunk in gradient_chunks(index as u32, &part, Gradients::Samples(sum)) {
                if computed_chunks.blocking_send(chunk).is_err() {
                    return;
                }
            }
        }
    });
    let forward = async {
        while let Some(chunk) = sums.recv().await {
            for (server, piece) in split.gradients(chunk)? {
                let piece = Some(push_request::Part::Gradients(piece));
                fanout.send(server, proto::PushRequest { part: piece }).await;
            }
            if fanout.all_closed() {
                sums.close();
            }
        }
        Ok(())
    };
    tokio::try_join!(work, forward).map(drop)
}

/// Run a computation on a thread on which it blocks no other request.
async fn computed(peer: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Status> {
    tokio::task::spawn_blocking(work).await.map_err(|error| task_failed(peer, &error))
}

#[cfg(test)]
mod tests {
    use persia_types::Dtype;
    use persia_wire::floats::RowFormat;
    use persia_wire::samples::Samples;

    use super::*;

    #[test]
    fn only_parts_with_samples_are_kept() {
        let format = RowFormat { dim: 1 << 10, dtype: Dtype::F32 };
        let samples =
            Samples { samples: 100, indices: 7, per_sample_weights: false, factors: false, scale: 1.0 };
        let rows = Part::new(0, format, &ShardedIds::default());
        let pooled = rows.clone().with_samples(Some(samples));
        assert_eq!(kept_bytes(std::slice::from_ref(&rows), RequestKind::Push), 0);
        let bytes = kept_bytes(&[rows, pooled], RequestKind::Push);
        assert!((100 << 12..101 << 12).contains(&bytes), "{bytes}");
    }
}
