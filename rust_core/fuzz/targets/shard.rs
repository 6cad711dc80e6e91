//! The file of a virtual shard. The manifest has the correct size and hash of the file.

use std::cell::RefCell;
use std::fs;
use std::path::Path;

use persia_store::checkpoint::{ShardReader, ShardRows, TableRows, read_shard, write_shard};
use persia_types::shard_of;
use persia_types::tables::FileEntry;

use super::{memory, scratch};

const FILE: &str = "shard-003.arrow";
const SHARD: usize = 3;

const FIXED_BYTES: usize = 1 << 20;
/// The memory per input byte. A table without rows takes about 50 bytes of JSON in the file's schema, and
/// again in its footer.
const BYTES_PER_BYTE: usize = 16;

thread_local! {
    static READER: RefCell<ShardReader> = RefCell::default();
}

/// Check that accepted rows are bit-identical after they are written to a new file, and that a reused reader
/// reads the same rows.
pub fn check(data: &[u8]) -> bool {
    let dir = scratch();
    let dir = dir.path();
    let entry = FileEntry {
        name: FILE.into(),
        bytes: data.len() as u64,
        blake3: blake3::hash(data).to_hex().to_string(),
    };
    fs::write(dir.join(FILE), data).expect("written");
    let read = || read_shard(dir, &entry).map_err(|error| error.to_string());
    let found = memory::within(FIXED_BYTES + BYTES_PER_BYTE * data.len(), read);
    READER.with_borrow_mut(|reader| match (reader.read(dir, &entry), &found) {
        (Ok(again), Ok(rows)) => assert_eq!(bits(again), bits(rows)),
        (Err(again), Err(error)) => assert_eq!(again.to_string(), *error),
        (again, _) => panic!("{again:?} by a reader that was used before, {found:?} by another"),
    });
    let Ok(rows) = found else { return false };
    rows.check().expect("what is accepted is whole");
    assert_eq!(bits(&written(dir, &rows)), bits(&rows));
    true
}

fn written(dir: &Path, rows: &ShardRows) -> ShardRows {
    fs::remove_file(dir.join(FILE)).expect("it was there");
    let entry = write_shard(dir, rows).expect("what was read can be written");
    read_shard(dir, &entry).expect("and read")
}

type Bits<'a> = (&'a str, [usize; 2], &'a [u64], &'a [u64], Vec<u32>, Vec<u32>, &'a [(u64, u32)]);

/// The floats as bits, so that NaN equals itself.
fn bits(rows: &ShardRows) -> (usize, Vec<Bits<'_>>) {
    (rows.shard, rows.tables.iter().map(bits_of).collect())
}

fn bits_of(table: &TableRows) -> Bits<'_> {
    let bits = |floats: &[f32]| floats.iter().map(|float| float.to_bits()).collect();
    let TableRows { name, dim, state_len, ids, last_used, weights, state, admission_counts } = table;
    (name, [*dim, *state_len], ids, last_used, bits(weights), bits(state), admission_counts)
}

/// Inputs that the target accepts.
pub fn seeds() -> Vec<Vec<u8>> {
    let ids: Vec<u64> = (0..).filter(|id| shard_of(*id) == SHARD).take(6).collect();
    let table = |name: &str, dim: usize, state_len: usize, rows: usize, counts: usize| TableRows {
        name: name.into(),
        dim,
        state_len,
        ids: ids[..rows].to_vec(),
        last_used: (1..).take(rows).collect(),
        weights: vec![0.5; rows * dim],
        state: vec![f32::NAN; rows * state_len],
        admission_counts: ids[rows..rows + counts].iter().map(|id| (*id, 9)).collect(),
    };
    let file = |tables: Vec<TableRows>| {
        let dir = scratch();
        write_shard(dir.path(), &ShardRows { shard: SHARD, tables }).expect("written");
        fs::read(dir.path().join(FILE)).expect("a file")
    };
    vec![
        file(vec![]),
        file(vec![table("user", 2, 0, 1, 0)]),
        file(vec![table("user", 4, 2, 3, 0), table("empty", 1, 0, 0, 0), table("item", 1, 1, 2, 3)]),
        file(vec![table("waiting", 8, 16, 0, 2)]),
    ]
}
