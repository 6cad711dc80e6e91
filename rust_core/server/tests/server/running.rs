//! Runs the binaries and nats-server as child processes, which end with their test.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use persia_types::config::EmbeddingConfig;
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::settings::Endpoint;

use crate::stack::{JOB, Plan};

pub(crate) const SERVER: &str = env!("CARGO_BIN_EXE_persia-embedding-sharded-server");
pub(crate) const MIDDLEWARE: &str = env!("CARGO_BIN_EXE_persia-embedding-sharded-middleware");
/// A time limit longer than a short operation takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const EMBEDDING: &str = "slots_config:\n  a: {dim: 4}\n";

/// Wait until `done` returns true.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A process that ends with the test, and its log.
pub(crate) struct Process {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    pub(crate) fn start(binary: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(binary);
        for (name, _) in std::env::vars() {
            if name.starts_with("PERSIA_") || name.starts_with("REPLICA_") || name.starts_with("LOG_") {
                command.env_remove(name);
            }
        }
        command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{binary}: {error}"));
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, sink) = (BufReader::new(child.stderr.take().unwrap()).lines(), Arc::clone(&log));
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut log = sink.lock();
                log.push_str(&line);
                log.push('\n');
            }
        });
        Self { child, log }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().clone()
    }

    /// Wait until the log has a line with `text`. Returns the line.
    pub(crate) fn logged(&self, text: &str) -> String {
        let line = || self.log().lines().find(|line| line.contains(text)).map(str::to_owned);
        wait_until(&format!("{text:?} in the log:\n{}", self.log()), || line().is_some());
        line().unwrap()
    }

    /// The address of the process.
    pub(crate) fn endpoint(&self) -> Endpoint {
        let line: serde_json::Value = serde_json::from_str(&self.logged("\"listening\"")).unwrap();
        line["endpoint"].as_str().unwrap().parse().unwrap()
    }

    pub(crate) fn metrics(&self) -> String {
        let line: serde_json::Value = serde_json::from_str(&self.logged("\"serving metrics\"")).unwrap();
        line["endpoint"].as_str().unwrap().to_owned()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the process to end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Wait for a process that ends on its own. Returns its exit code and its last line.
    pub(crate) fn fails(mut self) -> (i32, String) {
        let code = self.ended().code().unwrap();
        wait_until("its last line", || self.log().contains("error: "));
        (code, self.log().lines().last().unwrap().to_owned())
    }
}

/// A directory with the configuration, and the flags that every process gets.
pub(crate) struct Setting {
    dir: tempfile::TempDir,
}

impl Setting {
    pub(crate) fn new() -> Self {
        Self::of(EMBEDDING)
    }

    /// Create a setting with the given embedding configuration.
    pub(crate) fn of(embedding: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("embedding_config.yml"), embedding).unwrap();
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    pub(crate) fn start(&self, binary: &str, more: &[&str]) -> Process {
        let config = self.path("embedding_config.yml");
        let mut arguments = vec!["--embedding-config", &config];
        let chosen = |flag| more.iter().any(|argument| argument == &flag);
        for (flag, value) in
            [("--job", JOB), ("--listen", "127.0.0.1:0"), ("--metrics-listen", "127.0.0.1:0")]
        {
            if !chosen(flag) {
                arguments.extend([flag, value]);
            }
        }
        Process::start(binary, &[&arguments, more].concat())
    }

    pub(crate) fn server(&self, index: u32, of: u32, more: &[&str]) -> Process {
        let (index, of) = (index.to_string(), of.to_string());
        let place = ["--replica-index", index.as_str(), "--replica-size", of.as_str()];
        self.start(SERVER, &[&place, more].concat())
    }

    pub(crate) fn middleware(&self, more: &[&str]) -> Process {
        self.start(MIDDLEWARE, more)
    }
}

/// A plan with the configuration in `EMBEDDING`.
pub(crate) fn plan() -> Plan {
    plan_of(EMBEDDING)
}

pub(crate) fn plan_of(embedding: &str) -> Plan {
    let parsed = EmbeddingConfig::parse(embedding, "embedding_config.yml").unwrap();
    Plan { schema: parsed.config.schema, ..Plan::new(2) }
}

pub(crate) fn client_of(endpoint: Endpoint) -> WireTables {
    WireTables::connect(ClientOptions::new(Targets::Fixed(vec![endpoint]))).unwrap()
}

pub(crate) struct Nats {
    port: u16,
    child: Option<Child>,
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Nats {
    pub(crate) fn stopped() -> Self {
        Self { port: free_port(), child: None }
    }

    pub(crate) fn start(&mut self) {
        self.start_with(&[]);
    }

    pub(crate) fn start_with(&mut self, more: &[&str]) {
        let mut command = Command::new("nats-server");
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string()]).args(more);
        self.child = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    }

    pub(crate) fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }
}
