//! Samples in the place of ids: rows of ids are kept here until all have come, then pooled; gradients of samples are kept
//! until all have come, then summed per id. Both are made chunk after chunk, as there is room for them.

use std::sync::Arc;

use persia_types::ShardedIds;
use persia_types::kernels::Gradients;
use persia_wire::chunk::{ChunkError, gradient_chunks, pooled_chunks};
use persia_wire::error::to_status;
use persia_wire::parts::{Part, Split};
use persia_wire::proto::{self, Chunk, lookup_reply, push_request};
use persia_wire::samples::SentUses;
use persia_wire::scatter::Scatter;
use tokio::sync::mpsc;
use tonic::Status;

use super::INLET;

/// The uses of every part of a request; None where rows of ids travel.
pub(super) type AllUses = Vec<Option<SentUses>>;

/// Whether vectors of samples travel in the place of what `chunk` belongs to.
pub(super) fn of_samples(split: &Split, chunk: &Chunk) -> bool {
    split.parts().get(chunk.part as usize).is_some_and(|part| part.samples.is_some())
}

/// Rows of the parts whose samples are pooled; empty for others.
pub(super) struct Kept {
    rows: Vec<Vec<f32>>,
    whole: Result<(), ChunkError>,
}

impl Kept {
    /// Write `chunks` down until no server sends any more.
    pub(super) async fn all(split: &Split, mut chunks: mpsc::Receiver<Chunk>) -> Result<Self, Status> {
        let pooled = |part: &Part| match part.samples {
            Some(_) => part.clone().with_samples(None),
            None => Part::new(part.table, part.format, &ShardedIds::default()),
        };
        let parts: Vec<Part> = split.parts().iter().map(pooled).collect();
        let mut rows: Vec<Vec<f32>> = vec![Vec::new(); parts.len()];
        // Memory is taken once a server has answered, and so has got and checked all its ids.
        let mut next = chunks.recv().await;
        if next.is_some() {
            rows = parts.iter().map(|part| vec![0.0; part.len() * part.format.dim]).collect();
        } else if parts.iter().any(|part| !part.is_empty()) {
            let what = "no rows came of the samples' ids".into();
            return Ok(Self { rows, whole: Err(ChunkError::CutShort { what }) });
        }
        let uses = vec![None; parts.len()];
        let mut buffers: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
        let mut scatter = Scatter::new(&parts, &uses, &mut buffers).map_err(|error| to_status(&error))?;
        while let Some(chunk) = next {
            scatter.take(&chunk)?;
            next = chunks.recv().await;
        }
        let whole = scatter.finish();
        Ok(Self { rows, whole })
    }

    /// Pool the samples and send them to the caller.
    pub(super) async fn send(
        self,
        split: Arc<Split>,
        uses: AllUses,
        out: mpsc::Sender<Result<proto::LookupReply, Status>>,
    ) -> Result<(), Status> {
        // Why rows are missing, their server has said before.
        self.whole?;
        if uses.iter().all(Option::is_none) {
            return Ok(());
        }
        computed(move || {
            for (index, ((part, uses), rows)) in split.parts().iter().zip(&uses).zip(&self.rows).enumerate() {
                let Some(uses) = uses else { continue };
                for chunk in pooled_chunks(index as u32, part.format, rows, uses.bags()) {
                    let rows = Some(lookup_reply::Part::Rows(chunk));
                    let sent = out.blocking_send(Ok(proto::LookupReply { part: rows }));
                    sent.map_err(|_| Status::cancelled("the caller is gone"))?;
                }
            }
            Ok(())
        })
        .await
    }
}

/// Sum the gradients of samples for each id and send them to the servers. `gradients` are those of all parts with
/// samples.
pub(super) async fn send_sums(
    split: &Split,
    uses: AllUses,
    gradients: Vec<Vec<f32>>,
    inlets: Vec<Option<mpsc::Sender<proto::PushRequest>>>,
) -> Result<(), Status> {
    if uses.iter().all(Option::is_none) {
        return Ok(());
    }
    // A channel of its own ends the loop when this future is dropped, whatever a server does.
    let (made, mut sums) = mpsc::channel(INLET);
    let parts = split.parts().to_vec();
    let work = computed(move || {
        for (index, ((part, uses), rows)) in parts.into_iter().zip(&uses).zip(&gradients).enumerate() {
            let Some(uses) = uses else { continue };
            let sum = uses.sum(rows, part.format.dim);
            let part = part.with_samples(None);
            for chunk in gradient_chunks(index as u32, &part, Gradients::Samples(sum)) {
                made.blocking_send(chunk).map_err(|_| Status::cancelled("the caller is gone"))?;
            }
        }
        Ok(())
    });
    let pass_on = async {
        while let Some(chunk) = sums.recv().await {
            for (server, piece) in split.gradients(chunk)? {
                if let Some(inlet) = &inlets[server] {
                    let piece = Some(push_request::Part::Gradients(piece));
                    // One that takes no more has failed: its call says why.
                    let _ = inlet.send(proto::PushRequest { part: piece }).await;
                }
            }
        }
        Ok(())
    };
    tokio::try_join!(work, pass_on).map(drop)
}

/// Run a loop over floats where it does not hold up other requests.
async fn computed(work: impl FnOnce() -> Result<(), Status> + Send + 'static) -> Result<(), Status> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Status::internal(format!("adding up samples failed: {error}"))),
    }
}
