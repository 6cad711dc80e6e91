//! Statistics, and the number of servers.

use std::sync::atomic::Ordering;
use std::time::Duration;

use persia_types::TablesError;
use persia_types::limits::MAX_SERVERS;
use persia_types::tables::{ServedCheckpoint, Stats};

use super::call::{CallError, CallTimeouts, Caller, with_deadline};
use super::pool::Remote;
use crate::proto;

impl Caller {
    pub(super) async fn wait_ready(&self, limit: Duration) -> Result<(), TablesError> {
        let timeouts =
            CallTimeouts { total: limit, attempt: self.timeouts().attempt.min(limit), patient: false };
        self.stats(timeouts).await.map(drop)
    }

    /// The number of servers. It is requested once.
    pub(super) async fn servers(&self) -> Result<u32, TablesError> {
        if let Some(servers) = self.known_servers() {
            return Ok(servers);
        }
        self.stats(self.timeouts()).await?;
        self.known_servers().ok_or(TablesError::NotBegun)
    }

    pub(super) async fn stats_by_server(&self) -> Result<Vec<Stats>, TablesError> {
        self.stats(self.timeouts()).await
    }

    fn known_servers(&self) -> Option<u32> {
        Some(self.servers.load(Ordering::Relaxed)).filter(|servers| *servers > 0)
    }

    async fn stats(&self, timeouts: CallTimeouts) -> Result<Vec<Stats>, TablesError> {
        self.call("reading statistics", timeouts, async |remote, limit| {
            let request = with_deadline(limit, proto::StatsRequest {});
            let reply = remote.rpc(&self.trainer).unary(request).await;
            let reply = reply.map_err(|status| CallError::of_status(remote, &status))?;
            let stats = all_stats(remote, &reply)?;
            self.servers.store(reply.servers, Ordering::Relaxed);
            Ok(stats)
        })
        .await
    }
}

/// The statistics of all servers, or an error that names the missing ones.
fn all_stats(remote: &Remote, reply: &proto::StatsReply) -> Result<Vec<Stats>, CallError> {
    if reply.servers as usize > MAX_SERVERS {
        let what = format!("it reports {} servers, but the limit is {MAX_SERVERS}", reply.servers);
        return Err(CallError::incompatible(remote, what));
    }
    let missing: Vec<String> = (0..reply.servers)
        .filter(|index| !reply.answered.iter().any(|answer| answer.server == *index))
        .map(|index| index.to_string())
        .collect();
    if reply.servers == 0 {
        return Err(CallError::unreachable(remote, "it has found no server yet"));
    }
    if !missing.is_empty() {
        let noun = if missing.len() == 1 { "server" } else { "servers" };
        return Err(CallError::Transient(TablesError::Unreachable {
            peer: format!("{noun} {} of {}", missing.join(", "), reply.servers),
            what: format!("the {} received no response", remote.name),
        }));
    }
    let mut answers: Vec<&proto::ServerStats> = reply.answered.iter().collect();
    answers.sort_by_key(|answer| answer.server);
    answers
        .into_iter()
        .map(|answer| {
            serde_json::from_str(&answer.stats).map_err(|error| {
                let what = format!("malformed statistics of server {}: {error}", answer.server);
                CallError::incompatible(remote, what)
            })
        })
        .collect()
}

/// The checkpoint that all servers serve, and the number that identifies its rows.
pub(super) fn served(all: Vec<Stats>) -> Result<(u64, ServedCheckpoint), TablesError> {
    let count = all.len();
    let mut first: Option<(u64, ServedCheckpoint)> = None;
    for (index, stats) in all.into_iter().enumerate() {
        let wrong =
            |what: String| TablesError::Incompatible { peer: format!("server {index} of {count}"), what };
        let Some(served) = stats.served else {
            return Err(wrong(
                "it serves no checkpoint; start it with job_type: Infer in global_config.yml. To read the rows of a job \
                 in training, use eval_ctx"
                    .into(),
            ));
        };
        match &first {
            Some((generation, other)) if *generation != stats.generation => {
                return Err(wrong(format!(
                    "its checkpoint is not that of server 0: it serves step {} of {}, and server 0 serves step {} of \
                     {}; start all servers with the same checkpoint",
                    served.step, served.path, other.step, other.path
                )));
            }
            Some((_, other)) if other.schema != served.schema => {
                return Err(wrong(
                    "its slots or tables are not those of server 0: start all servers with the same embedding \
                     configuration (PERSIA_EMBEDDING_CONFIG or PERSIA_CONFIG)"
                        .into(),
                ));
            }
            Some(_) => {}
            None => first = Some((stats.generation, served)),
        }
    }
    first.ok_or(TablesError::NotBegun)
}

/// The statistics of all servers, added up. Sequence numbers and generations are the highest of any server. `served`
/// is that of the first server that has one.
pub(super) fn sum(all: Vec<Stats>) -> Stats {
    let mut sum = Stats::default();
    for stats in all {
        sum.rows.resize(sum.rows.len().max(stats.rows.len()), 0);
        sum.rows.iter_mut().zip(&stats.rows).for_each(|(sum, rows)| *sum += rows);
        sum.payload_bytes += stats.payload_bytes;
        sum.memory_bytes += stats.memory_bytes;
        sum.lookups += stats.lookups;
        sum.pushes += stats.pushes;
        for (rank, seq) in stats.tokens {
            let highest = sum.tokens.entry(rank).or_default();
            *highest = seq.max(*highest);
        }
        sum.generation = sum.generation.max(stats.generation);
        sum.begun = sum.begun.max(stats.begun);
        if sum.tables.is_empty() {
            sum.tables = stats.tables;
        } else {
            sum.tables.iter_mut().zip(&stats.tables).for_each(|(sum, table)| *sum += table);
        }
        sum.served = sum.served.or(stats.served);
    }
    sum
}

#[cfg(test)]
mod tests {
    use persia_types::tables::TableStats;
    use persia_types::{Schema, Table};

    use super::*;

    fn serves(generation: u64, step: u64) -> Stats {
        let (job, path, schema) = ("job".into(), "/model".into(), Schema::default());
        let served = Some(ServedCheckpoint { job, path, step, schema, inputs: None });
        Stats { generation, served, ..Stats::default() }
    }

    #[test]
    fn servers_that_serve_different_checkpoints_are_named() {
        assert_eq!(served(vec![serves(5, 1), serves(5, 1)]).unwrap().0, 5);
        let said = |second| served(vec![serves(5, 1), second]).unwrap_err().to_string();
        let text = said(serves(6, 2));
        assert!(
            text.contains("server 1 of 2") && text.contains("step 2") && text.contains("step 1"),
            "{text}"
        );
        assert!(said(Stats::default()).contains("job_type: Infer"));
        let mut other = serves(5, 1);
        if let Some(served) = &mut other.served {
            served.schema.tables.push(Table::new("user", 4));
        }
        let text = said(other);
        assert!(text.contains("server 1 of 2") && text.contains("slots or tables"), "{text}");
    }

    #[test]
    fn the_parts_of_a_table_are_added() {
        let table =
            |rows, seen_once| TableStats { name: "user".into(), rows, seen_once, ..TableStats::default() };
        let stats = |table| Stats { tables: vec![table], ..Stats::default() };
        let all = sum(vec![stats(table(3, 1)), stats(table(4, 2))]);
        assert_eq!(all.tables, [table(7, 3)]);
    }
}
