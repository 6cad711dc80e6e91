//! Tests of server processes that are killed, and of one whose disk is full.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use persia_kernels::Gradients;
use persia_types::tables::{PushRequest, Run, TableGradients};
use persia_types::{Id, Mode, ShardedIds, Tables, TablesError};
use persia_wire::auth::{Credentials, Role};
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::discovery::Service;
use persia_wire::rpc::Rpc;
use persia_wire::settings::Endpoint;
use persia_wire::{PROTOCOL, VERSION, proto};

use crate::running::{PATIENCE, Process, SERVER, Setting, client_of, plan, wait_until};
use crate::stack::{JOB, Plan, lookup, push, run_of, token};

#[test]
fn a_killed_process_restarts_and_every_update_counts_once() {
    let setting = Setting::new();
    let config = setting.path("global_config.yml");
    let text = "embedding_parameter_server_config: {durability: log, log_sync: always}";
    fs::write(&config, text).unwrap();
    let flags = |index: usize| {
        let (listen, data) =
            (format!("unix:{}", setting.path(&format!("s{index}"))), setting.path(&format!("d{index}")));
        ["--global-config".to_owned(), config.clone(), "--listen".into(), listen, "--data-dir".into(), data]
    };
    let start = |index: usize| {
        let flags = flags(index);
        setting.server(index as u32, 2, &flags.each_ref().map(String::as_str))
    };
    let mut servers = [0, 1].map(start);
    let addresses = format!("{},{}", servers[0].endpoint(), servers[1].endpoint());
    let middleware = setting.middleware(&["--servers", &addresses]);
    let client = client_of(middleware.endpoint());
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&Run { fresh: true, ..run_of(&plan()) }).unwrap();
    let ids = vec![(0..300).collect::<Vec<Id>>()];
    let steps = 120;
    std::thread::scope(|threads| {
        let trains = threads.spawn(|| {
            for seq in 1..=steps {
                lookup(&client, token(0, seq), Mode::Train, &[4], &ids).unwrap();
                let grouped = ShardedIds::group(&ids[0]).unwrap();
                let gradients = vec![1.0; 300 * 4];
                let part = TableGradients { table: 0, ids: &grouped, gradients: Gradients::Rows(&gradients) };
                let request =
                    PushRequest { token: token(0, seq), step: seq, lr_factor: 1.0, tables: &[part] };
                client.push(&request).unwrap();
            }
        });
        for round in 0..6 {
            let begun = client.stats_by_server().map_or(0, |all| all[0].tokens.get(&0).copied().unwrap_or(0));
            let victim = round % 2;
            servers[victim].kill();
            servers[victim] = start(victim);
            servers[victim].logged("run resumed from the log");
            wait_until("more steps", || {
                trains.is_finished()
                    || client.stats_by_server().is_ok_and(|all| {
                        all.iter().all(|stats| stats.tokens.get(&0).copied().unwrap_or(0) > begun + 3)
                    })
            });
        }
        trains.join().unwrap();
    });
    let (_, rows) = lookup(&client, token(0, 1), Mode::Eval, &[4], &ids).unwrap();
    assert!(rows[0].iter().all(|weight| *weight == -(steps as f32)), "{:?}", &rows[0][..8]);
    let stats = client.stats().unwrap();
    assert_eq!(stats.pushes.rows_applied, 300 * steps);
    // A log needs a directory.
    let (code, line) = setting.server(0, 1, &["--global-config", &config]).fails();
    assert!(code == 2 && line.contains("PERSIA_DATA_DIR"), "{code} {line}");
}

#[test]
fn a_full_disk_refuses_requests_until_there_is_space() {
    let setting = Setting::new();
    let (config, data) = (setting.path("global_config.yml"), setting.path("data"));
    fs::write(&config, "embedding_parameter_server_config: {durability: log}").unwrap();
    let listen = format!("unix:{}", setting.path("server"));
    let flags = ["--global-config", &config, "--data-dir", &data, "--listen", &listen];
    // Files are limited to 32 KiB: writing more fails, as on a full disk.
    let limited = ["-c", "trap '' XFSZ; ulimit -S -f 64; exec \"$0\" \"$@\"", SERVER];
    let embedding = setting.path("embedding_config.yml");
    let usual = ["--embedding-config", &embedding, "--job", JOB, "--metrics-listen", "off"];
    let mut server = Process::start("sh", &[&limited, &usual[..], &flags].concat());
    let mut options = ClientOptions::new(Targets::Fixed(vec![server.endpoint()]));
    options.service = Service::Server;
    options.rpc_timeout = Duration::from_secs(10);
    let client = WireTables::connect(options).unwrap();
    client.wait_ready(PATIENCE).unwrap();
    client.begin(&Run { fresh: true, ..run_of(&Plan { servers: 1, ..plan() }) }).unwrap();
    let ids = vec![(0..300).collect::<Vec<Id>>()];
    let train = |seq| {
        lookup(&client, token(0, seq), Mode::Train, &[4], &ids)?;
        push(&client, token(0, seq), &[4], &ids)
    };
    let (seq, error) = (1..).find_map(|seq| train(seq).err().map(|error| (seq, error))).unwrap();
    assert!(seq > 2 && error.to_string().contains("cannot write its log"), "{seq}: {error}");
    let rows = |client: &WireTables| lookup(client, token(0, 1), Mode::Eval, &[4], &ids).unwrap().1;
    let before = rows(&client);
    assert!(train(seq).is_err());
    assert_eq!(rows(&client), before);
    let pid = server.id().to_string();
    let room = Command::new("prlimit").args(["--pid", &pid, "--fsize=unlimited"]).status();
    assert!(room.unwrap().success());
    for seq in seq..seq + 3 {
        assert_eq!(train(seq).unwrap().rows_applied, 300);
    }
    let after = rows(&client);
    server.kill();
    let server = setting.server(0, 1, &flags);
    server.logged("run resumed from the log");
    assert_eq!(rows(&client), after);
}

/// Begin a run on one of two servers.
fn begin_on(server: &Endpoint, run: &Run) {
    let request = proto::BeginRequest {
        protocol: PROTOCOL,
        version: VERSION.into(),
        servers: 2,
        run: serde_json::to_string(run).unwrap(),
        check_only: false,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let credentials = Credentials::new(Role::Admin, None);
        let mut rpc = Rpc::new(Service::Server, server.channel(None).unwrap(), credentials);
        rpc.unary(tonic::Request::new(request)).await.unwrap();
    });
}

/// A server was killed after it had recorded the generation and before it had logged the begin of its run.
#[test]
fn a_begin_that_one_server_does_not_remember_is_no_success() {
    let setting = Setting::new();
    let config = setting.path("global_config.yml");
    fs::write(&config, "embedding_parameter_server_config: {durability: log}").unwrap();
    let start = |index: usize| {
        let (listen, data) =
            (format!("unix:{}", setting.path(&format!("s{index}"))), setting.path(&format!("d{index}")));
        let flags = ["--global-config", &config, "--listen", &listen, "--data-dir", &data];
        setting.server(index as u32, 2, &flags)
    };
    let mut servers = [0, 1].map(start);
    let addresses = format!("{},{}", servers[0].endpoint(), servers[1].endpoint());
    let middleware = setting.middleware(&["--servers", &addresses, "--log-level", "debug"]);
    let client = client_of(middleware.endpoint());
    client.wait_ready(PATIENCE).unwrap();
    let run = |generation| Run { fresh: true, generation, ..run_of(&plan()) };
    client.begin(&run(1)).unwrap();
    servers[1].kill();
    std::thread::scope(|threads| {
        let begins = threads.spawn(|| client.begin(&run(2)));
        // The reply is lost. A call of `wait_ready` may have failed before.
        middleware.logged(r#""method":"begin""#);
        begin_on(&servers[0].endpoint(), &run(2));
        fs::write(PathBuf::from(setting.path("d1")).join("generation"), "2\n").unwrap();
        servers[1] = start(1);
        let error = begins.join().unwrap().unwrap_err();
        let named = matches!(&error, TablesError::Lost { peer, .. } if peer.contains("server 1 of 2"));
        assert!(named, "{error}");
    });
    client.begin(&run(3)).unwrap();
    assert_eq!(client.stats().unwrap().begun, 3);
}
