//! The phases of a snapshot.

use std::path::Path;

use persia_types::TablesError;
use persia_types::tables::{FileEntry, Snapshot};

use super::call::Caller;
use crate::proto;

impl Caller {
    pub(super) async fn check_storage(&self, dir: &Path) -> Result<(), TablesError> {
        let request = proto::WriteSnapshotRequest { check_only: true, ..self.write_request(dir, None)? };
        let what = format!("checking {}", dir.display());
        self.administer(&what, self.timeouts(), &request).await.map(drop)
    }

    pub(super) async fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        let request = proto::PrepareSnapshotRequest { fence: self.fence(), number };
        self.administer("preparing the snapshot", self.timeouts(), &request).await.map(drop)
    }

    pub(super) async fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        let request = proto::AbortSnapshotRequest { fence: self.fence(), number };
        self.administer("aborting the snapshot", self.one_attempt(), &request).await.map(drop)
    }

    pub(super) async fn write_snapshot(
        &self,
        dir: &Path,
        number: Option<u64>,
    ) -> Result<Snapshot, TablesError> {
        let request = self.write_request(dir, number)?;
        // Check that all servers respond, because the request gets only one attempt.
        self.stats_by_server().await?;
        let what = format!("writing the snapshot into {}", dir.display());
        self.administer(&what, self.one_admin_attempt(), &request).await.map(Snapshot::from)
    }

    pub(super) async fn commit_snapshot(
        &self,
        number: u64,
        dir: &Path,
        files: &[FileEntry],
    ) -> Result<(), TablesError> {
        let request = proto::CommitSnapshotRequest {
            fence: self.fence(),
            number,
            directory: self.options.checkpoint_directory(dir)?,
            files: files.iter().cloned().map(Into::into).collect(),
        };
        let what = format!("committing the snapshot in {}", dir.display());
        self.administer(&what, self.one_attempt(), &request).await.map(drop)
    }

    fn write_request(
        &self,
        dir: &Path,
        number: Option<u64>,
    ) -> Result<proto::WriteSnapshotRequest, TablesError> {
        let directory = self.options.checkpoint_directory(dir)?;
        Ok(proto::WriteSnapshotRequest { fence: self.fence(), directory, number, check_only: false })
    }
}
