//! Tests of the binaries: processes, signals, and nats-server.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use persia_types::{Tables, TablesError};
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::discovery::{Discovery, DiscoveryOptions, Service};
use persia_wire::settings::Endpoint;

use crate::running::{MIDDLEWARE, Nats, PATIENCE, Process, SERVER, Setting, client_of, plan, wait_until};
use crate::stack::{JOB, Plan, run_of};

fn http(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The exit code of `--health`, with both files of slots, as in a container whose entry point removes one of them.
fn probe(setting: &Setting, binary: &str, endpoint: &Endpoint) -> i32 {
    let listen = endpoint.to_string();
    let mut probe = setting.start(binary, &["--health", "--listen", &listen, "--config", "persia.yml"]);
    probe.ended().code().unwrap()
}

#[test]
fn started_in_reverse_order_everything_finds_everything_and_nats_may_go() {
    let setting = Setting::new();
    let mut nats = Nats::stopped();
    let url = nats.url();
    let middleware = setting.middleware(&["--nats-url", &url]);
    middleware.logged("waiting for NATS");
    assert_eq!(probe(&setting, MIDDLEWARE, &middleware.endpoint()), 1);
    assert!(http(&middleware.metrics(), "/health").starts_with("HTTP/1.1 503"));
    let servers = [1, 0].map(|index| setting.server(index, 2, &["--nats-url", &url]));
    nats.start();
    for process in servers.iter().chain([&middleware]) {
        process.logged("\"ready\"");
    }
    assert_eq!(probe(&setting, MIDDLEWARE, &middleware.endpoint()), 0);
    assert_eq!(probe(&setting, SERVER, &servers[0].endpoint()), 0);
    assert!(http(&middleware.metrics(), "/health").starts_with("HTTP/1.1 200"));

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = DiscoveryOptions { url, job: JOB.into(), token: None };
    let discovery = runtime.block_on(Discovery::connect(options)).unwrap();
    let found = |service| runtime.block_on(discovery.find(service, PATIENCE)).unwrap_or_default();
    let peers = found(Service::Server);
    let indexes: Vec<(u32, u32)> = peers.iter().map(|peer| (peer.index, peer.replicas)).collect();
    assert_eq!(indexes, [(0, 2), (1, 2)]);
    assert_eq!(peers[1].address, Some(servers[0].endpoint()));
    assert_eq!(peers[1].metadata["metrics"], servers[0].metrics());

    let client = WireTables::connect(ClientOptions::new(Targets::Discovered(discovery.clone()))).unwrap();
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&run_of(&plan())).unwrap();
    let train = |seq| {
        let ids = vec![(0..100).collect::<Vec<u64>>()];
        let token = crate::stack::token(0, seq);
        crate::stack::lookup(&client, token, persia_types::Mode::Train, &[4], &ids).unwrap();
        crate::stack::push(&client, token, &[4], &ids).unwrap();
    };
    train(1);
    nats.stop();
    train(2);
    nats.start();
    train(3);
    wait_until("new announcements", || {
        found(Service::Server).len() == 2 && found(Service::Middleware).len() == 1
    });

    let metrics = http(&servers[0].metrics(), "/metrics");
    for series in [
        "persia_request_duration_seconds_bucket{method=\"lookup\"",
        "persia_lookup_rows_total{outcome=\"initial\"}",
        "persia_push_rows_total{outcome=\"applied\"}",
        "persia_row_changes_total{change=\"inserted\"}",
        "persia_rows{table=\"a\"}",
        "persia_generation 1",
        "persia_connections",
        "persia_memory_bytes",
        "persia_start_duration_seconds",
        "persia_process_info{service=\"persia-server\",replica=\"1\",version=",
        "process_resident_memory_bytes",
    ] {
        assert!(metrics.contains(series), "{series} is missing in\n{metrics}");
    }
}

#[test]
fn sigterm_lets_connections_finish_and_ends_with_zero() {
    let setting = Setting::new();
    let mut server = setting.server(0, 1, &["--data-dir", &setting.path("data")]);
    let mut middleware = setting.middleware(&["--servers", &server.endpoint().to_string()]);
    let client = client_of(middleware.endpoint());
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&run_of(&Plan { servers: 1, ..plan() })).unwrap();
    for process in [&middleware, &server] {
        process.signal("-TERM");
        process.logged("waiting for open connections");
    }
    // Open connections continue to be served, and new ones are refused.
    let ids = vec![vec![1, 2, 3]];
    crate::stack::lookup(&client, crate::stack::token(0, 1), persia_types::Mode::Train, &[4], &ids).unwrap();
    assert_eq!(probe(&setting, MIDDLEWARE, &middleware.endpoint()), 1);
    drop(client);
    assert_eq!(middleware.ended().code(), Some(0), "{}", middleware.log());
    assert_eq!(server.ended().code(), Some(0), "{}", server.log());
    // The next process that uses the directory reads the generation.
    let server = setting.server(0, 1, &["--data-dir", &setting.path("data")]);
    let options = ClientOptions {
        service: Service::Server,
        ..ClientOptions::new(Targets::Fixed(vec![server.endpoint()]))
    };
    let client = WireTables::connect(options).unwrap();
    assert_eq!(client.highest_generation().unwrap(), 1);
    assert!(client.begin(&run_of(&Plan { servers: 1, ..plan() })).is_err());
}

#[test]
fn the_grace_period_ends_the_wait_for_connections() {
    let setting = Setting::new();
    let mut server = setting.server(0, 1, &["--stop-grace", "1"]);
    let options = ClientOptions {
        service: Service::Server,
        ..ClientOptions::new(Targets::Fixed(vec![server.endpoint()]))
    };
    let client = WireTables::connect(options).unwrap();
    client.wait_ready(PATIENCE).unwrap();
    server.signal("-INT");
    assert_eq!(server.ended().code(), Some(0));
    server.logged("still open");
}

#[test]
fn a_second_signal_ends_the_grace_period() {
    let setting = Setting::new();
    let mut server = setting.server(0, 1, &["--stop-grace", "3600"]);
    let options = ClientOptions {
        service: Service::Server,
        ..ClientOptions::new(Targets::Fixed(vec![server.endpoint()]))
    };
    let client = WireTables::connect(options).unwrap();
    client.wait_ready(PATIENCE).unwrap();
    server.signal("-TERM");
    server.logged("waiting for open connections");
    server.signal("-INT");
    assert_eq!(server.ended().code(), Some(0));
    server.logged("second signal");
}

#[test]
fn unauthenticated_calls_are_counted_and_do_not_fill_the_log() {
    let setting = Setting::new();
    let token = setting.path("token");
    fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    let server = setting.server(0, 1, &["--token-file", &token]);
    let (endpoint, start) = (server.endpoint(), Instant::now());
    const CALLS: usize = 30;
    for _ in 0..CALLS {
        let options = ClientOptions {
            service: Service::Server,
            ..ClientOptions::new(Targets::Fixed(vec![endpoint.clone()]))
        };
        let error = WireTables::connect(options).unwrap().wait_ready(PATIENCE).unwrap_err();
        assert!(matches!(error, TablesError::Refused { .. }), "{error}");
    }
    server.logged("call refused: ");
    let is_refusal =
        |line: &&str| ["call refused: ", "calls refused, "].iter().any(|text| line.contains(text));
    let lines: Vec<_> = server.log().lines().filter(is_refusal).map(str::to_owned).collect();
    assert!((1..=1 + start.elapsed().as_secs() as usize).contains(&lines.len()), "{lines:?}");
    assert!(lines[0].contains("127.0.0.1:") && lines[0].contains("PERSIA_TOKEN_FILE"), "{}", lines[0]);
    let metrics = http(&server.metrics(), "/metrics");
    let counted = metrics.lines().find_map(|line| line.strip_prefix("persia_refused_calls_total "));
    assert!(counted.is_some_and(|count| count.parse::<usize>().unwrap() >= CALLS), "{metrics}");
}

#[test]
fn a_token_that_nats_refuses_ends_the_process() {
    let setting = Setting::new();
    let token = setting.path("token");
    fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    let mut nats = Nats::stopped();
    nats.start_with(&["--user", "persia", "--pass", "another"]);
    let url = nats.url();
    for binary in [SERVER, MIDDLEWARE] {
        let process = setting.start(binary, &["--nats-url", &url, "--token-file", &token]);
        let (code, line) = process.fails();
        assert_eq!(code, 5, "{line}");
        assert!(line.contains(&url) && line.contains("PERSIA_TOKEN_FILE"), "{line}");
    }
}

#[test]
fn what_cannot_work_says_so_in_one_line() {
    let setting = Setting::new();
    let token = setting.path("token");
    fs::write(&token, "too short").unwrap();
    let broken = setting.path("broken.yml");
    fs::write(&broken, "slots_config:\n  a: {dim: 0}\n  b: {dims: 4}\n").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let data = setting.path("data");
    fs::create_dir(&data).unwrap();
    let _owner = setting.server(0, 1, &["--data-dir", &data]);
    _owner.logged("\"ready\"");
    let damaged = setting.path("damaged");
    fs::create_dir(&damaged).unwrap();
    fs::write(PathBuf::from(&damaged).join("generation"), "?").unwrap();
    let both = "PERSIA_EMBEDDING_CONFIG or --embedding-config is";
    let cases: [(&str, &[&str], i32, &str); 16] = [
        (
            SERVER,
            &["--replica-index", "2", "--replica-size", "2"],
            2,
            "--replica-index is 2, but --replica-size is 2: indexes go from 0 to 1",
        ),
        (
            SERVER,
            &["--replica-index", "1"],
            2,
            "--replica-index is 1, but REPLICA_SIZE is 1: indexes go from 0 to 0",
        ),
        (SERVER, &["--replica-index", "{{.Task.Slot}}"], 2, "{{.Task.Slot}}"),
        (SERVER, &["--no-such-flag"], 2, "--no-such-flag"),
        (SERVER, &["--job", "a b"], 2, "a b"),
        (SERVER, &["--global-config", "/no/such/file.yml"], 2, "/no/such/file.yml"),
        (SERVER, &["--listen", &taken], 2, "the address is in use"),
        (SERVER, &["--metrics-listen", &taken], 2, "the address is in use"),
        (SERVER, &["--listen", "0.0.0.0:0"], 5, "PERSIA_TOKEN_FILE"),
        (SERVER, &["--token-file", &token], 5, "9 bytes"),
        (SERVER, &["--tls-cert", &token], 2, "PERSIA_TLS_KEY"),
        (SERVER, &["--data-dir", &data], 75, "in use by another server"),
        (SERVER, &["--data-dir", &damaged], 4, "holds \"?\", which is not a generation number"),
        (MIDDLEWARE, &[], 2, "PERSIA_NATS_URL"),
        (SERVER, &["--config", "persia.yml"], 2, both),
        (MIDDLEWARE, &["--config", "persia.yml"], 2, both),
    ];
    for (binary, arguments, code, text) in cases {
        let (found, line) = setting.start(binary, arguments).fails();
        assert_eq!(found, code, "{arguments:?}: {line}");
        assert!(line.starts_with("error: ") && line.contains(text), "{arguments:?}: {line}");
        // The options that persia-launcher also has.
        let known = ["--config", "--embedding-config", "--global-config", "--help"];
        let flags = line
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
            .filter(|word| word.starts_with("--"));
        let unknown: Vec<&str> =
            flags.filter(|flag| !known.contains(flag) && !arguments.contains(flag)).collect();
        assert!(unknown.is_empty(), "{line}: {unknown:?}");
    }
    let mut command = Command::new(SERVER);
    let refused = command.args(["--listen", "127.0.0.1:0"]).env("PERSIA_RPC_TIMEOUT", "0").output().unwrap();
    let line = String::from_utf8(refused.stderr).unwrap();
    assert!(line.contains("'PERSIA_RPC_TIMEOUT <SECONDS>'") && !line.contains("--rpc-timeout"), "{line}");
    let mut command = Command::new(SERVER);
    let refused = command.args(["--listen", "127.0.0.1:0"]).env("REPLICA_SIZE", "0").output().unwrap();
    let line = String::from_utf8(refused.stderr).unwrap();
    assert!(line.starts_with("error: REPLICA_SIZE is 0; it must be from 1 to "), "{line}");
    let (code, line) =
        Process::start(SERVER, &["--metrics-listen", "off", "--listen", "127.0.0.1:0"]).fails();
    assert!(code == 2 && line.contains("PERSIA_EMBEDDING_CONFIG"), "{line}");
    let (code, line) =
        Process::start(SERVER, &["--embedding-config", &broken, "--listen", "127.0.0.1:0"]).fails();
    assert!(code == 2 && line.contains("line 2") && line.contains("line 3"), "{line}");
}

#[test]
fn the_features_of_persia_yml_are_the_slots() {
    let setting = Setting::new();
    let config = setting.path("persia.yml");
    let start = || {
        let more = ["--config", &config, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"];
        Process::start(SERVER, &more)
    };
    let text = "data: {train: rows.parquet}\nfeatures:\n  user: {type: id, dim: 4}\n  item: {type: id, dim: 2}\n  \
                seen: {type: sequence, dim: 2, last: 3, table: item}\n  age: {type: dense}\nlabels: {clicked: {}}\n";
    fs::write(&config, text).unwrap();
    let server = start();
    server.logged("\"ready\"");
    let metrics = http(&server.metrics(), "/metrics");
    // The exporter writes the labels in any order.
    let tables: BTreeSet<&str> = metrics.lines().filter(|line| line.starts_with("persia_rows{")).collect();
    assert_eq!(tables, BTreeSet::from(["persia_rows{table=\"user\"} 0", "persia_rows{table=\"item\"} 0"]));

    fs::write(&config, text.replace("type: sequence, ", "typ: sequence, ").replace("dim: 4", "dim: 0"))
        .unwrap();
    let (code, line) = start().fails();
    assert_eq!(code, 2, "{line}");
    for found in [
        "persia.yml: line 3, column 25: features.user.dim: found `0`",
        "line 5, column 9: features.seen.type: missing, allowed: id, bag",
    ] {
        assert!(line.contains(found), "{line}");
    }
}

#[test]
fn an_empty_variable_is_none_and_the_version_is_told() {
    let setting = Setting::new();
    let config = setting.path("embedding_config.yml");
    let mut command = Command::new(SERVER);
    command.env("PERSIA_EMBEDDING_CONFIG", &config).env("PERSIA_LISTEN", "127.0.0.1:0");
    for empty in
        ["REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL", "PERSIA_TOKEN_FILE", "PERSIA_STOP_GRACE"]
    {
        command.env(empty, "");
    }
    command.env("PERSIA_METRICS_LISTEN", "off").env("LOG_FORMAT", "text").stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let ready = lines.by_ref().map_while(Result::ok).find(|line| line.ends_with(": ready"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(ready.is_some_and(|line| line.contains("info  persia-server 0")));

    let version = Command::new(MIDDLEWARE).arg("--version").output().unwrap();
    let text = String::from_utf8(version.stdout).unwrap();
    assert!(
        text.contains(persia_wire::VERSION)
            && text.contains(&format!("protocol {}", persia_wire::PROTOCOL))
            && text.contains("build"),
        "{text}"
    );
}

#[test]
fn a_secret_opens_the_door_and_stands_in_no_log() {
    let setting = Setting::new();
    let token = setting.path("token");
    let secret = "0123456789abcdef0123456789abcdef";
    fs::write(&token, secret).unwrap();
    let server =
        setting.server(0, 1, &["--listen", "0.0.0.0:0", "--token-file", &token, "--log-level", "debug"]);
    let Endpoint::Tcp { port, .. } = server.endpoint() else { panic!("a TCP port") };
    let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port };
    let mut options = ClientOptions::new(Targets::Fixed(vec![endpoint.clone()]));
    options.service = Service::Server;
    let refused = WireTables::connect(options.clone()).unwrap().wait_ready(PATIENCE).unwrap_err();
    assert!(refused.to_string().contains("refused"), "{refused}");
    options.secret = Some(persia_wire::auth::Secret::read(Path::new(&token)).unwrap());
    let client = WireTables::connect(options).unwrap();
    client.begin(&run_of(&Plan { servers: 1, ..plan() })).unwrap();
    assert_eq!(probe(&setting, SERVER, &endpoint), 0);
    let hidden = persia_wire::auth::Secret::read(Path::new(&token)).unwrap();
    let hidden = hidden.token(persia_wire::auth::Role::Admin);
    server.logged("run begun");
    let log = server.log();
    assert!(!log.contains(secret) && !log.contains(hidden.reveal()), "{log}");
}

/// The processes are started as a Procfile would start them: without an address for metrics, and with a PersiaML
/// configuration.
#[test]
fn servers_of_one_host_share_the_default_port_of_metrics_or_serve_none() {
    let setting = Setting::new();
    let (embedding, general) = (setting.path("embedding_config.yml"), setting.path("global_config.yml"));
    let usual = ["--embedding-config", &embedding, "--job", JOB, "--listen", "127.0.0.1:0"];
    let both = [Process::start(SERVER, &usual), Process::start(SERVER, &usual)];
    let addresses = both.each_ref().map(Process::metrics);
    assert_ne!(addresses[0], addresses[1]);
    for address in addresses {
        assert!(http(&address, "/metrics").contains("200 OK"));
    }
    let text = "common_config: {metrics_config: {enable_metrics: false, push_interval_seconds: 10}, job_type: Train}\n";
    fs::write(&general, text).unwrap();
    let quiet = Process::start(SERVER, &[&usual[..], &["--global-config", &general]].concat());
    quiet.logged("\"ready\"");
    assert!(!quiet.log().contains("serving metrics"), "{}", quiet.log());
    let warning = quiet.logged("push_interval_seconds");
    assert!(warning.contains("job_type"), "one line names all keys without effect: {warning}");
    let asked = [&usual[..], &["--global-config", &general, "--metrics-listen", "127.0.0.1:0"]].concat();
    Process::start(SERVER, &asked).metrics();
}
