//! Tests with hostile shard files: a valid hash but invalid content. The reader must not panic or allocate more than
//! the size of the file. Valid files must be read back unchanged, by other readers too.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod commit_sample;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int16Type, UInt64Type};
use arrow_ipc::reader::FileReader;
use commit_sample::{ids_of, scratch, shards, table};
use persia_store::checkpoint::{ShardRows, TableRows, read_shard, write_shard};
use persia_types::TablesError;
use persia_types::tables::FileEntry;
use proptest::prelude::*;

const NAME: &str = "shard-003.arrow";
const LIMITED: &str = "PERSIA_TEST_MEMORY_LIMITED";

fn written(rows: &ShardRows) -> Vec<u8> {
    let dir = scratch();
    let entry = write_shard(dir.path(), rows).unwrap();
    let content = fs::read(dir.path().join(&entry.name)).unwrap();
    assert_eq!(entry.bytes, content.len() as u64);
    assert_eq!(entry.blake3, blake3::hash(&content).to_hex().as_str());
    content
}

/// Read these bytes as a shard file whose size and hash are in the manifest.
fn read(dir: &Path, content: &[u8]) -> Result<ShardRows, String> {
    let entry = FileEntry {
        name: NAME.into(),
        bytes: content.len() as u64,
        blake3: blake3::hash(content).to_hex().to_string(),
    };
    fs::write(dir.join(NAME), content).unwrap();
    match read_shard(dir, &entry) {
        Ok(rows) => Ok(rows),
        Err(TablesError::Corrupt { path, what }) if path == dir.join(NAME) => Err(what),
        Err(other) => panic!("{other:?}"),
    }
}

fn replaced(content: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut content = content.to_vec();
    let places: Vec<usize> =
        (0..content.len()).filter(|at| content[*at..].starts_with(from.as_bytes())).collect();
    assert!(!places.is_empty(), "{from}");
    places.into_iter().for_each(|at| content[at..at + to.len()].copy_from_slice(to.as_bytes()));
    content
}

/// This is not a test in itself: another test runs it under a memory limit.
#[test]
#[ignore = "run by hostile_files_under_a_memory_limit"]
fn hostile_files() {
    if std::env::var_os(LIMITED).is_none() {
        return;
    }
    let dir = scratch();
    let mut rows = shards(1).remove(0);
    let held = rows.tables[0].ids.len();
    rows.tables[0].admission_counts =
        (7..).zip(&ids_of(3, held + 5)[held..]).map(|(count, id)| (*id, count)).collect();
    let good = written(&rows);
    assert_eq!(read(dir.path(), &good).unwrap(), rows);
    let (mut accepted, mut refused) = (0, 0);
    let mut probe =
        |content: &[u8], at: usize| match catch_unwind(AssertUnwindSafe(|| read(dir.path(), content))) {
            Ok(Ok(rows)) => {
                rows.check().unwrap();
                accepted += 1;
            }
            Ok(Err(_)) => refused += 1,
            Err(_) => panic!("panicked on a change at byte {at}"),
        };
    for at in 0..good.len() {
        let mut bad = good.clone();
        for pattern in [1 << (at % 8), 0xff] {
            bad[at] = good[at] ^ pattern;
            probe(&bad, at);
        }
        for value in [i64::MAX, i64::MIN, -1, i64::from(i32::MAX), 1 << 40] {
            let end = good.len().min(at + 8);
            bad.copy_from_slice(&good);
            bad[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            probe(&bad, at);
        }
        probe(&good[..at], at);
    }
    assert!(refused > good.len() && accepted > 100, "{refused} refused, {accepted} accepted");
}

#[test]
fn hostile_files_under_a_memory_limit() {
    // The limit is enough for the test itself, but far below the lengths in hostile files.
    let limited =
        format!("ulimit -v {} && exec \"$0\" --exact hostile_files --ignored --test-threads=1", 256 << 10);
    let status = Command::new("sh")
        .args(["-c", &limited])
        .arg(std::env::current_exe().unwrap())
        .env(LIMITED, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn false_metadata_is_refused() {
    let dir = scratch();
    let good = written(&shards(1)[0]);
    assert_eq!(read(dir.path(), &good).unwrap(), shards(1)[0]);
    let refused = |from: &str, to: &str, what: &str| {
        let said = read(dir.path(), &replaced(&good, from, to)).unwrap_err();
        assert!(said.contains(what), "{to}: {said}");
    };
    refused("\"rows\":9", "\"rows\":8", "more than the 8 rows");
    refused("\"rows\":9}", "\"rows\":99", "damaged");
    refused(
        "\"dim\":4",
        "\"dim\":5",
        "has a damaged column `weights`: it has a list whose length is not 5, because the offset at index 1 is 4; use \
         another checkpoint",
    );
    refused(
        "\"state_len\":4",
        "\"state_len\":3",
        "has a damaged column `state`: it has a list whose length is not 3",
    );
    refused("\"dim\":4", "\"dim\":0", "dim 0");
    refused("\"name\":\"user\"", "\"name\":\"uses\"", "does not name table \"uses\"");
    refused("\"name\":\"empty\"", "\"name\":\"\"     ", "0 bytes");
    refused("last_used", "last_seen", "does not have the columns of a shard");
    let files = [("shard-200.arrow", 200), ("shard-011.arrow", 11)];
    for (rows, (name, shard)) in shards(1).iter().rev().zip(files) {
        assert_eq!(rows.shard, shard);
        let said = read(dir.path(), &written(rows)).unwrap_err();
        let expected = format!("has the rows of shard {shard}, but the name of another shard");
        assert!(said.starts_with(&expected), "{name} as {NAME}: {said}");
    }
}

#[test]
fn a_wrong_size_is_refused_before_anything_is_read_or_allocated() {
    let dir = scratch();
    let good = write_shard(dir.path(), &shards(1)[0]).unwrap();
    for bytes in [0, good.bytes - 1, good.bytes + 1, 1 << 40, u64::MAX] {
        let said = read_shard(dir.path(), &FileEntry { bytes, ..good.clone() }).unwrap_err().to_string();
        assert!(said.contains(&format!("but the manifest says {bytes}")) && said.contains(NAME), "{said}");
    }
}

#[test]
fn another_format_is_refused_by_its_number() {
    let dir = scratch();
    // Metadata is sorted by key, so the value of the format follows its key.
    let good = written(&shards(1)[0]);
    let key = b"persia.format";
    let places: Vec<usize> = (0..good.len()).filter(|at| good[*at..].starts_with(key)).collect();
    assert_eq!(places.len(), 2, "in the schema and in the footer");
    let cases = [
        (b'3', "has format 3, but this build reads formats up to 2; install a newer Persia"),
        (b'0', "has format 0, which no version has written"),
        (b'x', "has no number as persia.format in its metadata"),
    ];
    for (format, expected) in cases {
        let mut bad = good.clone();
        for place in &places {
            let from = place.saturating_sub(64);
            let value = (from..place + 64).find(|at| good[*at..].starts_with(b"\x01\0\0\x001\0")).unwrap();
            bad[value + 4] = format;
        }
        let said = read(dir.path(), &bad).unwrap_err();
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn rows_that_cannot_be_read_back_are_not_written() {
    let dir = scratch();
    let good = ShardRows { shard: 3, tables: vec![table(3, "user", 4, 2, 5, 1)] };
    let refused = |change: &dyn Fn(&mut ShardRows), what: &str| {
        let mut bad = good.clone();
        change(&mut bad);
        let error = write_shard(dir.path(), &bad).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    };
    refused(&|rows| rows.shard = 256, "the shard is 256, expected 0 to 255");
    refused(&|rows| rows.shard = 4, "belongs to shard 3, but is in shard 4");
    refused(&|rows| rows.tables[0].ids.swap(0, 1), "before id");
    refused(&|rows| rows.tables[0].ids[1] = rows.tables[0].ids[0], "before id");
    refused(&|rows| rows.tables[0].weights.truncate(19), "19 numbers in weights, expected 20");
    refused(&|rows| rows.tables[0].state.truncate(9), "9 numbers in state, expected 10");
    refused(&|rows| rows.tables[0].last_used.truncate(4), "4 numbers in last_used, expected 5");
    refused(&|rows| rows.tables.push(rows.tables[0].clone()), "twice");
    refused(&|rows| rows.tables[0].name.clear(), "the name of a table has 0 bytes");
    refused(&|rows| rows.tables[0].dim = 0, "dim 0");
    let next = ids_of(3, 7)[5..].to_vec();
    refused(
        &|rows| rows.tables[0].admission_counts = vec![(rows.tables[0].ids[0], 1)],
        "expected none, because the id has a row",
    );
    refused(&|rows| rows.tables[0].admission_counts = vec![(next[0], 0)], "has the admission count 0");
    refused(&|rows| rows.tables[0].admission_counts = vec![(next[1], 1), (next[0], 1)], "before id");
    refused(
        &|rows| rows.tables[0].admission_counts = vec![(ids_of(4, 1)[0], 1)],
        "belongs to shard 4, but is in shard 3",
    );
    write_shard(dir.path(), &good).unwrap();
    let again = write_shard(dir.path(), &good).unwrap_err();
    assert!(matches!(again, TablesError::Io { .. }), "a file is never written over: {again}");
}

#[test]
fn record_batches_are_bounded_and_any_arrow_reader_reads_them() {
    let dir = scratch();
    let rows =
        ShardRows { shard: 3, tables: vec![table(3, "a", 1, 0, 70_000, 1), table(3, "b", 512, 1, 5000, 2)] };
    let entry = write_shard(dir.path(), &rows).unwrap();
    assert_eq!(read_shard(dir.path(), &entry).unwrap(), rows);
    let reader = FileReader::try_new(fs::File::open(dir.path().join(NAME)).unwrap(), None).unwrap();
    assert_eq!(reader.schema().metadata()["persia.shard"], "3");
    let mut found: Vec<TableRows> = vec![table(3, "a", 1, 0, 0, 0), table(3, "b", 512, 1, 0, 0)];
    for batch in reader {
        let batch = batch.unwrap();
        let names = batch["table"].as_dictionary::<Int16Type>();
        let index = names.keys().value(0) as usize;
        let into = &mut found[index];
        assert!(batch.num_rows() <= 1 << 16);
        assert!(batch.num_rows() * 4 * (into.dim + into.state_len) <= 8 << 20);
        assert_eq!(names.values().as_string::<i32>().value(index), into.name);
        into.ids.extend(batch["id"].as_primitive::<UInt64Type>().values());
        into.last_used.extend(batch["last_used"].as_primitive::<UInt64Type>().values());
        into.weights
            .extend(batch["weights"].as_list::<i32>().values().as_primitive::<Float32Type>().values());
        into.state.extend(batch["state"].as_list::<i32>().values().as_primitive::<Float32Type>().values());
    }
    assert_eq!(found, rows.tables);
}

fn tables() -> impl Strategy<Value = Vec<(usize, usize, Vec<u32>, Vec<usize>)>> {
    let bits = prop::collection::vec(any::<u32>(), 1..50);
    let chosen = prop::collection::btree_set(0usize..40, 0..20).prop_map(|set| set.into_iter().collect());
    prop::collection::vec((1usize..6, 0usize..6, bits, chosen), 0..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn rows_are_read_back_bit_by_bit_and_equal_rows_give_equal_files(tables in tables()) {
        let ids = ids_of(3, 40);
        let tables = tables.into_iter().enumerate().map(|(index, (dim, state_len, bits, chosen))| {
            let float = |i: usize| f32::from_bits(bits[i % bits.len()].rotate_left(i as u32));
            TableRows {
                name: format!("table é {index}"),
                dim,
                state_len,
                ids: chosen.iter().map(|place| ids[*place]).collect(),
                last_used: chosen.iter().map(|place| u64::MAX - *place as u64).collect(),
                weights: (0..chosen.len() * dim).map(float).collect(),
                state: (0..chosen.len() * state_len).map(float).collect(),
                admission_counts: counts(&ids, &chosen),
            }
        });
        let rows = ShardRows { shard: 3, tables: tables.collect() };
        let content = written(&rows);
        prop_assert_eq!(&content, &written(&rows.clone()));
        let dir = scratch();
        let found = read(dir.path(), &content).unwrap();
        prop_assert_eq!(bits(&found), bits(&rows));
        prop_assert_eq!(found.tables.len(), rows.tables.len());
    }
}

/// Admission counts of some ids without a row.
fn counts(ids: &[u64], chosen: &[usize]) -> Vec<(u64, u32)> {
    let without = (0..ids.len()).filter(|place| !chosen.contains(place) && chosen.len().is_multiple_of(2));
    without.map(|place| (ids[place], 1 + place as u32)).collect()
}

type Bits<'a> = (&'a str, &'a [u64], &'a [u64], Vec<u32>, Vec<u32>, &'a [(u64, u32)]);

/// The floats as bits, so that NaN equals itself.
fn bits(rows: &ShardRows) -> Vec<Bits<'_>> {
    let bits = |floats: &[f32]| floats.iter().map(|float| float.to_bits()).collect();
    let tables = rows.tables.iter();
    tables
        .map(|t| (&*t.name, &*t.ids, &*t.last_used, bits(&t.weights), bits(&t.state), &*t.admission_counts))
        .collect()
}
