//! A checkpoint's manifest.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path};

use persia_store::checkpoint::{Head, Manifest, Saver, ShardRows, write_shard};
use persia_types::tables::{Run, TableStats};
use persia_types::{Initializer, Optimizer, Schema, Table};
use serde_json::value::RawValue;

use super::{memory, scratch};

const FILE: &str = "MANIFEST.json";
/// The text before the hash at the end of a manifest.
const HASH_KEY: &[u8] = b",\n  \"blake3\": \"";
/// The text after the hash at the end of a manifest.
const END: &[u8] = b"\"\n}\n";
const HASH_DIGITS: usize = 64;

const FIXED_BYTES: usize = 1 << 20;
/// The memory per input byte. A short JSON number or name becomes a map node.
const BYTES_PER_BYTE: usize = 64;

/// Check that an accepted manifest is also accepted, with the same content, after it is rewritten, and that it
/// lists only files of its directory.
pub fn check(data: &[u8]) -> bool {
    let dir = scratch();
    let dir = dir.path();
    let Some(manifest) = opened(dir, body_of(data)) else { return false };
    let text = text_of(&manifest);
    let again = opened(dir, text.as_bytes()).expect("what was accepted is accepted again");
    assert_eq!(text_of(&again), text);
    assert!(manifest.bytes() >= manifest.files.iter().map(|entry| entry.bytes).max().unwrap_or(0));
    for file in &manifest.files {
        let entry = manifest.entry(&file.name).expect("a file it names");
        assert!(entry.name.ends_with(&file.name) && entry.bytes == file.bytes && entry.blake3 == file.blake3);
        let path = manifest.locate(dir, &file.name).expect("a file it names has a place");
        let below = path.strip_prefix(dir).expect("its own directory");
        assert!(below.components().all(|part| matches!(part, Component::Normal(_))), "{}", path.display());
    }
    let missing = manifest.verify(dir).map_or_else(|problems| problems.len(), |()| 0);
    assert_eq!(missing, manifest.files.len());
    assert!(manifest.shards().len() <= manifest.files.len());
    true
}

fn opened(dir: &Path, body: &[u8]) -> Option<Manifest> {
    let hash = blake3::hash(body).to_hex();
    fs::write(dir.join(FILE), [body, HASH_KEY, hash.as_bytes(), END].concat()).expect("written");
    memory::within(FIXED_BYTES + BYTES_PER_BYTE * body.len(), || Manifest::open(dir)).ok()
}

/// The manifest without its hash, which `opened` computes.
fn body_of(data: &[u8]) -> &[u8] {
    let tail = data.len().saturating_sub(HASH_KEY.len() + HASH_DIGITS + END.len());
    if data.ends_with(END) && data[tail..].starts_with(HASH_KEY) { &data[..tail] } else { data }
}

/// The manifest as the store writes it, up to the hash.
fn text_of(manifest: &Manifest) -> String {
    let text = serde_json::to_string_pretty(manifest).expect("a manifest is JSON");
    text.strip_suffix("\n}").expect("an object").to_owned()
}

/// Inputs that the target accepts.
pub fn seeds() -> Vec<Vec<u8>> {
    let plain = Head {
        step: 0,
        world_size: 1,
        run: Run {
            job: "job".into(),
            generation: 1,
            schema: Schema { slots: vec![], tables: vec![Table::new("user", 4)] },
            seed: u64::MAX,
            optimizer: None,
            initializer: Initializer::Zero,
            admit_probability: 1.0,
            admit_min_count: 1,
            weight_bound: 10.0,
            fresh: false,
            continues: 0,
            world_size: 1,
            reproducible: false,
        },
        rows: BTreeMap::new(),
        tokens: BTreeMap::new(),
        cursors: BTreeMap::new(),
        build: BTreeMap::new(),
        created_at: String::new(),
        inputs: None,
        tables: vec![],
    };
    let cursor = |text: &str| RawValue::from_string(text.into()).expect("JSON");
    let mut full = Head {
        step: 1 << 40,
        world_size: 2,
        rows: BTreeMap::from([("user".into(), 27), ("é".into(), 0)]),
        tokens: BTreeMap::from([(0, 7), (1, 8)]),
        cursors: BTreeMap::from([("a".into(), cursor("{\"at\": 1.50, \"deep\": [null]}"))]),
        build: BTreeMap::from([("version".into(), "0.1.0".into())]),
        created_at: "2026-01-02T03:04:05Z".into(),
        inputs: Some(cursor("{\"id_features\": [\"a\"]}")),
        tables: vec![TableStats { name: "user".into(), rows: 27, seen_once: 3, ..TableStats::default() }],
        ..plain.clone()
    };
    full.run.optimizer =
        Some(Optimizer::Adam { lr: 0.1, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, eps: 1e-8 });
    full.run.initializer = Initializer::Normal { mean: 0.0, std: 0.01 };
    let saved = |heads: &[Head]| {
        let dir = scratch();
        for (at, head) in heads.iter().enumerate() {
            let mut saver = Saver::begin(dir.path()).expect("a save begins");
            let rows = ShardRows { shard: at, tables: vec![] };
            saver.add(write_shard(saver.staging(), &rows).expect("written")).expect("added");
            fs::write(saver.staging().join("dense.pt"), [7]).expect("written");
            saver.add_file("dense.pt").expect("added");
            saver.commit(head.clone()).expect("a checkpoint");
        }
        fs::read(dir.path().join(FILE)).expect("its manifest")
    };
    vec![saved(std::slice::from_ref(&plain)), saved(&[plain, full])]
}
