//! Replacing or dropping all rows.

use std::path::Path;

use persia_types::TablesError;
use persia_types::tables::FileEntry;

use super::call::Caller;
use crate::proto;

impl Caller {
    pub(super) async fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let request = proto::RestoreRequest {
            fence: self.fence(),
            directory: self.options.checkpoint_directory(dir)?,
            files: files.iter().cloned().map(Into::into).collect(),
            check_only: false,
        };
        // Check that all servers respond, because the request gets only one attempt.
        self.stats_by_server().await?;
        let what = format!("restoring from {}", dir.display());
        self.administer(&what, self.one_admin_attempt(), &request).await.map(drop)
    }

    pub(super) async fn clear(&self) -> Result<(), TablesError> {
        let request = proto::ClearRequest { fence: self.fence() };
        // Check that all servers respond, because the request gets only one attempt.
        self.stats_by_server().await?;
        // Make only one attempt, because a repeated request could arrive after later pushes and drop their rows.
        // Without a reply, the run is lost, and the next generation refuses the late request.
        self.administer("clearing the tables", self.one_admin_attempt(), &request).await.map(drop)
    }
}
