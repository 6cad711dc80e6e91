//! Measures the speed of a replay. `cargo test --release -p persia-embedding-sharded-server --test server
//! replay_speed -- --ignored --nocapture` prints it.

use std::fs;
use std::time::Instant;

use persia_kernels::Gradients;
use persia_server::node::{Node, NodeOptions};
use persia_types::config::LogSync;
use persia_types::id::hash_id;
use persia_types::tables::{PushRequest, Run, TableGradients};
use persia_types::{Id, ShardedIds};

use super::{log_options, options, owned, run};
use crate::stack::{schema, token};

const DIM: usize = 64;
const IDS: u64 = 4096;
const PUSHES: u64 = 300;
const ROWS: u64 = 500_000;

#[test]
#[ignore = "measures"]
#[allow(clippy::print_stdout, reason = "the measurement")]
fn replay_speed() {
    let (data, checkpoints) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let start = || {
        let log = Some(log_options(data.path(), LogSync::EverySecond));
        let options =
            NodeOptions { schema: schema(&[DIM]), capacity: 2 * ROWS, ..options(checkpoints.path(), log) };
        Node::new(options, owned(data.path())).unwrap()
    };
    let node = start();
    let run = Run { schema: schema(&[DIM]), admit_min_count: 1, admit_probability: 1.0, ..run(1, true) };
    node.begin(1, &run, false).unwrap();
    let rows = vec![0.5; IDS as usize * DIM];
    let began = Instant::now();
    for seq in 1..=PUSHES {
        let ids: std::collections::BTreeSet<Id> = (0..IDS).map(|at| hash_id(seq << 32 | at) % ROWS).collect();
        let ids = ShardedIds::group(&ids.into_iter().collect::<Vec<_>>()).unwrap();
        let gradients = Gradients::Rows(&rows[..ids.len() * DIM]);
        let tables = [TableGradients { table: 0, ids: &ids, gradients }];
        let request = PushRequest { token: token(0, seq), step: seq, lr_factor: 1.0, tables: &tables };
        node.push(None, &request).unwrap();
    }
    let pushed = began.elapsed().as_secs_f64();
    let expected = node.stats().unwrap().rows;
    drop(node);
    let bytes = fs::metadata(data.path().join("journal/1")).unwrap().len() as f64 / 1e6;
    let began = Instant::now();
    let node = start();
    let replayed = began.elapsed().as_secs_f64();
    assert_eq!(node.stats().unwrap().rows, expected);
    println!("{bytes:.0} MB pushed at {:.0} MB/s, replayed at {:.0} MB/s", bytes / pushed, bytes / replayed);
}
