//! Tests of servers that take longer to recover from a log than a request may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use persia_types::{Mode, Tables, TablesError};
use persia_wire::client::{ClientOptions, WireTables};

use crate::running::wait_until;
use crate::stack::{JOB, Plan, Stack, lookup, push, run_of, token};

const RPC_TIMEOUT: Duration = Duration::from_secs(1);

fn ids() -> Vec<Vec<u64>> {
    vec![(0..200).collect()]
}

/// Start servers that have not recovered the run in progress, and a client of this run.
fn resuming() -> (Stack, WireTables) {
    let plan = Plan { starting: true, ..Plan::new(2) };
    let stack = Stack::start(plan.clone());
    for (starting, node) in &stack.starting {
        node.begin(2, &run_of(&plan), false).unwrap();
        starting.progress().expect(1000);
    }
    let client = WireTables::connect(ClientOptions { rpc_timeout: RPC_TIMEOUT, ..stack.options() }).unwrap();
    client.join(JOB, run_of(&plan).generation);
    (stack, client)
}

#[test]
fn requests_wait_for_a_server_that_resumes_from_its_log() {
    let (stack, client) = resuming();
    let done = AtomicBool::new(false);
    let start = Instant::now();
    thread::scope(|threads| {
        let trains = threads.spawn(|| {
            let answer = lookup(&client, token(0, 1), Mode::Train, &[4], &ids());
            done.store(true, Ordering::Relaxed);
            answer
        });
        let asks = threads.spawn(|| client.stats());
        // Wait several times as long as a request may take.
        while start.elapsed() < 5 * RPC_TIMEOUT {
            stack.starting.iter().for_each(|(starting, _)| starting.progress().advance(10));
            assert!(!done.load(Ordering::Relaxed), "the servers have not resumed");
            thread::sleep(Duration::from_millis(50));
        }
        stack.starting.iter().for_each(|(starting, node)| starting.resumed(Arc::clone(node)));
        assert_eq!(trains.join().unwrap().unwrap().0.initial, 200);
        assert_eq!(asks.join().unwrap().unwrap().begun, 1);
    });
    assert_eq!(push(&client, token(0, 1), &[4], &ids()).unwrap().rows_applied, 200);
}

#[test]
fn a_server_that_makes_no_progress_is_lost() {
    let (stack, client) = resuming();
    stack.starting[0].0.progress().advance(437);
    let start = Instant::now();
    let error = lookup(&client, token(0, 1), Mode::Train, &[4], &ids()).unwrap_err();
    assert!(start.elapsed() < 20 * RPC_TIMEOUT, "{:?}", start.elapsed());
    let text = error.to_string();
    assert!(matches!(error, TablesError::Lost { .. }), "{text}");
    assert!(text.contains("is still reading its rows") && text.contains("makes no progress"), "{text}");
    // A process that waits until the servers are ready also gets their state.
    let fresh = stack.client();
    let error = fresh.wait_ready(Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error, TablesError::Recovering { .. }), "{error}");
    wait_until("the percents of the first server", || {
        let error = fresh.wait_ready(Duration::from_millis(300)).unwrap_err().to_string();
        error.contains("server 0 of 2") && error.contains("43 %") || error.contains("server 1 of 2")
    });
}
