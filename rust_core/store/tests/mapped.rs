//! Tests that mapped tables read the rows of a checkpoint from the files of a bundle with exactly the bits
//! that the store reads.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod sample;

use std::path::Path;
use std::sync::Arc;

use persia_kernels::{Csr, Gradients};
use persia_store::Store;
use persia_store::mapped::{MappedFile, MappedTable, MappedTables, RowFormat, Target, write_tables};
use persia_types::schema::{Dtype, TableSettings};
use persia_types::tables::{
    LookupReport, LookupRequest, PerSample, PushRequest, Run, TableGradients, TableIds,
};
use persia_types::{Id, Initializer, Mode, Schema, ShardedIds, Table, Tables, TablesError};
use sample::{export, grouped, push, run, store_of, token, train};

const DIMS: [usize; 4] = [1, 4, 16, 19];
/// The number of rounds of pushes. Each round pushes to every table, one after another.
const ROUNDS: u64 = 8;
const LAST_STEP: u64 = ROUNDS * DIMS.len() as u64;
const TTL: u32 = 12;

/// Tables of all dimensions and stored types. The rows of the last table expire.
fn schema() -> Schema {
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F32];
    let table = |(number, (dim, dtype)): (usize, (usize, Dtype))| {
        let ttl = (number == DIMS.len() - 1).then_some(TTL);
        Table {
            settings: TableSettings { dtype, ttl, ..TableSettings::default() },
            ..Table::new(format!("t{number}"), dim)
        }
    };
    Schema { slots: vec![], tables: DIMS.into_iter().zip(dtypes).enumerate().map(table).collect() }
}

fn ids(first: u64, count: u64) -> Vec<Id> {
    (first..first + count)
        .map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (i % 50))
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect()
}

fn trained() -> Store {
    let run = Run { schema: schema(), initializer: Initializer::Normal { mean: 0.0, std: 1.0 }, ..run(&[]) };
    let store = store_of(&run, 1 << 30);
    for seq in 1..=LAST_STEP {
        let (round, table) = (1 + (seq - 1) / DIMS.len() as u64, (seq - 1) as usize % DIMS.len());
        let ids = ids(round * 100, 900);
        train(&store, seq, table, &ids);
        push(&store, seq, table, &ids, 0.125 * round as f32);
    }
    store
}

fn targets(dir: &Path, format: RowFormat) -> Vec<Target> {
    let target = |(number, table): (usize, &Table)| Target {
        name: table.name.clone(),
        dim: table.dim,
        oldest_alive: table.settings.ttl.map_or(0, |ttl| LAST_STEP.saturating_sub(ttl.into())),
        format,
        ids: dir.join(format!("{number}.ids")),
        rows: dir.join(format!("{number}.rows")),
    };
    schema().tables.iter().enumerate().map(target).collect()
}

fn open(target: &Target) -> Result<MappedTable, TablesError> {
    let map = |path| MappedFile::open(path).map(Arc::new);
    MappedTable::new(target.dim, target.format, map(&target.ids)?, map(&target.rows)?)
}

fn mapped(store: &Store, dir: &Path, format: RowFormat) -> (MappedTables, Vec<u64>) {
    let saved = tempfile::tempdir().unwrap();
    let files = store.write_snapshot(saved.path(), None).unwrap().files;
    let targets = targets(dir, format);
    let written = write_tables(saved.path(), &files, &targets).unwrap();
    let tables = targets.iter().map(|target| open(target).unwrap()).collect();
    (MappedTables::new(schema(), tables).unwrap(), written)
}

/// Look up ids of one table, by id or by sample. Each id is used by two samples, and the samples are not in
/// the order of the ids.
fn read(tables: &dyn Tables, table: usize, ids: &ShardedIds, by_sample: bool) -> (LookupReport, Vec<f32>) {
    let samples = 2 * ids.len() as u32;
    let offsets: Vec<u32> = (0..=ids.len() as u32).map(|at| 2 * at).collect();
    let indices: Vec<u32> = (0..samples).map(|at| (at * 7 + 3) % samples).collect();
    let csr = Csr { offsets: &offsets, indices: &indices };
    let per_sample = by_sample.then_some(PerSample::Gathered(csr));
    let part = [TableIds { table, ids, per_sample }];
    let mut out = vec![f32::NAN; part[0].vectors() * DIMS[table]];
    let request =
        LookupRequest { token: token(0, LAST_STEP), step: LAST_STEP, mode: Mode::Eval, tables: &part };
    let report = tables.lookup(&request, &mut [&mut out]).unwrap();
    (report, out)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn exact_rows_are_read_bit_by_bit_as_the_store_reads_them() {
    let (store, dir) = (trained(), tempfile::tempdir().unwrap());
    let (mapped, written) = mapped(&store, dir.path(), RowFormat::F32);
    let held = store.stats().unwrap().rows;
    assert_eq!(written[..3], held[..3]);
    assert!(0 < written[3] && written[3] < held[3], "expired rows are not written: {written:?} of {held:?}");
    assert_eq!(mapped.stats().unwrap().rows, written);
    for table in 0..DIMS.len() {
        for (first, count) in [(100, 1), (100, 31), (850, 40), (0, 2600)] {
            for by_sample in [false, true] {
                // `7 * at + 3` is a permutation of the samples if the number of samples is not a multiple of
                // 7.
                let ids = grouped(&ids(first, count));
                let ids = if ids.len().is_multiple_of(7) { grouped(&ids.ids()[1..]) } else { ids };
                let (report, rows) = read(&store, table, &ids, by_sample);
                let (other, other_rows) = read(&mapped, table, &ids, by_sample);
                assert_eq!(
                    (other, bits(&other_rows)),
                    (report, bits(&rows)),
                    "table {table}, {first}, {count}"
                );
                assert!(count < 2000 || (report.hits > 0 && report.missing > 0), "{report:?}");
            }
        }
    }
}

#[test]
fn rounded_rows_are_as_close_as_their_format_says() {
    let (store, dir) = (trained(), tempfile::tempdir().unwrap());
    for (format, bound) in [(RowFormat::F16, 1.0 / 2048.0), (RowFormat::Int8, 1.0 / 253.0)] {
        let (mapped, _) = mapped(&store, dir.path(), format);
        for (table, dim) in DIMS.into_iter().enumerate() {
            let ids = grouped(&ids(0, 2600));
            let (report, exact) = read(&store, table, &ids, false);
            let (other, rounded) = read(&mapped, table, &ids, false);
            assert_eq!(other, report);
            for (exact, rounded) in exact.chunks(dim).zip(rounded.chunks(dim)) {
                let largest = exact.iter().fold(1e-4f32, |largest, weight| largest.max(weight.abs()));
                let far =
                    exact.iter().zip(rounded).find(|(one, other)| (*one - *other).abs() > largest * bound);
                assert_eq!(far, None, "{format:?}: {exact:?} {rounded:?}");
            }
        }
    }
}

#[test]
fn tables_without_rows_work() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&Run { schema: schema(), ..run(&[]) }, 1 << 20);
    let (mapped, written) = mapped(&store, dir.path(), RowFormat::F16);
    assert_eq!((written, export(&store).len()), (vec![0; DIMS.len()], 0));
    let (report, rows) = read(&mapped, 2, &grouped(&[1, 2, 3]), false);
    assert_eq!((report.missing, rows), (3, vec![0.0; 3 * DIMS[2]]));
}

#[test]
fn everything_but_look_ups_is_refused() {
    let (store, dir) = (trained(), tempfile::tempdir().unwrap());
    let (mapped, _) = mapped(&store, dir.path(), RowFormat::F32);
    let ids = grouped(&[1, 2]);
    let tables = [TableGradients { table: 0, ids: &ids, gradients: Gradients::Rows(&[0.0; 2]) }];
    let push = PushRequest { token: token(0, 1), step: 1, lr_factor: 1.0, tables: &tables };
    let part = [TableIds { table: 0, ids: &ids, per_sample: None }];
    let train = LookupRequest { token: token(0, 1), step: 1, mode: Mode::Train, tables: &part };
    for refused in [
        mapped.lookup(&train, &mut [&mut [0.0; 2]]).err(),
        mapped.push(&push).err(),
        mapped.begin(&run(&DIMS)).err(),
        mapped.clear().err(),
        mapped.restore(dir.path(), &[]).err(),
    ] {
        assert!(refused.unwrap().to_string().contains("only be looked up"));
    }
    let eval = LookupRequest { mode: Mode::Eval, ..train };
    assert!(matches!(mapped.lookup(&eval, &mut [&mut [0.0; 3]]), Err(TablesError::BadShape { .. })));
}

#[test]
fn files_that_do_not_fit_together_are_refused_by_name() {
    let (store, dir) = (trained(), tempfile::tempdir().unwrap());
    drop(mapped(&store, dir.path(), RowFormat::F32));
    let target = &targets(dir.path(), RowFormat::F32)[1];
    let refused = |file: &Path, change: &dyn Fn(&mut Vec<u8>)| {
        let before = std::fs::read(file).unwrap();
        let mut content = before.clone();
        change(&mut content);
        std::fs::write(file, content).unwrap();
        let error = open(target).err().map(|error| error.to_string()).unwrap_or_default();
        std::fs::write(file, before).unwrap();
        error
    };
    for (file, change) in [
        (&target.ids, (&|ids: &mut Vec<u8>| ids.truncate(ids.len() - 3)) as &dyn Fn(&mut Vec<u8>)),
        (&target.ids, &|ids| ids[80] ^= 1),
        (&target.rows, &|rows| rows.truncate(rows.len() - 16)),
        (&target.rows, &|rows| rows.push(0)),
    ] {
        let error = refused(file, change);
        assert!(error.contains(file.to_str().unwrap()), "{error:?}");
    }
    open(target).unwrap();
    let other = [Target { dim: 5, ..target.clone() }];
    let saved = tempfile::tempdir().unwrap();
    let files = store.write_snapshot(saved.path(), None).unwrap().files;
    let error = write_tables(saved.path(), &files, &other).unwrap_err();
    assert!(matches!(error, TablesError::Foreign { .. }), "{error}");
}
