//! Tests of servers that end during a run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use persia_kernels::{Csr, Gradients, SegmentSum};
use persia_types::tables::{PushRequest, TableGradients};
use persia_types::{Mode, ShardedIds, Tables, TablesError};
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::settings::Endpoint;

use crate::running::{PATIENCE, Process, Setting, plan, plan_of, wait_until};
use crate::stack::{Plan, lookup, push, run_of, token};

fn ids() -> Vec<Vec<u64>> {
    vec![(0..200).collect()]
}

fn impatient(endpoint: Endpoint, rpc_timeout_s: u64) -> WireTables {
    let mut options = ClientOptions::new(Targets::Fixed(vec![endpoint]));
    options.rpc_timeout = Duration::from_secs(rpc_timeout_s);
    WireTables::connect(options).unwrap()
}

/// Start two servers and a middleware, and begin a run.
fn begun() -> (Setting, [Process; 2], Process, WireTables) {
    let (setting, servers, middleware, client) = begun_with(Setting::new(), &plan(), 4);
    lookup(&client, token(0, 1), Mode::Train, &[4], &ids()).unwrap();
    (setting, servers, middleware, client)
}

fn begun_with(
    setting: Setting,
    plan: &Plan,
    rpc_timeout_s: u64,
) -> (Setting, [Process; 2], Process, WireTables) {
    let servers = [0, 1].map(|index| setting.server(index, 2, &[]));
    let addresses = format!("{},{}", servers[0].endpoint(), servers[1].endpoint());
    let middleware = setting.middleware(&["--servers", &addresses]);
    let client = impatient(middleware.endpoint(), rpc_timeout_s);
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&run_of(plan)).unwrap();
    (setting, servers, middleware, client)
}

#[test]
fn a_server_that_was_killed_is_named_and_the_run_is_lost() {
    let (_setting, mut servers, _middleware, client) = begun();
    let address = servers[1].endpoint().to_string();
    servers[1].kill();
    for error in [
        push(&client, token(0, 1), &[4], &ids()).unwrap_err(),
        lookup(&client, token(0, 2), Mode::Train, &[4], &ids()).unwrap_err(),
    ] {
        assert!(matches!(error, TablesError::Lost { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("server 1 of 2") && text.contains(&address), "{text}");
    }
    // The other server applied its part exactly once.
    let stats = client.stats().unwrap_err();
    assert!(stats.to_string().contains("server 1 of 2"), "{stats}");
}

#[test]
fn a_server_that_came_back_without_the_run_is_lost_too() {
    let (setting, mut servers, _middleware, client) = begun();
    let listen = servers[1].endpoint().to_string();
    servers[1].kill();
    servers[1] = setting.server(1, 2, &["--listen", &listen]);
    servers[1].logged("\"ready\"");
    for error in [
        lookup(&client, token(0, 2), Mode::Train, &[4], &ids()).unwrap_err(),
        push(&client, token(0, 1), &[4], &ids()).unwrap_err(),
    ] {
        let named = matches!(&error, TablesError::Lost { peer, .. } if peer.contains("server 1 of 2"));
        assert!(named, "{error}");
    }
}

/// Resumes a process when the test ends.
struct Stopped<'a>(&'a Process);

impl<'a> Stopped<'a> {
    fn stop(process: &'a Process) -> Self {
        process.signal("-STOP");
        // When kill returns, the signal may still be pending. Threads continue until one of them handles the signal.
        wait_until("every thread to stop", || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
            let mut stats =
                threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap());
            stats.all(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
        });
        Self(process)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal("-CONT");
    }
}

#[test]
fn a_server_that_hangs_is_named_and_the_run_is_lost() {
    let (_setting, servers, _middleware, client) = begun();
    let stopped = Stopped::stop(&servers[1]);
    for error in [
        push(&client, token(0, 1), &[4], &ids()).unwrap_err(),
        lookup(&client, token(0, 2), Mode::Train, &[4], &ids()).unwrap_err(),
    ] {
        let named = matches!(&error, TablesError::Lost { peer, .. } if peer.contains("server 1 of 2"));
        assert!(named, "{error}");
    }
    drop(stopped);
    wait_until("the server to resume", || client.stats().is_ok());
    lookup(&client, token(0, 2), Mode::Train, &[4], &ids()).unwrap();
}

/// The middleware sends the part of the first server first, and blocks when the queue of this server is full.
#[test]
fn a_server_that_blocks_a_large_push_is_named_and_not_the_one_after_it() {
    const DIM: usize = 64;
    const WIDE: &str = "slots_config:\n  a: {dim: 64}\n";
    let (_setting, servers, _middleware, client) = begun_with(Setting::of(WIDE), &plan_of(WIDE), 16);
    let _stopped = Stopped::stop(&servers[0]);
    // The push does not fit into the buffers between the middleware and a server that does not read. It is small
    // enough to be sent within one of four attempts.
    let ids = ShardedIds::group(&(0..700_000).collect::<Vec<u64>>()).unwrap();
    let rows = vec![0.5; ids.len() * DIM];
    let of_samples = vec![0.5; 10 * DIM];
    let starts: Vec<u32> = (0..=ids.len() as u32).collect();
    let samples: Vec<u32> = starts[1..].iter().map(|use_| use_ % 10).collect();
    let sum = SegmentSum {
        gradients: &of_samples,
        dim: DIM,
        csr: Csr { offsets: &starts, indices: &samples },
        per_sample_weights: None,
        factors: None,
        scale: 1.0,
    };
    for (seq, gradients) in [(1, Gradients::Rows(&rows)), (2, Gradients::Samples(sum))] {
        let tables = [TableGradients { table: 0, ids: &ids, gradients }];
        let push = PushRequest { token: token(0, seq), step: seq, lr_factor: 1.0, tables: &tables };
        let error = client.push(&push).unwrap_err();
        let named = matches!(&error, TablesError::Lost { peer, .. } if peer.contains("server 0 of 2"));
        assert!(named, "{error}");
    }
}

#[test]
fn a_middleware_that_was_killed_is_replaced_by_another_under_the_same_token() {
    let setting = Setting::new();
    let servers = [0, 1].map(|index| setting.server(index, 2, &[]));
    let addresses = format!("{},{}", servers[0].endpoint(), servers[1].endpoint());
    let mut middlewares = [0, 1].map(|_| setting.middleware(&["--servers", &addresses]));
    let targets = Targets::Fixed(middlewares.iter().map(Process::endpoint).collect());
    let client = WireTables::connect(ClientOptions::new(targets)).unwrap();
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&run_of(&plan())).unwrap();
    let first = lookup(&client, token(0, 1), Mode::Train, &[4], &ids()).unwrap();
    assert_eq!(first.0.initial, 200);
    middlewares[0].kill();
    let report = push(&client, token(0, 1), &[4], &ids()).unwrap();
    assert_eq!(report.rows_applied, 200);
    let stats = client.stats().unwrap();
    assert_eq!((stats.rows, stats.pushes.rows_applied, stats.pushes.rows_duplicate), (vec![200], 200, 0));
}

/// Clients look up repeatedly while the middleware that all of them use is killed and restarted.
#[test]
fn fifty_clients_come_back_at_once_and_all_are_served() {
    const CLIENTS: usize = 50;
    let setting = Setting::new();
    let servers = [0, 1].map(|index| setting.server(index, 2, &[]));
    let addresses = format!("{},{}", servers[0].endpoint(), servers[1].endpoint());
    // Use no port, because a connection to a free port can connect to itself and occupy the port.
    let listen = format!("unix:{}", setting.path("middleware.sock"));
    let start = || setting.middleware(&["--servers", &addresses, "--listen", &listen]);
    let mut middleware = start();
    let endpoint = middleware.endpoint();
    let first = impatient(endpoint.clone(), 30);
    first.wait_ready(PATIENCE).unwrap();
    let begun = run_of(&plan());
    first.begin(&begun).unwrap();
    lookup(&first, token(0, 1), Mode::Train, &[4], &ids()).unwrap();
    let served = [0; CLIENTS].map(|_| AtomicU64::new(0));
    let ended = AtomicBool::new(false);
    let all_served = |what: &str| {
        let before: Vec<u64> = served.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        // The look-up that a client counts next may have been answered earlier.
        let further = |(count, before): (&AtomicU64, u64)| count.load(Ordering::Relaxed) >= before + 2;
        wait_until(what, || served.iter().zip(before.iter().copied()).all(further));
    };
    std::thread::scope(|threads| {
        for count in &served {
            let client = impatient(endpoint.clone(), 30);
            client.join(&begun.job, begun.generation);
            let ended = &ended;
            threads.spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    lookup(&client, token(0, 1), Mode::Eval, &[4], &ids()).unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        all_served("every client to be served");
        middleware.kill();
        middleware = start();
        all_served("every client to be served again");
        ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(push(&first, token(0, 1), &[4], &ids()).unwrap().rows_applied, 200);
}
