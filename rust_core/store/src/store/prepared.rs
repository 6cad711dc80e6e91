//! [`PreparedSnapshot`]: the snapshot for which rows are held.

use persia_types::TablesError;

use crate::request::check::malformed;

/// The snapshot that was prepared last. The numbers of snapshots ascend within a generation.
#[derive(Default)]
pub(super) struct PreparedSnapshot {
    generation: u64,
    number: u64,
    /// Whether its rows are held, which means that they have been neither written nor released.
    held: bool,
}

impl PreparedSnapshot {
    /// Record that this snapshot is prepared. Returns false if it was already prepared and its rows are held.
    ///
    /// # Errors
    /// `BadShape` if a newer snapshot has been prepared, or if the rows of this one have been written or
    /// released.
    pub(super) fn prepare(&mut self, generation: u64, number: u64) -> Result<bool, TablesError> {
        if self.generation != generation {
            *self = Self { generation, number: 0, held: false };
        }
        let last = self.number;
        if number < last {
            return malformed(format!(
                "snapshot {number} is too late: snapshot {last} has been prepared since; save again"
            ));
        }
        if number == last && !self.held {
            return malformed(format!(
                "snapshot {number} cannot be prepared again: its rows have been written or released; save again"
            ));
        }
        let is_new = number > last;
        (self.number, self.held) = (number, true);
        Ok(is_new)
    }

    /// Record that rows are no longer held. Returns whether they were held.
    pub(super) fn release(&mut self) -> bool {
        std::mem::take(&mut self.held)
    }

    /// Call [`Self::release`] if the last snapshot has this number.
    pub(super) fn release_number(&mut self, number: u64) -> bool {
        self.number == number && self.release()
    }

    /// Call [`Self::release`], for the writer of this snapshot. After an error, no rows are held either.
    ///
    /// # Errors
    /// `BadShape` if the rows of this snapshot are not held.
    pub(super) fn release_for_write(&mut self, generation: u64, number: u64) -> Result<(), TablesError> {
        let (held, last) = (self.release(), self.number);
        if held && (self.generation, last) == (generation, number) {
            return Ok(());
        }
        malformed(if held {
            format!("snapshot {number} is not prepared, but snapshot {last} was; save again")
        } else {
            format!(
                "the rows of snapshot {number} are not held: it was not prepared, or they have been written \
                 or released; save again"
            )
        })
    }
}
