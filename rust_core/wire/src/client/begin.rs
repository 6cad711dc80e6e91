//! Beginning a run on all servers.

use persia_types::TablesError;
use persia_types::tables::Run;

use super::call::{CallError, Caller};
use crate::{PROTOCOL, VERSION, convert, proto};

impl Caller {
    pub(super) async fn begin(&self, run: &Run) -> Result<(), TablesError> {
        let servers = self.servers().await?;
        let request = proto::BeginRequest {
            protocol: PROTOCOL,
            version: VERSION.into(),
            servers,
            run: convert::run_to_json(run)?,
            check_only: false,
        };
        let mut lost_a_reply = false;
        let begun = self
            .call("beginning the run", self.admin_timeouts(), async |remote, limit| {
                let reply = self.attempt(remote, limit, &request).await;
                lost_a_reply |= matches!(reply, Err(CallError::Transient(_)));
                reply
            })
            .await;
        match begun {
            // The run may have begun although the reply was lost. A repeated begin of this generation is then
            // refused.
            Err(error @ TablesError::BadRun { .. }) if lost_a_reply => {
                self.check_begun(run.generation, error).await?;
            }
            other => drop(other?),
        }
        self.enter(&run.job, run.generation);
        Ok(())
    }

    /// After a refused begin, check whether the generation has begun on all servers. If it has begun on no
    /// server, return `refusal`. If it has begun on some servers only, the run is lost, and the next run uses a
    /// higher generation.
    async fn check_begun(&self, generation: u64, refusal: TablesError) -> Result<(), TablesError> {
        let all = self.stats_by_server().await?;
        let without: Vec<usize> = (0..all.len()).filter(|server| all[*server].begun != generation).collect();
        match without.first() {
            None => Ok(()),
            Some(_) if without.len() == all.len() => Err(refusal),
            Some(server) => Err(TablesError::Lost {
                peer: format!("server {server} of {}", all.len()),
                what: format!(
                    "generation {generation} began on other servers, but not on this one ({refusal})"
                ),
            }),
        }
    }
}
