//! Tests of discovery through a real nats-server, which stops and restarts.
#![allow(clippy::unwrap_used, reason = "a test: a panic is its verdict")]

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use async_nats::service::ServiceExt;
use persia_wire::auth::{Role, Secret};
use persia_wire::discovery::{
    Announcement, BlockingDiscovery, Discovery, DiscoveryError, DiscoveryOptions, Peer, Service,
};

const SECOND: Duration = Duration::from_secs(1);
/// A time limit that is long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

struct Nats {
    port: u16,
    child: Option<Child>,
    arguments: Vec<String>,
}

impl Nats {
    fn stopped(arguments: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Self { port, child: None, arguments: arguments.iter().map(|text| (*text).to_owned()).collect() }
    }

    fn start(&mut self) {
        let mut command = Command::new("nats-server");
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string()]).args(&self.arguments);
        self.child = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    }

    fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    async fn connect(&self, job: &str) -> Discovery {
        Discovery::connect(DiscoveryOptions { url: self.url(), job: job.into(), token: None }).await.unwrap()
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

fn server(index: u32, replicas: u32) -> Announcement {
    Announcement {
        service: Service::Server,
        index,
        replicas,
        address: Some(format!("127.0.0.1:{}", 8888 + index).parse().unwrap()),
        metrics: None,
        more: BTreeMap::from([("build".to_owned(), "test".to_owned())]),
    }
}

/// Search until `good` accepts the result.
async fn find(discovery: &Discovery, good: impl Fn(&[Peer]) -> bool) -> Vec<Peer> {
    let start = Instant::now();
    loop {
        let found = discovery.find(Service::Server, 2 * SECOND).await;
        if let Ok(peers) = &found
            && good(peers)
        {
            return peers.clone();
        }
        assert!(start.elapsed() < PATIENCE, "last answer: {found:?}");
    }
}

#[test]
fn peers_of_one_job_see_each_other_and_no_other_job() {
    run(async {
        let mut nats = Nats::stopped(&[]);
        nats.start();
        let (ours, theirs) = (nats.connect("ours").await, nats.connect("theirs").await);
        ours.wait_connected(Some(PATIENCE)).await.unwrap();
        assert_eq!(ours.find(Service::Server, PATIENCE).await.unwrap(), []);
        let _second = ours.announce(server(1, 2)).await.unwrap();
        let first = ours.announce(server(0, 2)).await.unwrap();
        let _foreign = theirs.announce(server(0, 1)).await.unwrap();
        let peers = find(&ours, |peers| peers.len() == 2).await;
        assert_eq!(peers[0].describe(), "server 0 of 2 at 127.0.0.1:8888");
        assert_eq!(peers[1].describe(), "server 1 of 2 at 127.0.0.1:8889");
        assert_eq!(peers[0].metadata["build"], "test");
        find(&theirs, |peers| peers.len() == 1).await;
        assert_eq!(ours.find(Service::Middleware, SECOND).await.unwrap(), []);

        let plain = async_nats::connect(nats.url()).await.unwrap();
        let ready = format!("persia.{}.ready", peers[1].id);
        assert_eq!(plain.request(ready, "".into()).await.unwrap().payload, "ready");

        drop(first);
        let left = find(&ours, |peers| peers.len() == 1).await;
        assert_eq!(left[0].index, 1);
    });
}

#[test]
fn an_announcement_survives_a_restart_of_nats() {
    run(async {
        let mut nats = Nats::stopped(&[]);
        let discovery = nats.connect("job").await;
        let _announced = discovery.announce(server(0, 1)).await.unwrap();
        let error = discovery.find(Service::Server, SECOND / 2).await.unwrap_err();
        assert!(matches!(error, DiscoveryError::NotConnected { .. }), "{error}");
        assert!(!discovery.is_connected());
        for _ in 0..2 {
            nats.start();
            find(&discovery, |peers| peers.len() == 1).await;
            nats.stop();
            let error = discovery.find(Service::Server, SECOND).await.unwrap_err().to_string();
            assert!(error.contains(&nats.url()), "{error}");
        }
    });
}

#[test]
fn a_wrong_token_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let secret = |name: &str, letter: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, letter.repeat(32)).unwrap();
        Secret::read(&path).unwrap()
    };
    let (right, wrong) = (secret("right", "a"), secret("wrong", "b"));
    let password = right.token(Role::Nats);
    let mut nats = Nats::stopped(&["--user", "persia", "--pass", password.reveal()]);
    nats.start();
    let connect = |token| {
        BlockingDiscovery::connect(DiscoveryOptions { url: nats.url(), job: "job".into(), token }).unwrap()
    };
    connect(Some(password.clone())).wait_connected(Some(PATIENCE)).unwrap();
    for token in [None, Some(wrong.token(Role::Nats)), Some(right.token(Role::Admin))] {
        let error = connect(token).wait_connected(Some(PATIENCE)).unwrap_err();
        assert!(matches!(error, DiscoveryError::Refused { .. }), "{error}");
        assert!(error.to_string().contains("PERSIA_TOKEN_FILE"), "{error}");
    }
}

#[test]
fn malformed_announcements_are_ignored() {
    run(async {
        let mut nats = Nats::stopped(&[]);
        nats.start();
        let discovery = nats.connect("job").await;
        discovery.wait_connected(Some(PATIENCE)).await.unwrap();
        let plain = async_nats::connect(nats.url()).await.unwrap();
        let metadata = [("job", "job"), ("index", "many"), ("replicas", "2"), ("protocol", "1")];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let _nonsense =
            plain.service_builder().metadata(metadata).start("persia-server", "0.0.1").await.unwrap();
        let mut echo = plain.subscribe("$SRV.INFO.persia-server").await.unwrap();
        let shout = plain.clone();
        tokio::spawn(async move {
            while let Some(request) = futures_util::StreamExt::next(&mut echo).await {
                shout.publish(request.reply.unwrap(), "no JSON".into()).await.unwrap();
            }
        });
        plain.flush().await.unwrap();
        let _announced = discovery.announce(server(0, 1)).await.unwrap();
        find(&discovery, |peers| peers.len() == 1).await;
    });
}

#[test]
fn a_bad_job_or_address_is_refused_at_once() {
    let connect = |url: &str, job: &str| {
        BlockingDiscovery::connect(DiscoveryOptions { url: url.into(), job: job.into(), token: None })
            .unwrap_err()
    };
    assert!(matches!(connect("nats://127.0.0.1:1", "a job"), DiscoveryError::BadJob { .. }));
    let error = connect("http://user:secret@127.0.0.1:x", "job");
    assert!(matches!(error, DiscoveryError::BadUrl { .. }), "{error}");
    assert!(!error.to_string().contains("secret"), "{error}");
}
