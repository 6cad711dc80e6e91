//! [`MemoryBudget`]: limits the memory of requests in flight over all connections.

use std::sync::Arc;

use persia_types::TablesError;
use persia_types::limits::MAX_IN_FLIGHT_BYTES;
use persia_wire::error::to_status;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::metrics;

/// The binary logarithm of a mebibyte, the unit in which memory is counted.
const MIB: u32 = 20;

/// The budget for the memory of all requests in flight.
#[derive(Debug, Clone)]
pub(crate) struct MemoryBudget {
    free: Arc<Semaphore>,
    /// Allows one request at a time to exceed the budget.
    extra: Arc<Semaphore>,
    mib: u32,
    /// The name of this process, for messages.
    peer: Arc<str>,
    /// What to do if the memory does not suffice, for messages.
    advice: &'static str,
}

/// The memory of one request. Dropping it releases the memory.
#[derive(Debug)]
pub(crate) struct RequestMemory {
    _permit: OwnedSemaphorePermit,
    _counted: metrics::RequestMemory,
}

impl MemoryBudget {
    /// Create a budget of [`MAX_IN_FLIGHT_BYTES`].
    pub(crate) fn new(peer: &str, advice: &'static str) -> Self {
        Self::of((MAX_IN_FLIGHT_BYTES >> MIB) as u32, peer, advice)
    }

    /// Create a budget of `mib` mebibytes.
    pub(crate) fn of(mib: u32, peer: &str, advice: &'static str) -> Self {
        Self {
            free: Arc::new(Semaphore::new(mib as usize)),
            extra: Arc::new(Semaphore::new(1)),
            mib,
            peer: peer.into(),
            advice,
        }
    }

    /// Wait for the memory of a request. Requests get memory in the order of their calls. A request larger than the
    /// budget gets the whole budget.
    ///
    /// # Errors
    /// [`TablesError::Unable`], which callers retry, if other requests hold the memory until the deadline.
    pub(crate) async fn take(&self, bytes: u64, deadline: Instant) -> Result<RequestMemory, Status> {
        let share = bytes.div_ceil(1 << MIB).min(self.mib.into()) as u32;
        let free = Arc::clone(&self.free);
        let taken = match Arc::clone(&free).try_acquire_many_owned(share) {
            Ok(permit) => Ok(Ok(permit)),
            Err(_) => {
                metrics::count_memory_wait();
                timeout_at(deadline, free.acquire_many_owned(share)).await
            }
        };
        match taken {
            Ok(permit) => counted(permit, bytes),
            Err(_) => Err(to_status(&TablesError::Unable {
                peer: self.peer.to_string(),
                what: format!(
                    "no memory for the request before its deadline: other requests hold {} of {} MiB; {}",
                    self.mib as usize - self.free.available_permits(),
                    self.mib,
                    self.advice
                ),
            })),
        }
    }

    /// Like [`Self::take`], but one request at a time may exceed the budget when its turn has `come`, because the
    /// requests that hold the budget may wait for this request.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub(crate) async fn take_at_turn(
        &self,
        bytes: u64,
        deadline: Instant,
        come: impl Future<Output = ()>,
    ) -> Result<RequestMemory, Status> {
        let extra = async {
            come.await;
            Arc::clone(&self.extra).acquire_owned().await
        };
        tokio::select! {
            biased;
            taken = self.take(bytes, deadline) => taken,
            permit = extra => counted(permit, bytes),
        }
    }
}

fn counted(permit: Result<OwnedSemaphorePermit, AcquireError>, bytes: u64) -> Result<RequestMemory, Status> {
    let permit = permit.map_err(|closed| Status::internal(closed.to_string()))?;
    let mib = bytes.div_ceil(1 << MIB);
    Ok(RequestMemory { _permit: permit, _counted: metrics::RequestMemory::count(mib << MIB) })
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use super::*;

    async fn take(budget: &MemoryBudget, mib: u64) -> Result<RequestMemory, Status> {
        budget.take((mib << MIB) - 7, Instant::now() + Duration::from_millis(50)).await
    }

    #[tokio::test]
    async fn a_request_waits_for_memory_that_others_hold_and_its_error_says_so() {
        let budget = MemoryBudget::of(4, "the server", "wait");
        let held = take(&budget, 3).await.unwrap();
        let refused = take(&budget, 2).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unavailable);
        assert!(refused.message().contains("other requests hold 3 of 4 MiB; wait"), "{refused}");
        let small = take(&budget, 1).await.unwrap();
        drop((held, small));
        // A request above the budget gets the whole budget.
        drop(take(&budget, 9).await.unwrap());
        let _all = take(&budget, 4).await.unwrap();
        drop(budget.take(0, Instant::now()).await.unwrap());
    }

    #[tokio::test]
    async fn one_request_whose_turn_has_come_needs_no_budget() {
        let budget = MemoryBudget::of(4, "the server", "wait");
        let _held = take(&budget, 4).await.unwrap();
        let at_turn = |come: bool| {
            let budget = budget.clone();
            let deadline = Instant::now() + Duration::from_millis(50);
            async move {
                budget
                    .take_at_turn(3 << MIB, deadline, async move {
                        if !come {
                            pending().await
                        }
                    })
                    .await
            }
        };
        at_turn(false).await.unwrap_err();
        let first = at_turn(true).await.unwrap();
        at_turn(true).await.unwrap_err();
        drop(first);
        at_turn(true).await.unwrap();
    }
}
