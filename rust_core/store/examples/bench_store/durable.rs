//! B6: compares saving and loading all rows with the peer, which writes and reads the same number of bytes
//! sequentially. Also compares a step during a save with a step without a save.
//!
//! Files are synced and dropped from the page cache before they are read, so that the disk is measured.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Instant;

use persia_types::tables::FileEntry;
use persia_types::{Mode, Optimizer, ShardedIds, Tables};

use crate::Size;
use crate::batches::{BATCH, Bench, Random, group};
use crate::figures::{Samples, print};

const DIM: usize = 64;
const ADAGRAD: Optimizer = Optimizer::Adagrad {
    lr: 0.01,
    weight_decay: 0.0,
    initial_accumulator_value: 0.1,
    g_square_momentum: 1.0,
    eps: 1e-10,
    vectorwise_shared: false,
};
/// The number of bytes of each `write` or `read` of the peer.
const BLOCK: usize = 1 << 20;

/// Measure the wall time of the store and of the peer alternately, in the directory for temporary files.
pub(crate) fn measure(size: &Size) {
    let rows = (size.rows)(2 * DIM) / 4;
    let bench = Bench::new(DIM, rows, ADAGRAD);
    let root = tempfile::tempdir().expect("a directory for temporary files");
    let [mut save, mut write, mut load, mut read] = [(); 4].map(|()| Samples::default());
    let mut bytes = 0;
    for round in 0..5 {
        let dir = root.path().join(round.to_string());
        fs::create_dir(&dir).expect("room for a checkpoint");
        let start = Instant::now();
        let files = bench.store.write_snapshot(&dir, None).expect("a snapshot").files;
        save.add(start.elapsed().as_secs_f64());
        bytes = files.iter().map(|file| file.bytes as usize).sum();
        let flat = root.path().join("flat");
        write.add(write_flat(&flat, bytes));
        read.add(read_all(&flat));
        load.add(restore(&bench, &dir, &files));
        fs::remove_dir_all(&dir).expect("its own directory");
    }
    let case = |verb: &str| format!("{verb}, dim {DIM}, adagrad, {rows} rows, {} MiB", bytes >> 20);
    print("B6", &case("save"), "s", save.median(), write.median(), 0.5, save.spread());
    print("B6", &case("load"), "s", load.median(), read.median(), 0.5, load.spread());
    let (alone, meanwhile) = time_steps(&bench, rows, root.path());
    // Use the mean, because a save may delay a single step.
    let case = case("a step of one thread while saving");
    print("B6", &case, "ms", meanwhile.mean(), alone.mean(), 1.0 / 1.2, meanwhile.spread());
}

/// The wall time in milliseconds of a step of one thread, without a save and during a save.
fn time_steps(bench: &Bench, rows: usize, root: &Path) -> (Samples, Samples) {
    let mut random = Random(9);
    let batches: Vec<ShardedIds> = (0..8).map(|_| group(&random.distinct(BATCH, rows))).collect();
    let mut out = vec![0.0; BATCH * DIM];
    let mut step = |ids: &ShardedIds, times: &mut Samples| {
        let (seq, start) = (bench.next(), Instant::now());
        let rows = &mut out[..ids.len() * DIM];
        bench.lookup(seq, Mode::Train, ids, rows);
        bench.push(seq, ids, rows);
        times.add(start.elapsed().as_secs_f64() * 1e3);
    };
    let [mut alone, mut meanwhile] = [(); 2].map(|()| Samples::default());
    for round in 0..3 {
        batches.iter().chain(&batches).for_each(|ids| step(ids, &mut alone));
        let dir = root.join(format!("meanwhile-{round}"));
        fs::create_dir(&dir).expect("room for a checkpoint");
        std::thread::scope(|threads| {
            let save = threads.spawn(|| bench.store.write_snapshot(&dir, None).expect("a snapshot"));
            for ids in batches.iter().cycle() {
                step(ids, &mut meanwhile);
                if save.is_finished() {
                    break;
                }
            }
        });
        fs::remove_dir_all(&dir).expect("its own directory");
    }
    (alone, meanwhile)
}

fn write_flat(path: &Path, bytes: usize) -> f64 {
    let block = vec![0x5A; BLOCK];
    let start = Instant::now();
    let mut file = File::create(path).expect("a file");
    for from in (0..bytes).step_by(BLOCK) {
        file.write_all(&block[..BLOCK.min(bytes - from)]).expect("room on the disk");
    }
    file.sync_all().expect("a disk");
    start.elapsed().as_secs_f64()
}

fn read_all(path: &Path) -> f64 {
    forget(path);
    let mut block = vec![0; BLOCK];
    let start = Instant::now();
    let mut file = File::open(path).expect("what was written");
    while file.read(&mut block).expect("what was written") > 0 {}
    start.elapsed().as_secs_f64()
}

fn restore(bench: &Bench, dir: &Path, files: &[FileEntry]) -> f64 {
    files.iter().for_each(|file| forget(&dir.join(&file.name)));
    let start = Instant::now();
    bench.store.restore(dir, files).expect("a good checkpoint");
    start.elapsed().as_secs_f64()
}

/// Drop a file from the page cache.
#[allow(unsafe_code)]
fn forget(path: &Path) {
    let file = File::open(path).expect("what was written");
    // SAFETY: the call only gives advice about an open file; a length of 0 means the whole file.
    let refused = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(refused, 0, "advice about {}", path.display());
}
