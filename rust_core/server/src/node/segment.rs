//! [`read`]: one segment of a journal, to the last record that was written whole.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use super::record::{self, Entry, Found};

/// What a segment begins with.
pub(super) const MAGIC: &[u8] = b"persia journal 2";
/// What a disk writes whole, in bytes.
const SECTOR: u64 = 512;

/// Whether the process ended, or the power, while a segment was begun.
pub(super) fn is_headless(path: &Path) -> io::Result<bool> {
    Ok(path.metadata()?.len() < MAGIC.len() as u64)
}

/// Give every record to `each`. The bytes of the whole ones, and how many are left behind those.
pub(super) fn read(
    path: &Path,
    each: &mut impl FnMut(Entry) -> Result<(), String>,
) -> Result<(u64, u64), String> {
    let describe = |error: io::Error| format!("{}: {error}", path.display());
    let file = File::open(path).map_err(describe)?;
    let length = file.metadata().map_err(describe)?.len();
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut magic = [0; MAGIC.len()];
    input.read_exact(&mut magic).map_err(describe)?;
    if magic != *MAGIC {
        return Err(format!("{}: it does not begin as a journal of this version", path.display()));
    }
    let mut at = MAGIC.len() as u64;
    loop {
        let found = match record::read(&mut input, length - at) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let read = input.stream_position().map_err(describe)?;
                let lost = unwritten(input.get_mut(), at).map_err(describe)?;
                if lost < read { Ok(Found::Torn) } else { Err(error) }
            }
            other => other,
        };
        match found.map_err(|error| format!("{}, byte {at}: {error}", path.display()))? {
            Found::End => return Ok((at, 0)),
            Found::Torn => return Ok((at, length - at)),
            Found::Entry(entry, bytes) => {
                each(entry).map_err(|why| format!("{}, byte {at}: {why}", path.display()))?;
                at += bytes;
            }
        }
    }
}

/// From where on the disk may never have got what stood behind `at`: some file systems show zeros there once the power is
/// back. Either nothing but those follows, or they begin with a sector.
fn unwritten(file: &mut File, at: u64) -> io::Result<u64> {
    file.seek(SeekFrom::Start(at))?;
    let (mut place, mut written) = (at, at);
    let mut chunk = vec![0; 1 << 16];
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            break;
        }
        if let Some(last) = chunk[..read].iter().rposition(|byte| *byte != 0) {
            written = place + last as u64 + 1;
        }
        place += read as u64;
    }
    Ok(if written == at { at } else { written.next_multiple_of(SECTOR) })
}
