//! Sends thousands of malformed requests: servers must not end, their memory must stay constant, and no row may
//! change.
//!
//! `PERSIA_HOSTILE=1000000 cargo test --release -p persia-embedding-sharded-server --test server hostile -- --nocapture` sends a
//! million.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::client::SendRequest;
use persia_types::{Id, Mode, ShardedIds, Tables, Token};
use persia_wire::auth::{Role, Secret};
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::floats::RowFormat;
use persia_wire::parts::Part;
use persia_wire::proto::{self, lookup_request, push_request};
use persia_wire::send::{id_chunks, row_chunks, word_chunks};
use persia_wire::settings::Endpoint;
use prost::Message;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::running::{PATIENCE, Process, Setting, plan};
use crate::stack::{Plan, lookup, push, run_of, token};

const IDS: u64 = 500;
/// The number of concurrent requests, each on its own connection.
const ATTACKERS: u64 = 16;
const SECRET: &str = "0123456789abcdef0123456789abcdef";
const UNKNOWN: i32 = 2;
const INTERNAL: i32 = 13;

/// A generator of pseudorandom numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        let len = self.below(most + 1);
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// An encoded request, before it is damaged.
struct Call {
    verb: &'static str,
    messages: Vec<Vec<u8>>,
}

/// A generation that a flipped bit cannot change to the generation in progress.
const OTHER_GENERATION: u64 = 0x5555_5555;
/// The methods that only the role admin may call.
const ADMIN: &[&str] =
    &["Begin", "PrepareSnapshot", "AbortSnapshot", "WriteSnapshot", "CommitSnapshot", "Restore", "Clear"];

/// Calls that are valid except for their generation. None may change a row, however it is damaged.
fn calls() -> Vec<Call> {
    let ids = ShardedIds::group(&(0..200).collect::<Vec<Id>>()).unwrap();
    let stale: proto::Token = Token { generation: OTHER_GENERATION, ..token(0, 1) }.into();
    let parts = vec![Part::new(0, RowFormat::f32(4), &ids).to_proto()];
    let mode = proto::Mode::Train.into();
    let asked = |part| proto::LookupRequest { part: Some(part) }.encode_to_vec();
    let pushed = |part| proto::PushRequest { part: Some(part) }.encode_to_vec();
    let head = |parts: &[proto::TablePart]| {
        asked(lookup_request::Part::Head(proto::LookupHead {
            token: Some(stale),
            step: 1,
            mode,
            parts: parts.into(),
        }))
    };
    let push_head = |parts: &[proto::TablePart]| {
        let parts = parts.into();
        let head = proto::PushHead { token: Some(stale), step: 1, lr_factor: 1.0, parts, only: vec![] };
        pushed(push_request::Part::Head(head))
    };
    // Each id occurs once, in two samples, with a weight.
    let uses: Vec<u32> = (0..ids.len() as u32).collect();
    let (half, all, one) = (uses.len() as u32 / 2, uses.len() as u32, [1.0_f32.to_bits()]);
    let weights = one.repeat(uses.len());
    let samples =
        proto::Samples { samples: 2, indices: all, per_sample_weights: true, factors: false, scale: 1.0 };
    let pooled = [proto::TablePart { samples: Some(samples), ..parts[0].clone() }];
    let bags = [&uses[..], &[0, half, all], &weights, &[]].concat();
    let of_ids: Vec<u32> = uses.iter().map(|at| at % 2).collect();
    let starts: Vec<u32> = (0..=all).collect();
    let sums = [&of_ids[..], &starts, &weights, &[]].concat();
    let words = |words: &[u32]| word_chunks(0, [words, &[], &[], &[]]).next().unwrap();
    let of_samples = row_chunks(0, RowFormat::f32(4), vec![1.0; 2 * 4]).next().unwrap();
    let chunk = id_chunks(0, ids.ids()).next().unwrap();
    let rows = row_chunks(0, RowFormat::f32(4), vec![1.0; ids.len() * 4]).next().unwrap();
    let fence = Some(proto::Fence { job: token(0, 1).job.0, generation: OTHER_GENERATION });
    let run = serde_json::to_string(&run_of(&plan())).unwrap();
    let begin = proto::BeginRequest { protocol: 1, version: "0".into(), servers: 1, run, check_only: true };
    let restore = proto::RestoreRequest { fence, directory: "a".into(), files: vec![], check_only: true };
    let saved = proto::CommitSnapshotRequest { fence, number: 1, directory: "a".into(), files: vec![] };
    let snapshot =
        proto::WriteSnapshotRequest { fence, directory: "a".into(), number: Some(1), check_only: false };
    vec![
        Call {
            verb: "Lookup",
            messages: vec![head(&parts), asked(lookup_request::Part::Ids(chunk.clone()))],
        },
        Call {
            verb: "Lookup",
            messages: vec![
                head(&pooled),
                asked(lookup_request::Part::Csr(words(&bags))),
                asked(lookup_request::Part::Ids(chunk.clone())),
            ],
        },
        Call {
            verb: "Push",
            messages: vec![
                push_head(&parts),
                pushed(push_request::Part::Ids(chunk.clone())),
                pushed(push_request::Part::Gradients(rows)),
            ],
        },
        Call {
            verb: "Push",
            messages: vec![
                push_head(&pooled),
                pushed(push_request::Part::Csr(words(&sums))),
                pushed(push_request::Part::Ids(chunk)),
                pushed(push_request::Part::Gradients(of_samples)),
            ],
        },
        Call { verb: "Begin", messages: vec![begin.encode_to_vec()] },
        Call {
            verb: "PrepareSnapshot",
            messages: vec![proto::PrepareSnapshotRequest { fence, number: 1 }.encode_to_vec()],
        },
        Call {
            verb: "AbortSnapshot",
            messages: vec![proto::AbortSnapshotRequest { fence, number: 1 }.encode_to_vec()],
        },
        Call { verb: "CommitSnapshot", messages: vec![saved.encode_to_vec()] },
        Call { verb: "WriteSnapshot", messages: vec![snapshot.encode_to_vec()] },
        Call { verb: "Restore", messages: vec![restore.encode_to_vec()] },
        Call { verb: "Clear", messages: vec![proto::ClearRequest { fence }.encode_to_vec()] },
        Call { verb: "Stats", messages: vec![vec![]] },
    ]
}

/// Damage some of the messages, or their order and number.
fn damage(messages: &[Vec<u8>], random: &mut Random) -> Vec<Vec<u8>> {
    let mut messages = messages.to_vec();
    for _ in 0..1 + random.below(3) {
        if messages.is_empty() {
            messages.push(random.bytes(200));
        }
        let at = random.below(messages.len());
        let len = messages[at].len();
        match random.below(7) {
            0 if len > 0 => messages[at][random.below(len)] ^= 1 << random.below(8),
            1 => messages[at].truncate(random.below(len + 1)),
            2 => messages[at] = random.bytes(2_000),
            3 => messages.insert(at, messages[random.below(messages.len())].clone()),
            4 => drop(messages.remove(at)),
            5 => {
                let to = random.below(messages.len());
                messages.swap(at, to);
            }
            // Insert nine 0xFF bytes, the start of a very large varint, at a random position.
            _ => {
                let from = random.below(len + 1);
                drop(messages[at].splice(from..from, [0xFF; 9]));
            }
        }
    }
    messages
}

/// A message in a gRPC frame, which sometimes claims a greater length or compression.
fn framed(message: &[u8], random: &mut Random) -> Bytes {
    let (flag, len) = match random.below(20) {
        0 => (0, u32::MAX),
        1 => (1, message.len() as u32),
        2 => (random.next() as u8, random.next() as u32),
        _ => (0, message.len() as u32),
    };
    let mut frame = BytesMut::with_capacity(message.len() + 5);
    frame.put_u8(flag);
    frame.put_u32(len);
    frame.put_slice(message);
    frame.freeze()
}

struct Attacker {
    random: Random,
    target: Endpoint,
    service: &'static str,
    secret: Secret,
    connection: Option<SendRequest<Bytes>>,
    /// The number of responses by gRPC status; -1 stands for no response.
    answers: BTreeMap<i32, u64>,
}

impl Attacker {
    async fn attack(&mut self, calls: &[Call]) {
        if self.random.below(50) == 0 {
            return self.noise().await;
        }
        let call = &calls[self.random.below(calls.len())];
        let mut role = [Role::Trainer, Role::Middleware, Role::Data][self.random.below(3)];
        if ADMIN.contains(&call.verb) && self.random.below(2) == 0 {
            role = Role::Admin;
        }
        let token = match self.random.below(10) {
            0 => None,
            1 => Some("0".repeat(64)),
            2 => Some(self.secret.token(Role::Nats).reveal().to_owned()),
            _ => Some(self.secret.token(role).reveal().to_owned()),
        };
        let claimed = if self.random.below(10) == 0 { Role::Admin } else { role };
        let messages = damage(&call.messages, &mut self.random);
        let status = match self.call(call.verb, claimed, token, &messages).await {
            Ok(status) => status,
            Err(_) => {
                self.connection = None;
                -1
            }
        };
        *self.answers.entry(status).or_default() += 1;
    }

    async fn call(
        &mut self,
        verb: &str,
        role: Role,
        token: Option<String>,
        messages: &[Vec<u8>],
    ) -> Result<i32, h2::Error> {
        let service = if self.random.below(20) == 0 { "Nothing" } else { self.service };
        let mut request = http::Request::post(format!("http://test/persia.v1.{service}/{verb}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("persia-role", role.name());
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if self.random.below(4) == 0 {
            request = request.header("grpc-timeout", format!("{}m", self.random.below(50)));
        }
        let mut connection = match self.connection.take() {
            Some(connection) => connection.ready().await?,
            None => connect(&self.target).await?,
        };
        let (answer, mut body) = connection.send_request(request.body(()).unwrap(), false)?;
        self.connection = Some(connection);
        for message in messages {
            // Data that exceeds the window is cancelled together with the request.
            body.send_data(framed(message, &mut self.random), false)?;
        }
        if self.random.below(10) == 0 {
            body.send_reset(h2::Reason::CANCEL);
            return Ok(-1);
        }
        body.send_data(Bytes::new(), true)?;
        let (head, mut body) = answer.await?.into_parts();
        while let Some(data) = body.data().await {
            body.flow_control().release_capacity(data?.len())?;
        }
        let trailers = body.trailers().await?.unwrap_or(head.headers);
        let said = |name| trailers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let status = said("grpc-status").parse().unwrap_or(-1);
        // The error that the gRPC layer returns for an invalid message.
        let undecoded = ["decod", "Missing%20request", "compression", "compressed", "protocol"];
        let known = status != INTERNAL || undecoded.iter().any(|word| said("grpc-message").contains(word));
        assert!(known, "{verb}: {}", said("grpc-message"));
        Ok(status)
    }

    /// Send bytes that are not HTTP from the start or from some point on.
    async fn noise(&mut self) {
        let Endpoint::Tcp { host, port } = &self.target else { panic!("a TCP port") };
        let mut stream = TcpStream::connect((host.as_str(), *port)).await.unwrap();
        if self.random.below(2) == 0 {
            let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        }
        let _ = stream.write_all(&self.random.bytes(3_000)).await;
        *self.answers.entry(-1).or_default() += 1;
    }
}

async fn connect(target: &Endpoint) -> Result<SendRequest<Bytes>, h2::Error> {
    let Endpoint::Tcp { host, port } = target else { panic!("a TCP port") };
    let stream = TcpStream::connect((host.as_str(), *port)).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await?;
    tokio::spawn(connection);
    client.ready().await
}

fn resident_mib(process: &Process) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

/// Send `count` requests to a server and a middleware, and print how they were answered.
fn attack(targets: &[Endpoint; 2], secret: &Secret, seed: u64, count: u64) -> BTreeMap<i32, u64> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (calls, sent) = (Arc::new(calls()), Arc::new(AtomicU64::new(0)));
    let attackers = (0..ATTACKERS).map(|number| {
        let (calls, sent) = (Arc::clone(&calls), Arc::clone(&sent));
        let mut attacker = Attacker {
            random: Random(seed << 32 | number),
            target: targets[number as usize % 2].clone(),
            service: ["EmbeddingServer", "Middleware"][number as usize % 2],
            secret: secret.clone(),
            connection: None,
            answers: BTreeMap::new(),
        };
        runtime.spawn(async move {
            while sent.fetch_add(1, Ordering::Relaxed) < count {
                let one = tokio::time::timeout(PATIENCE, attacker.attack(&calls));
                one.await.expect("an answer, or the end of the connection");
            }
            attacker.answers
        })
    });
    let attackers: Vec<_> = attackers.collect();
    let mut answers = BTreeMap::new();
    for attacker in attackers {
        for (status, count) in runtime.block_on(attacker).unwrap() {
            *answers.entry(status).or_default() += count;
        }
    }
    runtime.shutdown_timeout(Duration::from_secs(5));
    answers
}

#[test]
fn hostile_requests_change_nothing_and_leave_everything_up() {
    let count: u64 = std::env::var("PERSIA_HOSTILE").map_or(6_000, |count| count.parse().unwrap());
    let setting = Setting::new();
    let path = setting.path("token");
    fs::write(&path, SECRET).unwrap();
    let secret = Secret::read(Path::new(&path)).unwrap();
    let server = setting.server(0, 1, &["--token-file", &path]);
    let address = server.endpoint().to_string();
    let middleware = setting.middleware(&["--token-file", &path, "--servers", &address]);
    let options = ClientOptions {
        secret: Some(secret.clone()),
        ..ClientOptions::new(Targets::Fixed(vec![middleware.endpoint()]))
    };
    let client = WireTables::connect(options).unwrap();
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&run_of(&Plan { servers: 1, ..plan() })).unwrap();
    let ids = [(0..IDS).collect::<Vec<Id>>()];
    lookup(&client, token(0, 1), Mode::Train, &[4], &ids).unwrap();
    push(&client, token(0, 1), &[4], &ids).unwrap();
    let rows = || lookup(&client, token(0, 2), Mode::Eval, &[4], &ids).unwrap().1;
    let before = rows();

    let targets = [server.endpoint(), middleware.endpoint()];
    attack(&targets, &secret, 1, count / 10); // by now, the server has allocated its memory for connections
    let memory = [&server, &middleware].map(resident_mib);
    let answers = attack(&targets, &secret, 2, count);
    let grown = [&server, &middleware].map(resident_mib);

    let text = format!("{answers:?}, MiB {memory:?} -> {grown:?}");
    std::io::Write::write_all(&mut std::io::stderr(), format!("{text}\n").as_bytes()).unwrap();
    assert_eq!(answers.get(&UNKNOWN), None, "{text}");
    let refused: u64 = answers.iter().filter(|(status, _)| **status > 0).map(|(_, count)| count).sum();
    assert!(refused > count / 2, "{text}");
    for (process, (memory, grown)) in [&server, &middleware].into_iter().zip(memory.into_iter().zip(grown)) {
        assert!(grown < memory + 64, "{text}");
        assert!(!process.log().contains("panicked"), "{}", process.log());
    }
    assert_eq!(rows(), before);
    push(&client, token(0, 1), &[4], &ids).unwrap(); // the push still counts as a duplicate
    assert_eq!(rows(), before);
    lookup(&client, token(0, 3), Mode::Train, &[4], &ids).unwrap();
    push(&client, token(0, 3), &[4], &ids).unwrap();
    assert_ne!(rows(), before, "training continues");
}
