//! [`Files`]: the files in the directory of a log.

use std::fs::{self, File};
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use persia_store::checkpoint::replace_file;
use persia_types::TablesError;

use super::segment::Segment;

const BASE: &str = "base";
/// The temporary file of a base, which a crash may leave in the directory.
const BASE_DRAFT: &str = ".base.tmp";

/// The directory of a log.
pub(super) struct Files {
    dir: PathBuf,
}

impl Files {
    /// Open the directory. Creates it if it does not exist.
    pub(super) fn open(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir })
    }

    /// Add the path of the directory to an error.
    pub(super) fn error(&self, source: io::Error) -> TablesError {
        TablesError::Io { path: self.dir.clone(), source }
    }

    /// The path of a segment.
    pub(super) fn segment(&self, number: u64) -> PathBuf {
        self.dir.join(number.to_string())
    }

    /// Create an empty segment. It is not durable yet.
    pub(super) fn create_segment(&self, number: u64) -> Result<Segment, TablesError> {
        let path = self.segment(number);
        Segment::create(path.clone(), number).map_err(|source| TablesError::Io { path, source })
    }

    /// The numbers of the segments in the directory, in descending order.
    pub(super) fn segments(&self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            numbers.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u64>().ok()));
        }
        numbers.sort_unstable_by(|left, right| right.cmp(left));
        Ok(numbers)
    }

    /// Remove all segments except those with a number in `kept`, durably, in descending order.
    pub(super) fn keep_segments(&self, kept: RangeInclusive<u64>) -> io::Result<()> {
        let mut numbers = self.segments()?;
        numbers.retain(|number| !kept.contains(number));
        if numbers.is_empty() {
            return Ok(());
        }
        numbers.into_iter().try_for_each(|number| self.remove_segment(number))?;
        self.sync()
    }

    /// Remove a segment, if it exists.
    pub(super) fn remove_segment(&self, number: u64) -> io::Result<()> {
        remove(&self.segment(number))
    }

    /// Read the base, if there is one.
    ///
    /// # Errors
    /// The reason why it cannot be read, with its path.
    pub(super) fn read_base(&self) -> Result<Option<Vec<u8>>, String> {
        let path = self.dir.join(BASE);
        let mut content = match fs::read(&path) {
            Ok(content) => content,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        match content.split_first_chunk() {
            Some((checksum, base)) if crc32c::crc32c(base) == u32::from_le_bytes(*checksum) => {
                content.drain(..checksum.len());
                Ok(Some(content))
            }
            _ => Err(format!("{}: the content does not match its checksum", path.display())),
        }
    }

    /// Replace the base, durably.
    pub(super) fn write_base(&self, base: &[u8]) -> Result<(), TablesError> {
        let content = [&crc32c::crc32c(base).to_le_bytes(), base].concat();
        Ok(replace_file(&self.dir.join(BASE), &content)?)
    }

    /// Remove the log. The base is removed first, because segments without a base are ignored.
    pub(super) fn remove_all(&self) -> io::Result<()> {
        remove(&self.dir.join(BASE))?;
        self.sync()?;
        for number in self.segments()? {
            self.remove_segment(number)?;
        }
        remove(&self.dir.join(BASE_DRAFT))
    }

    /// Make the names in the directory durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
