//! Tests of requests that are refused before they cost or change anything.

use std::time::Duration;

use persia_types::tables::Run;
use persia_types::{Id, Mode, ShardedIds, Tables, TablesError};
use persia_wire::auth::{Credentials, Role};
use persia_wire::error::from_status;
use persia_wire::floats::RowFormat;
use persia_wire::parts::Part;
use persia_wire::proto::embedding_server_client::EmbeddingServerClient;
use persia_wire::proto::{self, BeginRequest, lookup_request, push_request};
use persia_wire::send::{id_chunks, row_chunks};
use persia_wire::{PROTOCOL, VERSION, bounded};
use tonic::Status;

use crate::stack::{Plan, Stack, lookup, push, run_of, token};

const DIMS: [usize; 1] = [4];

fn begun(servers: u32) -> (Stack, persia_wire::client::WireTables) {
    let stack = Stack::start(Plan::new(servers));
    let client = stack.client();
    client.begin(&run_of(&stack.plan)).unwrap();
    (stack, client)
}

/// Call a server directly, without the checks of the client.
fn raw_lookup(stack: &Stack, server: usize, messages: Vec<lookup_request::Part>) -> Result<(), Status> {
    let endpoint = stack.servers[server].clone();
    stack.block_on(async {
        let credentials = Credentials::new(Role::Trainer, None);
        let channel = endpoint.channel(None).unwrap();
        let mut client = bounded!(EmbeddingServerClient::with_interceptor(channel, credentials));
        let messages = messages.into_iter().map(|part| proto::LookupRequest { part: Some(part) });
        let mut replies = client.lookup(tokio_stream::iter(messages)).await?.into_inner();
        while replies.message().await?.is_some() {}
        Ok(())
    })
}

fn raw_push(stack: &Stack, messages: Vec<push_request::Part>) -> Result<proto::PushReply, Status> {
    let endpoint = stack.servers[0].clone();
    stack.block_on(async {
        let credentials = Credentials::new(Role::Trainer, None);
        let channel = endpoint.channel(None).unwrap();
        let mut client = bounded!(EmbeddingServerClient::with_interceptor(channel, credentials));
        let messages = messages.into_iter().map(|part| proto::PushRequest { part: Some(part) });
        Ok(client.push(tokio_stream::iter(messages)).await?.into_inner())
    })
}

fn head(ids: &ShardedIds) -> proto::LookupHead {
    let mode = proto::Mode::Train.into();
    let parts = vec![Part::new(0, RowFormat::f32(4), ids).to_proto()];
    proto::LookupHead { token: Some(token(0, 1).into()), step: 1, mode, parts }
}

fn some_ids() -> ShardedIds {
    ShardedIds::group(&(0..500).collect::<Vec<Id>>()).unwrap()
}

pub(crate) fn memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn claims_cost_nothing() {
    let (stack, _client) = begun(1);
    let mut head = head(&some_ids());
    head.parts[0].shard_counts = vec![u32::MAX; 256];
    let status = raw_lookup(&stack, 0, vec![lookup_request::Part::Head(head.clone())]).unwrap_err();
    assert!(matches!(from_status("", &status), TablesError::TooManyIds { .. }), "{status}");

    let before = memory_kib();
    head.parts[0].shard_counts = vec![7_800; 256];
    head.parts[0].dim = 128;
    for _ in 0..20 {
        let status = raw_lookup(&stack, 0, vec![lookup_request::Part::Head(head.clone())]).unwrap_err();
        assert!(status.message().contains("cut short"), "{status}");
    }
    // A server that trusted such a request would allocate a gigabyte.
    assert!(memory_kib() - before < 200 * 1024, "{} KiB more", memory_kib() - before);
}

/// A request whose body does not arrive holds its memory. Later requests wait for the memory, on any connection.
#[test]
fn the_memory_of_requests_in_flight_is_bounded() {
    let stack = Stack::start(Plan { request_memory: 3, ..Plan::new(1) });
    let client = stack.client();
    client.begin(&run_of(&stack.plan)).unwrap();
    let open = || {
        let channel = stack.servers[0].channel(None).unwrap();
        bounded!(EmbeddingServerClient::with_interceptor(channel, Credentials::new(Role::Trainer, None)))
    };
    let ids = ShardedIds::group(&(0..100_000).collect::<Vec<Id>>()).unwrap(); // 2.3 MiB with gradients
    let parts = vec![Part::new(0, RowFormat::f32(4), &ids).to_proto()];
    let token = Some(token(0, 1).into());
    let push_head = proto::PushHead { token, step: 1, lr_factor: 1.0, parts, only: vec![] };
    stack.block_on(async {
        let (body, messages) = tokio::sync::mpsc::channel(4);
        body.send(proto::PushRequest { part: Some(push_request::Part::Head(push_head)) }).await.unwrap();
        let mut first = open();
        let held = tokio::spawn(async move {
            first.push(tokio_stream::wrappers::ReceiverStream::new(messages)).await.map(drop)
        });
        let lookup = |limit: Duration| {
            let head = proto::LookupHead { mode: proto::Mode::Eval.into(), ..head(&ids) };
            let messages = [lookup_request::Part::Head(head)].into_iter();
            let messages = messages.chain(id_chunks(0, ids.ids()).map(lookup_request::Part::Ids));
            let messages: Vec<_> = messages.map(|part| proto::LookupRequest { part: Some(part) }).collect();
            let mut request = tonic::Request::new(tokio_stream::iter(messages));
            request.set_timeout(limit);
            let mut client = open();
            async move {
                let mut replies = client.lookup(request).await?.into_inner();
                while replies.message().await?.is_some() {}
                Ok::<(), Status>(())
            }
        };
        // Look-ups are served until the head of the push has arrived. On a slow machine, a look-up may time out.
        let start = std::time::Instant::now();
        let refused = loop {
            match lookup(Duration::from_secs(1)).await {
                Err(status) if status.code() == tonic::Code::Unavailable => break status,
                answer => assert!(start.elapsed() < Duration::from_secs(60), "{answer:?}"),
            }
        };
        assert!(refused.message().contains("other requests hold 3 of 3 MiB"), "{refused}");
        let waiting = tokio::spawn(lookup(Duration::from_secs(60)));
        drop(body); // the push ends without its ids
        let ended = held.await.unwrap().unwrap_err();
        assert!(ended.message().contains("cut short"), "{ended}");
        waiting.await.unwrap().unwrap();
    });
}

/// In a reproducible run, a request that waits for its turn holds memory that the previous request may need.
#[test]
fn a_request_whose_turn_it_is_does_not_wait_for_memory() {
    let stack = Stack::start(Plan { request_memory: 3, ..Plan::new(1) });
    let client = stack.client();
    client.begin(&Run { world_size: 2, reproducible: true, ..run_of(&stack.plan) }).unwrap();
    let ids = ShardedIds::group(&(0..100_000).collect::<Vec<Id>>()).unwrap();
    let open = || {
        let channel = stack.servers[0].channel(None).unwrap();
        bounded!(EmbeddingServerClient::with_interceptor(channel, Credentials::new(Role::Trainer, None)))
    };
    let lookup = |rank: u32, mode: proto::Mode, seconds: u64| {
        let head = proto::LookupHead { token: Some(token(rank, 1).into()), mode: mode.into(), ..head(&ids) };
        let messages = [lookup_request::Part::Head(head)].into_iter();
        let messages = messages.chain(id_chunks(0, ids.ids()).map(lookup_request::Part::Ids));
        let messages: Vec<_> = messages.map(|part| proto::LookupRequest { part: Some(part) }).collect();
        let mut request = tonic::Request::new(tokio_stream::iter(messages));
        request.set_timeout(Duration::from_secs(seconds));
        let mut client = open();
        async move {
            let mut replies = client.lookup(request).await?.into_inner();
            while replies.message().await?.is_some() {}
            Ok::<(), Status>(())
        }
    };
    stack.block_on(async {
        let later = tokio::spawn(lookup(1, proto::Mode::Train, 60));
        while lookup(0, proto::Mode::Eval, 1).await.is_ok() {} // until rank 1 holds the memory
        lookup(0, proto::Mode::Train, 60).await.unwrap();
        later.await.unwrap().unwrap();
    });
}

#[test]
fn damage_is_found_and_changes_nothing() {
    let (stack, client) = begun(1);
    let ids = some_ids();
    let all = [ids.ids().to_vec()];
    lookup(&client, token(0, 1), Mode::Train, &DIMS, &all).unwrap();
    let chunk = |flip: bool| {
        let mut chunk = id_chunks(0, ids.ids()).next().unwrap();
        let mut data = chunk.data.to_vec();
        data[9] ^= u8::from(flip);
        chunk.data = data.into();
        chunk
    };
    let flipped = vec![lookup_request::Part::Head(head(&ids)), lookup_request::Part::Ids(chunk(true))];
    let status = raw_lookup(&stack, 0, flipped).unwrap_err();
    assert!(status.message().contains("damaged in transit"), "{status}");

    let head = proto::PushHead {
        token: Some(token(0, 1).into()),
        step: 1,
        lr_factor: 1.0,
        parts: head(&ids).parts,
        only: vec![],
    };
    let mut gradient = row_chunks(0, RowFormat::f32(4), vec![1.0; ids.len() * 4]).next().unwrap();
    gradient.crc32c ^= 1;
    let messages = vec![
        push_request::Part::Head(head.clone()),
        push_request::Part::Ids(chunk(false)),
        push_request::Part::Gradients(gradient.clone()),
    ];
    assert!(raw_push(&stack, messages).unwrap_err().message().contains("damaged in transit"));
    let cut = vec![push_request::Part::Head(head.clone()), push_request::Part::Ids(chunk(false))];
    assert!(raw_push(&stack, cut).unwrap_err().message().contains("cut short"));
    let rows = lookup(&client, token(0, 2), Mode::Eval, &DIMS, &all).unwrap().1;
    assert!(rows[0].iter().all(|weight| *weight == 0.0));

    gradient.crc32c ^= 1;
    let good = vec![
        push_request::Part::Head(head),
        push_request::Part::Ids(chunk(false)),
        push_request::Part::Gradients(gradient),
    ];
    raw_push(&stack, good).expect("what was refused has not used the token up");
    let rows = lookup(&client, token(0, 2), Mode::Eval, &DIMS, &all).unwrap().1;
    assert!(rows[0].iter().all(|weight| *weight == -1.0));
}

#[test]
fn ids_of_another_server_and_of_another_shard_are_refused() {
    let (stack, _client) = begun(3);
    let ids = some_ids();
    let chunk = || id_chunks(0, ids.ids()).next().unwrap();
    let whole = vec![lookup_request::Part::Head(head(&ids)), lookup_request::Part::Ids(chunk())];
    let error = from_status("", &raw_lookup(&stack, 1, whole).unwrap_err());
    assert!(matches!(error, TablesError::WrongShard { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("server 1 of 3") && text.contains("the shards 85 to 169"), "{text}");

    let mut swapped = head(&ids);
    swapped.parts[0].shard_counts.reverse();
    let messages = vec![lookup_request::Part::Head(swapped), lookup_request::Part::Ids(chunk())];
    let error = from_status("", &raw_lookup(&stack, 0, messages).unwrap_err());
    assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
}

#[test]
fn messages_out_of_place_are_refused() {
    let (stack, _client) = begun(1);
    let ids = some_ids();
    let (head, chunk) = (head(&ids), id_chunks(0, ids.ids()).next().unwrap());
    use lookup_request::Part::{Head, Ids};
    let mut elsewhere = chunk.clone();
    elsewhere.part = 3;
    let mut huge = chunk.clone();
    huge.first = u64::MAX;
    let sequences = [
        vec![],
        vec![Ids(chunk.clone())],
        vec![Head(head.clone()), Head(head.clone())],
        vec![Head(head.clone()), Ids(chunk.clone()), Ids(chunk.clone())],
        vec![Head(head.clone()), Ids(elsewhere)],
        vec![Head(head), Ids(huge)],
    ];
    for messages in sequences {
        let status = raw_lookup(&stack, 0, messages).unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
    }
}

#[test]
fn another_job_generation_count_or_version_is_refused() {
    let (stack, client) = begun(2);
    let run = Run { generation: 2, continues: 1, ..run_of(&stack.plan) };
    let error = client.begin(&Run { job: "another".into(), ..run.clone() }).unwrap_err();
    assert!(matches!(error, TablesError::Incompatible { .. }), "{error}");
    assert!(error.to_string().contains("\"another\"") && error.to_string().contains("\"test\""), "{error}");
    let stale = persia_types::Token { generation: 9, ..token(0, 1) };
    let error = push(&client, stale, &DIMS, &[vec![1, 2]]).unwrap_err();
    assert!(matches!(error, TablesError::StaleGeneration { current: 1, .. }), "{error}");

    let begin = |change: &dyn Fn(&mut BeginRequest)| {
        let run = serde_json::to_string(&run).unwrap();
        let mut request =
            BeginRequest { protocol: PROTOCOL, version: VERSION.into(), servers: 2, run, check_only: true };
        change(&mut request);
        stack.block_on(async {
            let channel = stack.servers[1].channel(None).unwrap();
            let admin = Credentials::new(Role::Admin, None);
            let answer = EmbeddingServerClient::with_interceptor(channel, admin).begin(request).await;
            answer.map(drop).map_err(|status| from_status("", &status).to_string())
        })
    };
    begin(&|_| {}).unwrap();
    let error = begin(&|request| request.servers = 3).unwrap_err();
    assert!(error.contains("it has REPLICA_SIZE=2, but the caller expects REPLICA_SIZE=3"), "{error}");
    let error = begin(&|request| request.protocol = 99).unwrap_err();
    assert!(error.contains(&format!("protocol {PROTOCOL}")) && error.contains("99"), "{error}");
    let error = begin(&|request| request.version = "0.0.1".into()).unwrap_err();
    assert!(error.contains("0.0.1") && error.contains(VERSION), "{error}");
    let error = begin(&|request| request.run = "{}".into()).unwrap_err();
    assert!(error.contains("the run in the request is invalid"), "{error}");
}

#[test]
fn servers_say_whether_a_directory_takes_files() {
    let (stack, client) = begun(2);
    let dir = stack.dir().join("saves");
    std::fs::create_dir(&dir).unwrap();
    client.check_storage(&dir).unwrap();
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    std::fs::remove_dir(&dir).unwrap();
    let error = client.check_storage(&dir).unwrap_err();
    assert!(matches!(error, TablesError::Io { .. }) && error.to_string().contains("saves"), "{error}");
}

#[test]
fn snapshots_stay_below_their_root() {
    let (stack, _client) = begun(1);
    for directory in ["..", "a/../..", "/etc", "nowhere-at-all"] {
        let status = stack.block_on(async {
            let channel = stack.servers[0].channel(None).unwrap();
            let admin = Credentials::new(Role::Admin, None);
            let fence = Some(proto::Fence { job: token(0, 1).job.0, generation: 1 });
            let request =
                proto::WriteSnapshotRequest { fence, directory: directory.into(), ..Default::default() };
            EmbeddingServerClient::with_interceptor(channel, admin).write_snapshot(request).await.unwrap_err()
        });
        let error = from_status("", &status);
        assert!(matches!(error, TablesError::BadShape { .. } | TablesError::Io { .. }), "{error}");
    }
}
