//! Replay: every record of the segments that an earlier process left, in order.

use std::io;

use super::record::ReplayOp;
use super::segment::{self, Segment};
use super::{Wal, Writer};

/// The result of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Replayed {
    pub(crate) records: u64,
    /// Bytes after the last whole record: of requests that were not acknowledged, or not yet durable.
    pub(crate) torn: u64,
    /// The segment that is appended to from now on.
    pub(crate) segment: u64,
}

impl Wal {
    /// Give every record from segment `first` on to `each`, with the number of the segment after its own. Then records
    /// are appended after the last one.
    ///
    /// # Errors
    /// Why the log cannot be used, with file and position. The caller must drop what was replayed until then.
    pub(crate) fn replay(
        &self,
        first: u64,
        mut each: impl FnMut(ReplayOp, u64) -> Result<(), String>,
    ) -> Result<Replayed, String> {
        let mut replayed = Replayed { records: 0, torn: 0, segment: first };
        let segment = loop {
            let number = replayed.segment;
            let next = number.checked_add(1).ok_or_else(|| format!("segment {number} has no successor"))?;
            let count = |op| {
                replayed.records += 1;
                each(op, next)
            };
            match self.replay_segment(number, number > first, count)? {
                SegmentEnd::More => replayed.segment = next,
                SegmentEnd::Last { segment, torn } => {
                    replayed.torn = torn;
                    break segment;
                }
            }
        };
        *self.shared.writer.lock() = Writer { first: Some(first), segment: Some(segment), written: 0 };
        Ok(replayed)
    }

    fn replay_segment(
        &self,
        number: u64,
        may_be_headless: bool,
        mut each: impl FnMut(ReplayOp) -> Result<(), String>,
    ) -> Result<SegmentEnd, String> {
        let files = &self.shared.files;
        let (path, next) = (files.segment(number), number + 1);
        let describe = |error: io::Error| format!("{}: {error}", path.display());
        let is_last = !files.segment(next).exists();
        if is_last && may_be_headless && segment::is_headless(&path).map_err(describe)? {
            let segment = files.create_segment(number).map_err(|error| error.to_string())?;
            return Ok(SegmentEnd::Last { segment, torn: 0 });
        }
        let (bytes, torn) = segment::read(&path, &mut each)?;
        if !is_last {
            if torn == 0 {
                return Ok(SegmentEnd::More);
            }
            // A segment is durable before the first record of the next one is written.
            if !files.is_empty_from(next).map_err(describe)? {
                return Err(format!("{}: its end is missing, and more records follow", path.display()));
            }
            files.remove_segment(next).map_err(describe)?;
        }
        let segment = Segment::reopen(path.clone(), number, bytes).map_err(describe)?;
        Ok(SegmentEnd::Last { segment, torn })
    }
}

enum SegmentEnd {
    More,
    Last { segment: Segment, torn: u64 },
}
