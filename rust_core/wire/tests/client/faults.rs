//! Tests of look-ups and pushes under faults.

use std::time::{Duration, Instant};

use persia_types::TablesError;
use persia_wire::auth::Secret;
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::discovery::Service;

use crate::mock::{Fault, GENERATION, JOB, ids, lookup, push, start, start_with};

#[test]
fn rows_arrive_in_many_chunks_and_any_order() {
    let running = start(&[]);
    let client = running.client();
    for count in [0, 1, 50_000] {
        assert_eq!(lookup(&client, &ids(count)).unwrap().hits, count);
        assert_eq!(push(&client, &ids(count)).unwrap().rows_applied, count);
    }
}

#[test]
fn a_damaged_or_truncated_look_up_is_retried() {
    for fault in [Fault::Flip, Fault::DropRows, Fault::DropReport, Fault::Break] {
        let running = start(std::slice::from_ref(&fault));
        let report = lookup(&running.client(), &ids(30_000)).unwrap();
        assert_eq!(report.hits, 30_000);
        assert_eq!(running.calls(), ["lookup", "lookup"], "{fault:?}");
    }
}

#[test]
fn a_malformed_reply_is_not_retried() {
    let running = start(&[Fault::Twice]);
    let error = lookup(&running.client(), &ids(100)).unwrap_err();
    assert!(matches!(error, TablesError::Incompatible { .. }), "{error}");
    assert!(error.to_string().contains("its reply is invalid: part 0: rows"), "{error}");
    assert!(error.to_string().contains("arrived before"), "{error}");
    assert_eq!(running.calls(), ["lookup"]);
}

#[test]
fn a_method_that_the_peer_does_not_have_is_named() {
    let running = start(&[]);
    // The client expects a server at this address, but a middleware listens there.
    let options = ClientOptions { service: Service::Server, ..running.options() };
    let client = WireTables::connect(options).unwrap();
    let asked = [
        (lookup(&client, &ids(10)).map(drop), "Lookup"),
        (push(&client, &ids(10)).map(drop), "Stats"), // a push first requests the number of servers
    ];
    for (result, method) in asked {
        let error = result.unwrap_err();
        assert!(matches!(error, TablesError::Incompatible { .. }), "{error}");
        let text = error.to_string();
        let expected = format!(" does not implement the called method: persia.v1.EmbeddingServer/{method} (");
        assert!(text.contains(&expected), "{text}");
    }
    assert_eq!(running.calls(), [""; 0]);
}

#[test]
fn another_middleware_is_asked_when_one_hangs_or_is_gone() {
    let (hanging, good) = (start(&[Fault::Hang, Fault::Hang]), start(&[]));
    let unused = "127.0.0.1:1".parse().unwrap();
    let targets = Targets::Fixed(vec![unused, hanging.endpoint.clone(), good.endpoint.clone()]);
    let options =
        ClientOptions { rpc_timeout: Duration::from_secs(12), rank: 3, ..ClientOptions::new(targets) };
    let client = WireTables::connect(options).unwrap();
    lookup(&client, &ids(100)).unwrap();
    assert_eq!((hanging.calls().len(), good.calls().len()), (1, 1));
    push(&client, &ids(100)).unwrap();
    assert_eq!((hanging.calls().len(), good.calls().len()), (1, 2), "those that failed are passed over");
}

#[test]
fn a_rank_prefers_its_own_middleware() {
    let running = [start(&[]), start(&[])];
    let endpoints: Vec<_> = running.iter().map(|running| running.endpoint.clone()).collect();
    for rank in 0..4 {
        let options = ClientOptions { rank, ..ClientOptions::new(Targets::Fixed(endpoints.clone())) };
        lookup(&WireTables::connect(options).unwrap(), &ids(10)).unwrap();
    }
    assert_eq!([running[0].calls().len(), running[1].calls().len()], [2, 2]);
}

#[test]
fn a_deadline_names_peer_verb_token_and_seconds() {
    let running = start(&vec![Fault::Hang; 100]);
    let options = ClientOptions { rpc_timeout: Duration::from_secs(2), ..running.options() };
    let client = WireTables::connect(options).unwrap();
    let start = Instant::now();
    let error = lookup(&client, &ids(10)).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10));
    let text = error.to_string();
    assert!(matches!(error, TablesError::Unreachable { .. }), "{error}");
    let peer = format!("middleware at {}", running.endpoint);
    for part in [peer.as_str(), "look-up", "/4/1/1 of step 1", "no response within", "times in"] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn a_push_is_retried_on_the_servers_that_did_not_acknowledge() {
    let scripts: [(&[Fault], &[&[u32]]); 4] = [
        (&[Fault::Reach(&[0])], &[&[], &[1]]),
        (&[Fault::Reach(&[]), Fault::Reach(&[1])], &[&[], &[0, 1], &[0]]),
        (&[Fault::Forget(&[1])], &[&[], &[0]]),
        (&[Fault::Reach(&[0]), Fault::LoseReply], &[&[], &[1], &[1]]),
    ];
    for (script, only) in scripts {
        let running = start(script);
        let report = push(&running.client(), &ids(1000)).unwrap();
        assert_eq!((report.rows_pushed, report.rows_applied), (1000, 1000), "{script:?}");
        assert_eq!(running.mock.seen.lock().only, only, "{script:?}");
    }
}

#[test]
fn a_push_whose_reply_was_lost_is_retried_on_all_servers() {
    let running = start(&[Fault::LoseReply]);
    push(&running.client(), &ids(1000)).unwrap();
    let seen = running.mock.seen.lock();
    assert_eq!(seen.only, [[0u32; 0], []]);
    assert!(seen.asked.values().all(|times| *times == 2), "their tokens make it count once");
}

#[test]
fn a_refusal_is_permanent_and_keeps_its_variant() {
    let stale = || TablesError::StaleGeneration { token: crate::mock::token(1), current: 9 };
    let running = start(&[Fault::Fail(stale), Fault::Fail(stale)]);
    let client = running.client();
    let error = lookup(&client, &ids(10)).unwrap_err();
    assert!(matches!(error, TablesError::StaleGeneration { current: 9, .. }), "{error}");
    let error = push(&client, &ids(10)).unwrap_err();
    assert!(matches!(error, TablesError::StaleGeneration { current: 9, .. }), "{error}");
    assert_eq!(running.calls(), ["lookup", "push"]);
}

#[test]
fn a_run_that_servers_lost_is_reported_lost_once_it_has_begun() {
    let running = start(&[Fault::Fail(|| TablesError::NotBegun), Fault::Fail(|| TablesError::NotBegun)]);
    let client = running.client();
    let error = lookup(&client, &ids(10)).unwrap_err();
    assert!(matches!(error, TablesError::NotBegun), "{error}");
    client.join(JOB, GENERATION);
    let error = push(&client, &ids(10)).unwrap_err();
    assert!(matches!(error, TablesError::Lost { .. }), "{error}");
}

#[test]
fn an_unreachable_server_is_lost_once_the_run_has_begun() {
    let running = start(&vec![Fault::Reach(&[0]); 100]);
    let options = ClientOptions { rpc_timeout: Duration::from_secs(1), ..running.options() };
    let client = WireTables::connect(options.clone()).unwrap();
    client.join(JOB, GENERATION);
    let error = push(&client, &ids(100)).unwrap_err();
    assert!(matches!(&error, TablesError::Lost { peer, .. } if peer == "server 1 of 2"), "{error}");

    let options = ClientOptions { targets: Targets::Fixed(vec!["127.0.0.1:1".parse().unwrap()]), ..options };
    let client = WireTables::connect(options).unwrap();
    let error = lookup(&client, &ids(100)).unwrap_err();
    assert!(matches!(error, TablesError::Unreachable { .. }), "{error}");
    client.observe(JOB, GENERATION);
    let error = lookup(&client, &ids(100)).unwrap_err();
    assert!(matches!(error, TablesError::Unreachable { .. }), "who only reads loses nothing: {error}");
}

#[test]
fn an_unreachable_middleware_is_lost_once_the_run_has_begun() {
    let options = ClientOptions {
        targets: Targets::Fixed(vec!["127.0.0.1:1".parse().unwrap()]),
        rpc_timeout: Duration::from_secs(1),
        ..start(&[]).options()
    };
    let client = WireTables::connect(options).unwrap();
    client.join(JOB, GENERATION);
    let error = lookup(&client, &ids(100)).unwrap_err();
    assert!(matches!(error, TablesError::Lost { .. }), "{error}");
}

#[test]
fn a_token_that_is_missing_or_wrong_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let secret = |name: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, name.repeat(32)).unwrap();
        Secret::read(&path).unwrap()
    };
    let running = start_with(&[], Some(secret("right")), None);
    for wrong in [None, Some(secret("wrong"))] {
        let client = WireTables::connect(ClientOptions { secret: wrong, ..running.options() }).unwrap();
        for error in
            [lookup(&client, &ids(10)).unwrap_err(), client.wait_ready(Duration::from_secs(20)).unwrap_err()]
        {
            assert!(matches!(error, TablesError::Refused { .. }), "{error}");
            assert!(error.to_string().contains("PERSIA_TOKEN_FILE"), "{error}");
        }
    }
    let options = ClientOptions { secret: Some(secret("right")), ..running.options() };
    lookup(&WireTables::connect(options).unwrap(), &ids(10)).unwrap();
}

#[test]
fn buffers_that_do_not_fit_are_refused_before_anything_is_sent() {
    use persia_kernels::Gradients;
    use persia_types::Tables;
    use persia_types::tables::{LookupRequest, Mode, PushRequest, TableGradients, TableIds};
    let running = start(&[]);
    let client = running.client();
    let ids = ids(4);
    let tables = [TableIds { table: 0, ids: &ids, per_sample: None }];
    let request = LookupRequest { token: crate::mock::token(1), step: 1, mode: Mode::Eval, tables: &tables };
    for buffers in [&mut [][..], &mut [&mut [0.0; 7][..]], &mut [&mut [][..]]] {
        let error = client.lookup(&request, buffers).unwrap_err();
        assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
    }
    let tables = [TableGradients { table: 0, ids: &ids, gradients: Gradients::Rows(&[0.0; 7]) }];
    let request = PushRequest { token: crate::mock::token(1), step: 1, lr_factor: 1.0, tables: &tables };
    assert!(matches!(client.push(&request).unwrap_err(), TablesError::BadShape { .. }));
    assert_eq!(running.calls(), [""; 0]);
}
