//! Replay: reads all records of the segments that an earlier process left, in order.
//!
//! A segment states the length of the previous segment, and a later record states that the previous segment is
//! durable. If the end of a segment is missing and no record states that the segment is durable, the cause is a power
//! cut, and the log ends there. If a record states that the segment is durable, the log is damaged. A process that
//! was killed may have left segments that are not part of the log. They are removed.

use std::io;
use std::sync::Arc;

use super::record::{Entry, ReplayOp, WalRecord};
use super::segment::{self, Segment, Stop};
use super::{Wal, Writer};

/// The result of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Replayed {
    pub(crate) records: u64,
    /// The number of bytes after the last complete record that was not refused. They belong to requests that were not
    /// acknowledged or were not durable yet.
    pub(crate) torn: u64,
    /// The reason why the last record was refused and dropped, if it was. The process ended before it had removed
    /// this record.
    pub(crate) refused: Option<String>,
    /// The segment to which records are appended from now on.
    pub(crate) segment: u64,
}

/// The reason why a record cannot be applied.
#[derive(Debug)]
pub(crate) enum ReplayError {
    /// The request was refused. It was also refused originally, so it was not acknowledged.
    Refused(String),
    /// Any other error.
    Failed(String),
}

impl Wal {
    /// The size of the segments from `first` on, in bytes.
    pub(crate) fn bytes_from(&self, first: u64) -> u64 {
        let lengths = (first..u64::MAX).map_while(|number| self.shared.files.segment(number).metadata().ok());
        lengths.map(|metadata| metadata.len()).sum()
    }

    /// Pass every record from segment `first` on to `each`, with the number of the next segment and the length of the
    /// record. New records are then appended after the last one.
    ///
    /// # Errors
    /// The reason why the log cannot be used, with file and position. The caller must drop what was replayed until
    /// then.
    pub(crate) fn replay(
        &self,
        first: u64,
        mut each: impl FnMut(ReplayOp, u64, u64) -> Result<(), ReplayError>,
    ) -> Result<Replayed, String> {
        let files = &self.shared.files;
        let mut replayed = Replayed { records: 0, torn: 0, refused: None, segment: first };
        let mut rotated = Vec::new();
        let segment = loop {
            let number = replayed.segment;
            let next = number.checked_add(1);
            let next = next.ok_or_else(|| format!("log segment {number} has the highest possible number"))?;
            let (bytes, torn) = self.replay_segment(number, next, &mut replayed, &mut each)?;
            let describe = |error: io::Error| format!("{}: {error}", files.segment(number).display());
            let open = || std::fs::File::open(files.segment(number)).map(Arc::new).map_err(describe);
            let successor = self.successor(number, bytes, torn)?;
            if let Successor::Follows = successor {
                rotated.push(open()?);
                replayed.segment = next;
                continue;
            }
            files.keep_segments(first..=number).map_err(describe)?;
            if let (Successor::Empty, 0) = (successor, torn) {
                rotated.push(open()?);
                replayed.segment = next;
                let mut segment = files.create_segment(next).map_err(|error| error.to_string())?;
                segment.append(&WalRecord::follows(bytes)).map_err(|error| error.to_string())?;
                break segment;
            }
            replayed.torn = torn;
            break Segment::reopen(files.segment(number), number, bytes).map_err(describe)?;
        };
        // The previous process may have ended before a sync, so the records count as not durable.
        *self.shared.writer.lock() =
            Writer { first: Some(first), segment: Some(segment), written: 1, rotated };
        self.shared.synced.written();
        Ok(replayed)
    }

    fn replay_segment(
        &self,
        number: u64,
        next: u64,
        replayed: &mut Replayed,
        each: &mut impl FnMut(ReplayOp, u64, u64) -> Result<(), ReplayError>,
    ) -> Result<(u64, u64), String> {
        let path = self.shared.files.segment(number);
        let is_last = !self.shared.files.segment(next).exists();
        segment::read(&path, &mut |entry, bytes, ends| {
            let Entry::Op(op) = entry else { return Ok(()) };
            match each(op, next, bytes) {
                Ok(()) => replayed.records += 1,
                // A refused record that was not removed is the last one of the log.
                Err(ReplayError::Refused(why)) if ends && is_last => {
                    replayed.refused = Some(why);
                    return Err(Stop::Here);
                }
                Err(ReplayError::Refused(why) | ReplayError::Failed(why)) => return Err(Stop::Failed(why)),
            }
            Ok(())
        })
    }

    /// Determine how the next segment relates to this one, whose complete records have `bytes` bytes.
    ///
    /// # Errors
    /// Durable records after these are missing.
    fn successor(&self, number: u64, bytes: u64, torn: u64) -> Result<Successor, String> {
        let files = &self.shared.files;
        let path = files.segment(number);
        let next = files.segment(number + 1);
        let follows = if next.exists() { Some(segment::follows(&next)?) } else { None };
        if torn == 0 && follows == Some(Some(bytes)) {
            return Ok(Successor::Follows);
        }
        let all = files.segments().map_err(|error| format!("{}: {error}", path.display()))?;
        let mut later = all.into_iter().filter(|later| *later > number).map(|later| files.segment(later));
        if later.any(|later| segment::states_durable(&later, number)) {
            return Err(format!(
                "{}: its end, or the next segment, is missing, although a later segment states that this one \
                 is durable",
                path.display()
            ));
        }
        Ok(if follows == Some(None) { Successor::Empty } else { Successor::None })
    }
}

enum Successor {
    /// The next segment continues this one.
    Follows,
    /// There is a next segment, but nothing was appended to it.
    Empty,
    /// No segment continues this one. It is the last one, or its end was lost in a power cut, so that the records of
    /// later segments cannot be applied.
    None,
}
