//! [`Twins`]: two servers that get the same requests.

use std::fs;

use persia_server::node::Node;
use persia_types::config::LogSync;
use persia_types::id::hash_id;
use persia_types::tables::FileEntry;
use persia_types::{Id, JobId, ShardedIds, TablesError, Token};

use super::{
    DIMS, Parts, fence, left_behind, look_up, options, owned, push_to, run, server, state, synced_server,
};
use crate::stack::{JOB, token};

/// Sends the same requests to a server with a log and to one without.
pub(super) struct Twins {
    pub(super) nodes: [Node; 2],
    pub(super) data: [tempfile::TempDir; 2],
    pub(super) checkpoints: tempfile::TempDir,
    pub(super) generation: u64,
    pub(super) seq: u64,
    pub(super) cut: u64,
    pub(super) sent: Vec<(Token, Parts)>,
    pub(super) saved: Option<(String, Vec<FileEntry>)>,
}

impl Twins {
    pub(super) fn new() -> Self {
        Self::synced(LogSync::EverySecond)
    }

    pub(super) fn synced(sync: LogSync) -> Self {
        let checkpoints = tempfile::tempdir().unwrap();
        let data = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let with = synced_server(data[0].path(), checkpoints.path(), sync);
        let without = Node::new(options(checkpoints.path(), None), owned(data[1].path())).unwrap();
        let mut twins = Self {
            nodes: [with, without],
            data,
            checkpoints,
            generation: 0,
            seq: 0,
            cut: 0,
            sent: Vec::new(),
            saved: None,
        };
        twins.begin(true);
        twins
    }

    pub(super) fn begin(&mut self, fresh: bool) {
        self.generation += 1;
        self.nodes.iter().for_each(|node| node.begin(1, &run(self.generation, fresh), false).unwrap());
        self.sent.clear();
    }

    pub(super) fn both<T: PartialEq + std::fmt::Debug>(
        &self,
        what: &str,
        call: impl Fn(&Node) -> Result<T, TablesError>,
    ) -> T {
        let [with, without] = self.nodes.each_ref().map(|node| call(node).map_err(|error| error.to_string()));
        assert_eq!(with, without, "{what}");
        with.unwrap()
    }

    /// Write a snapshot and, if `committed`, commit it, as a rank does.
    pub(super) fn save(&mut self, committed: bool) {
        self.cut += 1;
        let name = format!("save-{}", self.cut);
        let cut = self.cut;
        self.both("prepare_snapshot", |node| node.prepare_snapshot(fence(self.generation), cut));
        (0..3).for_each(|_| self.train());
        let dirs = ["with", "without"].map(|of| format!("{name}-{of}"));
        let files = [0, 1].map(|at| {
            fs::create_dir(self.checkpoints.path().join(&dirs[at])).unwrap();
            self.nodes[at].write_snapshot(fence(self.generation), &dirs[at], Some(cut)).unwrap().files
        });
        assert_eq!(files[0], files[1]);
        let [files, _] = files;
        if committed {
            self.nodes[0].commit_snapshot(fence(self.generation), cut, &dirs[0], &files).unwrap();
        }
        self.saved = Some((dirs[0].clone(), files));
    }

    pub(super) fn train(&mut self) {
        self.seq += 1;
        let (seq, random) = (self.seq, |of: u64| hash_id(of ^ self.seq << 32) as usize);
        let parts: Parts = (0..DIMS.len())
            .map(|table| {
                let ids: std::collections::BTreeSet<Id> =
                    (0..40).map(|at| (random(at + 100 * table as u64) % 900) as Id).collect();
                (table, ShardedIds::group(&ids.into_iter().collect::<Vec<_>>()).unwrap())
            })
            .collect();
        let token = Token { job: JobId::from_name(JOB), generation: self.generation, rank: 0, seq };
        self.both("look-up", |node| look_up(node, token, seq, &parts));
        self.sent.push((token, parts));
        // A push follows its look-up up to two steps later.
        if self.sent.len() > 2 {
            self.push();
        }
    }

    pub(super) fn push(&mut self) {
        if self.sent.is_empty() {
            return;
        }
        let (token, parts) = self.sent.remove(0);
        self.both("push", |node| push_to(node, token, token.seq, &parts, token.seq as f32 * 0.1));
    }

    pub(super) fn random(&mut self, random: u64) {
        match random % 40 {
            0..24 => self.train(),
            24..30 => self.push(),
            30 => {
                // The look-up is refused, because steps begin at 1.
                let [with, without] =
                    self.nodes.each_ref().map(|node| look_up(node, token(0, 0), 0, &vec![]).is_err());
                assert!(with && without);
            }
            31 => {
                let Some((token, parts)) = self.sent.last().cloned() else { return };
                self.both("repeated look-up", |node| look_up(node, token, token.seq, &parts));
            }
            32 => self.save(true),
            33 => self.save(false),
            34 => {
                self.cut += 1;
                let cut = self.cut;
                self.both("prepare_snapshot", |node| node.prepare_snapshot(fence(self.generation), cut));
            }
            35 => {
                let Some((dir, files)) = &self.saved else { return };
                self.both("restore", |node| node.restore(fence(self.generation), dir, files, false));
                self.sent.clear();
            }
            36 => {
                self.both("clear", |node| node.clear(fence(self.generation)));
                self.sent.clear();
            }
            37 => self.begin(false),
            38 => self.begin(true),
            _ => {
                let cut = self.cut;
                self.both("abort_snapshot", |node| node.abort_snapshot(fence(self.generation), cut));
            }
        }
    }

    /// Kill the server with a log, and restart it.
    pub(super) fn kill(&mut self) {
        let copy = left_behind(self.data[0].path());
        self.nodes[0] = server(copy.path(), self.checkpoints.path());
        self.data[0] = copy;
    }

    pub(super) fn check(&self, what: &str) {
        let [with, without] =
            self.nodes.each_ref().map(|node| state(node, self.generation, self.checkpoints.path()));
        assert_eq!(with, without, "{what}");
    }
}
