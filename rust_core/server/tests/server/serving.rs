//! Tests of infer jobs: servers that serve a checkpoint and refuse every change.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use persia_server::exit::Exit;
use persia_server::node::{CheckpointRoot, Node, NodeOptions, RecoveryProgress, ServableCheckpoint};
use persia_store::checkpoint::{Head, Saver};
use persia_types::tables::LookupReport;
use persia_types::{Mode, Tables, TablesError, Token};
use persia_wire::client::{ClientOptions, Targets, WireTables};

use crate::stack::{JOB, Plan, Stack, lookup, push, run_of, schema, start_middleware, token};

const DIM: usize = 4;

fn ids() -> Vec<Vec<u64>> {
    vec![(0..500).collect()]
}

/// Train on two servers, and save the rows in `dir`. Returns the rows of all ids, as an evaluation look-up
/// reads them.
fn trained(dir: &Path, steps: u64) -> Vec<Vec<f32>> {
    let plan = Plan::new(2);
    let stack = Stack::start(plan.clone());
    let client = stack.client();
    let run = run_of(&plan);
    client.begin(&run).unwrap();
    for step in 1..=steps {
        push(&client, token(0, step), &[DIM], &ids()).unwrap();
    }
    let mut saver = Saver::begin(dir).unwrap();
    let saved = client.write_snapshot(saver.staging(), None).unwrap();
    saved.files.into_iter().for_each(|file| saver.add(file).unwrap());
    let head = Head {
        step: steps,
        world_size: 1,
        run,
        rows: BTreeMap::from([("table_0".to_owned(), saved.rows[0])]),
        tokens: BTreeMap::new(),
        cursors: BTreeMap::new(),
        build: BTreeMap::new(),
        created_at: String::new(),
        inputs: None,
        tables: client.stats().unwrap().tables,
    };
    saver.commit(head).unwrap();
    lookup(&client, token(0, steps), Mode::Eval, &[DIM], &ids()).unwrap().1
}

/// Start the servers of an infer job, and a client that is connected to them.
fn serving(dir: &Path, servers: u32) -> (Stack, WireTables, Token) {
    let stack = Stack::start(Plan { serves: Some(dir.to_owned()), capacity: 1, ..Plan::new(servers) });
    let client = stack.client();
    let (generation, served) = client.served().unwrap();
    assert_eq!((served.job.as_str(), served.path.as_str()), (JOB, dir.to_str().unwrap()));
    client.observe(&served.job, generation);
    (stack, client, Token { generation, ..token(0, served.step) })
}

#[test]
fn any_number_of_servers_serves_the_rows_of_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let expected = trained(dir.path(), 3);
    for servers in [1, 3] {
        let (_stack, client, token) = serving(dir.path(), servers);
        for mode in [Mode::Eval, Mode::Infer] {
            let (report, rows) = lookup(&client, token, mode, &[DIM], &ids()).unwrap();
            assert_eq!((report, &rows), (LookupReport { hits: 500, ..report }, &expected), "{servers}");
        }
        let unknown = vec![vec![7, 1 << 40]];
        let (report, rows) = lookup(&client, token, Mode::Infer, &[DIM], &unknown).unwrap();
        assert_eq!((report.hits, report.missing), (1, 1));
        assert_eq!(
            rows[0].iter().filter(|value| **value == 0.0).count(),
            DIM,
            "a missing row reads as zeros"
        );
        let stats = client.stats().unwrap();
        assert_eq!((stats.lookups.hits, stats.lookups.missing), (1001, 1), "{servers}");
        assert_eq!(
            (stats.tables[0].lookups, stats.tables[0].rows),
            (stats.lookups, 500),
            "all rows, with capacity 1"
        );
    }
}

#[test]
fn every_change_is_refused_by_the_name_of_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    let expected = trained(dir.path(), 2);
    let (stack, client, token) = serving(dir.path(), 2);
    let run = persia_types::tables::Run { generation: u64::MAX, fresh: true, ..run_of(&stack.plan) };
    let refused = [
        client.begin(&run).unwrap_err(),
        lookup(&client, token, Mode::Train, &[DIM], &ids()).unwrap_err(),
        push(&client, token, &[DIM], &ids()).unwrap_err(),
        client.prepare_snapshot(1).unwrap_err(),
        client.write_snapshot(dir.path(), None).unwrap_err(),
        client.restore(dir.path(), &[]).unwrap_err(),
        client.clear().unwrap_err(),
    ];
    for error in refused {
        let text = error.to_string();
        assert!(matches!(error, TablesError::Incompatible { .. }), "{text}");
        assert!(text.contains(" of 2") && text.contains("job_type: Infer"), "{text}");
    }
    assert_eq!(lookup(&client, token, Mode::Infer, &[DIM], &ids()).unwrap().1, expected);
}

#[test]
fn a_client_of_another_checkpoint_is_refused() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    trained(first.path(), 1);
    trained(second.path(), 2);
    let (_, _, before) = serving(first.path(), 1);
    let (_stack, client, token) = serving(second.path(), 1);
    assert_ne!(before.generation, token.generation);
    let error = lookup(&client, before, Mode::Infer, &[DIM], &ids()).unwrap_err().to_string();
    assert!(error.contains("not the checkpoint") && error.contains("wait_for_serving"), "{error}");
    lookup(&client, token, Mode::Infer, &[DIM], &ids()).unwrap();
}

#[test]
fn a_list_in_the_wrong_order_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    trained(dir.path(), 1);
    let (stack, ..) = serving(dir.path(), 2);
    let all = &stack.servers;
    for list in [vec![all[1].clone(), all[0].clone()], vec![all[0].clone()]] {
        let front = stack.block_on(start_middleware(&stack.plan, &list, stack.dir()));
        let options = ClientOptions { targets: Targets::Fixed(vec![front]), ..stack.options() };
        let error = WireTables::connect(options).unwrap().served().unwrap_err().to_string();
        assert!(error.contains("REPLICA_INDEX"), "{error}");
    }
}

#[test]
fn a_job_in_training_serves_no_checkpoint() {
    let stack = Stack::start(Plan::new(1));
    let error = stack.client().served().unwrap_err().to_string();
    assert!(error.contains("job_type: Infer") && error.contains("eval_ctx"), "{error}");
}

#[test]
fn a_damaged_checkpoint_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    trained(dir.path(), 1);
    let mut shards = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let shard = shards.find(|path| path.extension().is_some_and(|end| end == "arrow")).unwrap();
    let mut bytes = fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let plan = Plan::new(1);
    let options = NodeOptions {
        job: plan.job,
        index: 0,
        servers: 1,
        schema: schema(&[DIM]),
        capacity: 1,
        request_threads: 1,
        snapshot_threads: 1,
        max_copy_bytes: 1,
        checkpoints: CheckpointRoot::default(),
        turn_timeout: plan.turn_timeout,
        address: String::new(),
        log: None,
    };
    let checkpoint = ServableCheckpoint::open(dir.path(), Some(schema(&[DIM]))).unwrap();
    let Err(Exit::Corrupt(text)) = Node::serving(options, &checkpoint, &RecoveryProgress::default()) else {
        panic!("a damaged checkpoint is served")
    };
    assert!(text.contains("embedding_checkpoint") && text.contains(".arrow"), "{text}");
}
