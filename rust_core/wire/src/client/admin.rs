//! What rank 0 does: begin, save, restore, clear, and ask how things are.

use std::path::{Component, Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use persia_types::TablesError;
use persia_types::limits::MAX_SERVERS;
use persia_types::tables::{FileEntry, Run, Snapshot, Stats};

use super::Inner;
use super::call::{Patience, Trouble, within};
use super::pool::Remote;
use super::rows::ask;
use crate::{PROTOCOL, VERSION, convert, proto};

impl Inner {
    pub(super) async fn wait_ready(&self, limit: Duration) -> Result<(), TablesError> {
        let patience = Patience { all: limit, each: self.patience().each.min(limit) };
        self.ask_stats("the question for all servers", patience).await.map(|_| ())
    }

    /// The number of servers, asked for once.
    pub(super) async fn servers(&self) -> Result<u32, TablesError> {
        match self.known_servers() {
            Some(servers) => Ok(servers),
            None => {
                self.ask_stats("the question for the servers' number", self.patience()).await?;
                self.known_servers().ok_or(TablesError::NotBegun)
            }
        }
    }

    pub(super) async fn stats_by_server(&self) -> Result<Vec<Stats>, TablesError> {
        self.ask_stats("the question for statistics", self.patience()).await
    }

    async fn ask_stats(&self, what: &str, patience: Patience) -> Result<Vec<Stats>, TablesError> {
        self.call(what, patience, async |remote, each| {
            let reply = ask!(remote, self.trainer, stats, within(each, proto::StatsRequest {}))?;
            let stats = complete(remote, &reply)?;
            self.servers.store(reply.servers, Ordering::Relaxed);
            Ok(stats)
        })
        .await
    }

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
            .call("begin", self.admin_patience(), async |remote, each| {
                let reply = ask!(remote, self.admin, begin, within(each, request.clone()));
                lost_a_reply |= matches!(reply, Err(Trouble::Again(_)));
                reply
            })
            .await;
        match begun {
            // It may have begun before the connection broke: a second begin of one generation is refused.
            Err(error @ TablesError::BadRun { .. }) if lost_a_reply => {
                self.all_began(run.generation, error).await?;
            }
            other => {
                other?;
            }
        }
        self.enter(&run.job, run.generation);
        Ok(())
    }

    /// Whether a refused begin had begun everywhere. Nowhere: it was refused for `refusal`. In some servers only: the
    /// run is lost, and the next one begins above it.
    async fn all_began(&self, generation: u64, refusal: TablesError) -> Result<(), TablesError> {
        let all = self.stats_by_server().await?;
        let without: Vec<usize> =
            (0..all.len()).filter(|server| all[*server].generation != generation).collect();
        match without.first() {
            None => Ok(()),
            Some(_) if without.len() == all.len() => Err(refusal),
            Some(server) => Err(TablesError::Lost {
                peer: format!("server {server} of {}", all.len()),
                what: format!(
                    "generation {generation} began in other servers and not in this one ({refusal})"
                ),
            }),
        }
    }

    pub(super) async fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        let request = proto::PrepareSnapshotRequest { fence: *self.fence.lock(), number };
        self.call("prepare_snapshot", self.patience(), async |remote, each| {
            ask!(remote, self.admin, prepare_snapshot, within(each, request)).map(|_| ())
        })
        .await
    }

    pub(super) async fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        let request = proto::AbortSnapshotRequest { fence: *self.fence.lock(), number };
        self.call("abort_snapshot", self.one_try(), async |remote, each| {
            ask!(remote, self.admin, abort_snapshot, within(each, request)).map(|_| ())
        })
        .await
    }

    pub(super) async fn write_snapshot(
        &self,
        dir: &Path,
        number: Option<u64>,
    ) -> Result<Snapshot, TablesError> {
        let directory = self.below_root(dir)?;
        self.stats_by_server().await?; // all servers are there: one try is enough
        let request =
            proto::WriteSnapshotRequest { fence: *self.fence.lock(), directory, number, check_only: false };
        self.call(&format!("snapshot into {}", dir.display()), self.once(), async |remote, each| {
            ask!(remote, self.admin, write_snapshot, within(each, request.clone())).map(Snapshot::from)
        })
        .await
    }

    pub(super) async fn check_storage(&self, dir: &Path) -> Result<(), TablesError> {
        let directory = self.below_root(dir)?;
        let request = proto::WriteSnapshotRequest {
            fence: *self.fence.lock(),
            directory,
            number: None,
            check_only: true,
        };
        self.call(&format!("check of {}", dir.display()), self.patience(), async |remote, each| {
            ask!(remote, self.admin, write_snapshot, within(each, request.clone())).map(|_| ())
        })
        .await
    }

    pub(super) async fn commit_snapshot(
        &self,
        number: u64,
        dir: &Path,
        files: &[FileEntry],
    ) -> Result<(), TablesError> {
        let request = proto::CommitSnapshotRequest {
            fence: *self.fence.lock(),
            number,
            directory: self.below_root(dir)?,
            files: files.iter().cloned().map(Into::into).collect(),
        };
        let what = format!("note of the checkpoint in {}", dir.display());
        self.call(&what, self.one_try(), async |remote, each| {
            ask!(remote, self.admin, commit_snapshot, within(each, request.clone())).map(|_| ())
        })
        .await
    }

    pub(super) async fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let request = proto::RestoreRequest {
            fence: *self.fence.lock(),
            directory: self.below_root(dir)?,
            files: files.iter().cloned().map(Into::into).collect(),
            check_only: false,
        };
        self.stats_by_server().await?;
        self.call(&format!("restore from {}", dir.display()), self.once(), async |remote, each| {
            ask!(remote, self.admin, restore, within(each, request.clone())).map(|_| ())
        })
        .await
    }

    pub(super) async fn clear(&self) -> Result<(), TablesError> {
        let request = proto::ClearRequest { fence: *self.fence.lock() };
        self.call("clear", self.admin_patience(), async |remote, each| {
            ask!(remote, self.admin, clear, within(each, request)).map(|_| ())
        })
        .await
    }

    /// For what is not worth waiting for.
    fn one_try(&self) -> Patience {
        Patience { all: Duration::ZERO, ..self.patience() }
    }

    /// For what two peers must not do at the same time: a try whose reply was lost may still go on.
    fn once(&self) -> Patience {
        Patience { all: Duration::ZERO, each: self.options.admin_timeout }
    }

    /// `dir` as servers know it: relative to the root that they and we see the same files below.
    fn below_root(&self, dir: &Path) -> Result<String, TablesError> {
        let bad = |what: String| TablesError::Io {
            path: dir.to_owned(),
            source: std::io::Error::new(std::io::ErrorKind::InvalidInput, what),
        };
        let Some(root) = &self.options.checkpoint_root else {
            return Err(bad(
                "servers write checkpoints; set PERSIA_CKPT_DIR for them and for the trainers".into()
            ));
        };
        let (real_dir, real_root) = (real(dir).map_err(|error| bad(error.to_string()))?, real(root));
        let real_root =
            real_root.map_err(|error| bad(format!("PERSIA_CKPT_DIR={}: {error}", root.display())))?;
        let outside = || {
            bad(format!(
                "it is not below PERSIA_CKPT_DIR={}, where servers and trainers share checkpoints",
                root.display()
            ))
        };
        let below = real_dir.strip_prefix(&real_root).map_err(|_| outside())?;
        let plain = below.components().all(|component| matches!(component, Component::Normal(_)));
        if !plain {
            return Err(outside());
        }
        below.to_str().map(str::to_owned).ok_or_else(|| bad("its name is not UTF-8".into()))
    }
}

/// The path without links, of which the end need not exist.
fn real(path: &Path) -> std::io::Result<PathBuf> {
    match path.canonicalize() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            match (path.parent(), path.file_name()) {
                (Some(parent), Some(name)) if !parent.as_os_str().is_empty() => Ok(real(parent)?.join(name)),
                (Some(_), Some(name)) => Ok(Path::new(".").canonicalize()?.join(name)),
                _ => Err(error),
            }
        }
        other => other,
    }
}

/// The statistics of all servers, or which are missing.
fn complete(remote: &Remote, reply: &proto::StatsReply) -> Result<Vec<Stats>, Trouble> {
    let nonsense =
        |what: String| Trouble::Final(TablesError::Incompatible { peer: remote.name.clone(), what });
    if reply.servers as usize > MAX_SERVERS {
        return Err(nonsense(format!("it tells of {} servers", reply.servers)));
    }
    let missing: Vec<String> = (0..reply.servers)
        .filter(|index| !reply.answered.iter().any(|answer| answer.server == *index))
        .map(|index| index.to_string())
        .collect();
    if reply.servers == 0 {
        return Err(Trouble::unreachable(remote, "it knows of no server yet"));
    }
    if !missing.is_empty() {
        return Err(Trouble::Again(TablesError::Unreachable {
            peer: format!("server {} of {}", missing.join(", "), reply.servers),
            what: format!("the {} has no answer", remote.name),
        }));
    }
    let mut answers: Vec<&proto::ServerStats> = reply.answered.iter().collect();
    answers.sort_by_key(|answer| answer.server);
    answers
        .into_iter()
        .map(|answer| {
            serde_json::from_str(&answer.stats)
                .map_err(|error| nonsense(format!("statistics of server {}: {error}", answer.server)))
        })
        .collect()
}

/// All servers' counters as one.
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
    }
    sum
}
