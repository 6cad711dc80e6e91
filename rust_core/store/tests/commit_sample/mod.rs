//! A small checkpoint whose content is a function of its step.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use persia_store::checkpoint::{
    CheckpointError, Head, Manifest, Saver, ShardRows, TableRows, read_shard, write_shard,
};
use persia_types::tables::Run;
use persia_types::{Initializer, Optimizer, Schema, shard_of};

/// The first `count` ids of a shard, in ascending order.
pub(crate) fn ids_of(shard: usize, count: usize) -> Vec<u64> {
    (0..).filter(|id| shard_of(*id) == shard).take(count).collect()
}

pub(crate) fn table(
    shard: usize,
    name: &str,
    dim: usize,
    state_len: usize,
    rows: usize,
    seed: u64,
) -> TableRows {
    let number = |i: usize| (i as u64).wrapping_mul(2654435761).wrapping_add(seed * 97) as f32 * 1e-6;
    TableRows {
        name: name.into(),
        dim,
        state_len,
        ids: ids_of(shard, rows),
        last_used: (0..rows as u64).map(|row| seed + row).collect(),
        weights: (0..rows * dim).map(number).collect(),
        state: (0..rows * state_len).map(|i| -number(i)).collect(),
        admission_counts: vec![],
    }
}

/// The shards of a step. Two of the shard numbers are equal at every step. The third depends on the step, as
/// does the content of all shards.
pub(crate) fn shards(step: u64) -> Vec<ShardRows> {
    [3, 10 + (step % 5) as usize, 200]
        .into_iter()
        .map(|shard| ShardRows {
            shard,
            tables: vec![
                table(shard, "user", 4, 4, 9, step),
                table(shard, "empty", 2, 0, 0, step),
                table(shard, "item", 2, 1, 7 + (step % 3) as usize, step + 1),
            ],
        })
        .collect()
}

pub(crate) fn dense(step: u64) -> Vec<u8> {
    format!("dense weights of step {step}\n").repeat(40).into_bytes()
}

pub(crate) fn head(step: u64) -> Head {
    Head {
        step,
        world_size: 2,
        run: Run {
            job: "job".into(),
            generation: 1,
            schema: Schema::default(),
            seed: 7,
            optimizer: Some(Optimizer::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 }),
            initializer: Initializer::Zero,
            admit_probability: 1.0,
            admit_min_count: 1,
            weight_bound: 10.0,
            fresh: false,
            continues: 0,
            world_size: 1,
            reproducible: false,
        },
        rows: BTreeMap::from([("user".into(), 27)]),
        tokens: BTreeMap::from([(0, step), (1, step)]),
        cursors: BTreeMap::new(),
        build: BTreeMap::from([("version".into(), "0.1.0".into())]),
        created_at: "2026-01-02T03:04:05Z".into(),
        inputs: None,
        tables: vec![],
    }
}

/// Save the checkpoint of a step into `dir`.
pub(crate) fn save(dir: &Path, step: u64) -> Result<Manifest, CheckpointError> {
    let mut saver = Saver::begin(dir)?;
    for rows in shards(step) {
        let entry = write_shard(saver.staging(), &rows).map_err(|error| CheckpointError::BadSave {
            action: "save",
            path: dir.into(),
            what: error.to_string(),
        })?;
        saver.add(entry)?;
    }
    fs::write(saver.staging().join("dense.pt"), dense(step)).unwrap();
    saver.add_file("dense.pt")?;
    saver.commit(head(step))
}

/// Load the checkpoint in `dir` and compare every byte with the content expected for its step. Returns the
/// step.
pub(crate) fn load(dir: &Path) -> Result<u64, CheckpointError> {
    let manifest = Manifest::open(dir)?;
    manifest.verify(dir).unwrap();
    let step = manifest.head.step;
    let found: Vec<ShardRows> =
        manifest.shards().iter().map(|entry| read_shard(dir, entry).unwrap()).collect();
    assert_eq!(found, shards(step));
    assert_eq!(fs::read(manifest.locate(dir, "dense.pt").unwrap()).unwrap(), dense(step));
    assert_eq!(manifest.head.tokens, head(step).tokens);
    assert_eq!(manifest.head.run, head(step).run);
    assert_eq!(manifest.files.len(), 4);
    Ok(step)
}

/// A temporary directory, in memory if possible: these tests sync ten thousand times, and their results do not depend
/// on the disk.
pub(crate) fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

/// All names in a directory, including hidden ones.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The names in the directory of a checkpoint after cleanup.
pub(crate) fn tidy_names(step: u64) -> Vec<String> {
    let mut names: Vec<String> =
        shards(step).iter().map(|rows| format!("shard-{:03}.arrow", rows.shard)).collect();
    names.extend(["MANIFEST.json".into(), "dense.pt".into()]);
    names.sort();
    names
}
