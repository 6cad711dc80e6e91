//! Flags of the two binaries. Most flags have a variable. A flag overrides its variable. An empty variable counts as
//! unset.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use clap::{Args, CommandFactory, FromArgMatches, Parser};
use persia_types::config::features::FeaturesConfig;
use persia_types::config::{ConfigErrors, EmbeddingConfig, GlobalConfig, Parsed};
use persia_types::limits::MAX_SERVERS;
use persia_wire::auth::Secret;
use persia_wire::discovery::check_job_name;
use persia_wire::settings::Endpoint;
use persia_wire::tls::TlsFiles;

use crate::exit::Exit;
use crate::logs::LogFormat;

/// Flags of both binaries.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// Address of NATS, for discovery: nats://HOST:PORT; without it, discovery is off
    #[arg(long, env = "PERSIA_NATS_URL", value_name = "URL")]
    pub nats_url: Option<String>,
    /// The job's persia.yml: its features define slots and tables
    #[arg(long, env = "PERSIA_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// embedding_config.yml, which defines slots and tables; not together with --config
    #[arg(long, env = "PERSIA_EMBEDDING_CONFIG", value_name = "FILE")]
    pub embedding_config: Option<PathBuf>,
    /// global_config.yml: the settings of the job, such as its capacity and its checkpoints
    #[arg(long, env = "PERSIA_GLOBAL_CONFIG", value_name = "FILE")]
    pub global_config: Option<PathBuf>,
    /// Index of this replica, from 0
    #[arg(long, env = "REPLICA_INDEX", value_name = "N", default_value_t = 0)]
    pub replica_index: u32,
    /// Number of replicas
    #[arg(long, env = "REPLICA_SIZE", value_name = "N", default_value_t = 1)]
    pub replica_size: u32,
    /// HOST:PORT or unix:/PATH; port 0 selects a free port. Default: port 8888 (server) or 7777 (middleware), on all
    /// addresses if a token file is given, otherwise on 127.0.0.1
    #[arg(long, env = "PERSIA_LISTEN", value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// HOST:PORT of /metrics and /health over HTTP, or `off`. Default: port 9464 (a free port, if it is in use), on the
    /// addresses of --listen's default; `off` with `enable_metrics: false`
    #[arg(long, env = "PERSIA_METRICS_LISTEN", value_name = "ADDRESS")]
    pub metrics_listen: Option<String>,
    /// File with the secret of the job; without it, only processes of this host are served
    #[arg(long, env = "PERSIA_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate chain of this process, PEM; the process then accepts only TLS connections
    #[arg(long, env = "PERSIA_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert, PEM
    #[arg(long, env = "PERSIA_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Authority of the peers' certificates, PEM; peers are then called only over TLS
    #[arg(long, env = "PERSIA_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Name in the peers' certificates
    #[arg(long, env = "PERSIA_TLS_NAME", value_name = "NAME", default_value = "persia")]
    pub tls_name: String,
    /// Host that other processes use to reach this one; default: the address of the interface PERSIA_SOCKET_IFNAME if
    /// that is set, otherwise the address of the interface through which this host reaches NATS
    #[arg(long, env = "PERSIA_ADVERTISE", value_name = "HOST")]
    pub advertise: Option<String>,
    /// Name of the job; default: job_name of --global-config
    #[arg(long, env = "PERSIA_JOB", value_name = "NAME")]
    pub job: Option<String>,
    /// Seconds for which connections may stay open after SIGTERM
    #[arg(long, env = "PERSIA_STOP_GRACE", value_name = "SECONDS", default_value_t = 50)]
    pub stop_grace: u64,
    /// Seconds that a look-up or push may take
    #[arg(long, env = "PERSIA_RPC_TIMEOUT", value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub rpc_timeout: u64,
    /// error, warn, info, debug or trace; TARGET=LEVEL sets it for one module, and commas separate several filters
    #[arg(long, env = "LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
    /// Format of log lines: json or text
    #[arg(long, env = "LOG_FORMAT", value_name = "FORMAT", default_value = "json")]
    pub log_format: LogFormat,
    /// Check whether the process at --listen serves; the exit code is 0 if it does, and 1 if it does not
    #[arg(long)]
    pub health: bool,
}

/// An embedding server: holds the rows of its shards, and serves look-ups and pushes.
#[derive(Debug, Clone, Parser)]
#[command(name = "persia-embedding-sharded-server")]
pub struct ServerArgs {
    /// Flags of both binaries
    #[command(flatten)]
    pub common: CommonArgs,
    /// Directory in which the server stores its generation and, with `durability: log`, its log; without it, a
    /// restarted server does not know earlier generations
    #[arg(long, env = "PERSIA_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Directory, or URL such as s3://bucket/prefix, below which checkpoints are written and read; without it, only
    /// URLs are accepted
    #[arg(long, env = "PERSIA_CKPT_DIR", value_name = "DIR")]
    pub checkpoint_root: Option<PathBuf>,
}

/// A middleware: divides requests among the embedding servers. It has no state.
#[derive(Debug, Clone, Parser)]
#[command(name = "persia-embedding-sharded-middleware")]
pub struct MiddlewareArgs {
    /// Flags of both binaries
    #[command(flatten)]
    pub common: CommonArgs,
    /// Servers, in the order of their index: HOST:PORT or unix:/PATH. Replaces discovery and, in an infer job,
    /// infer_config.servers
    #[arg(long, value_name = "ADDRESS,…", value_delimiter = ',')]
    pub servers: Vec<Endpoint>,
}

impl MiddlewareArgs {
    /// The addresses of the servers in the order of their index. The list is empty if the servers are to be found
    /// through NATS.
    ///
    /// # Errors
    /// `Usage` for a malformed address, for too many addresses, and for an infer job without an address.
    pub fn server_list(&self, global: &GlobalConfig) -> Result<Vec<Endpoint>, Exit> {
        const KEY: &str = "common_config.infer_config.servers";
        let listed = match &global.infer {
            Some(infer) if self.servers.is_empty() => {
                infer.servers.iter().map(|address| endpoint(address, KEY)).collect::<Result<Vec<_>, _>>()?
            }
            _ => self.servers.clone(),
        };
        if listed.is_empty() && global.infer.is_some() {
            return Err(Exit::Usage(format!(
                "no servers are configured: with job_type: Infer, list them in {KEY} in global_config.yml, or with \
                 --servers HOST:PORT,…, in the order of their REPLICA_INDEX"
            )));
        }
        if listed.len() > MAX_SERVERS {
            let list = if self.servers.is_empty() { KEY } else { "--servers" };
            return Err(Exit::Usage(format!(
                "{list} has {} servers, but the limit is {MAX_SERVERS}",
                listed.len()
            )));
        }
        Ok(listed)
    }
}

/// The text of `--version` after the name of the binary.
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        format!("{} (protocol {}, {BUILD} build)", persia_wire::VERSION, persia_wire::PROTOCOL)
    });
    &VERSION
}

/// The build of this binary.
pub const BUILD: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

/// Read the arguments and variables of this process. Ends the process after `--help` and `--version`.
///
/// # Errors
/// `Usage`, one line.
pub fn parse<A: CommandFactory + FromArgMatches>() -> Result<A, Exit> {
    let mut command = A::command().version(version());
    let empty: Vec<clap::Id> = command
        .get_arguments()
        .filter(|arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty()))
        .map(|arg| arg.get_id().clone())
        .collect();
    for id in empty {
        command = command.mut_arg(id, |arg| arg.env(None::<&str>));
    }
    let variables = by_variable(&command);
    let one_line = |error: clap::Error| {
        if error.use_stderr() {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            let line = variables.iter().fold(line.to_owned(), |line, (flag, name)| line.replace(flag, name));
            return Exit::Usage(format!("{}; --help lists all flags", line.trim_start_matches("error: ")));
        }
        error.exit()
    };
    let matches = command.try_get_matches().map_err(one_line)?;
    A::from_arg_matches(&matches).map_err(one_line)
}

/// The flags that are set only by their variables. Each flag is written as clap's messages quote it, and is followed
/// by its variable.
fn by_variable(command: &clap::Command) -> Vec<(String, String)> {
    command
        .get_arguments()
        .filter_map(|arg| {
            let (flag, name) = (format!("--{}", arg.get_long()?), arg.get_env()?);
            let is_set = std::env::var_os(name).is_some();
            (is_set && !is_given(&flag)).then(|| (format!("'{flag} "), format!("'{} ", name.display())))
        })
        .collect()
}

/// Whether this process was started with the flag.
fn is_given(flag: &str) -> bool {
    let mut words = std::env::args_os().filter_map(|word| word.into_string().ok());
    words.any(|word| word.split('=').next() == Some(flag))
}

/// What sets a value, for messages: the flag if it is given, otherwise the variable.
fn set_by<'a>(flag: &'a str, variable: &'a str) -> &'a str {
    if is_given(flag) { flag } else { variable }
}

impl CommonArgs {
    /// Check the flags that do not depend on a file.
    ///
    /// # Errors
    /// `Usage` with the name of the flag or of the variable that sets the value.
    pub fn check(&self) -> Result<(), Exit> {
        let Self { replica_index: index, replica_size: size, .. } = self;
        let size_is = format!("{} is {size}", set_by("--replica-size", "REPLICA_SIZE"));
        if *size == 0 || *size as usize > MAX_SERVERS {
            return Err(Exit::Usage(format!("{size_is}; it must be from 1 to {MAX_SERVERS}")));
        }
        if index >= size {
            return Err(Exit::Usage(format!(
                "{} is {index}, but {size_is}: indexes go from 0 to {}",
                set_by("--replica-index", "REPLICA_INDEX"),
                size - 1
            )));
        }
        if let (Some(config), Some(embedding)) = (&self.config, &self.embedding_config) {
            return Err(Exit::Usage(format!(
                "PERSIA_CONFIG or --config is {}, and PERSIA_EMBEDDING_CONFIG or --embedding-config is {}: slots come \
                 from one file; unset one of the two",
                config.display(),
                embedding.display()
            )));
        }
        Ok(())
    }

    /// The secret, if there is a token file.
    ///
    /// # Errors
    /// `Auth` naming the file.
    pub fn secret(&self) -> Result<Option<Secret>, Exit> {
        Secret::read_if_given(self.token_file.as_deref()).map_err(|error| Exit::Auth(error.to_string()))
    }

    /// Certificates and keys.
    pub fn tls(&self) -> TlsFiles {
        TlsFiles {
            cert: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            ca: self.tls_ca.clone(),
            name: Some(self.tls_name.clone()),
        }
    }

    /// The address to listen on. The default is `port` on all addresses if there is a token file, and on
    /// 127.0.0.1 otherwise.
    ///
    /// # Errors
    /// `Usage` for a malformed address.
    pub fn listen(&self, port: u16) -> Result<Endpoint, Exit> {
        let default = format!("{}:{port}", self.open_host());
        endpoint(self.listen.as_deref().unwrap_or(&default), "PERSIA_LISTEN")
    }

    /// The address of metrics; None if they are off. Without the flag and its variable, it is `port` on the
    /// addresses of [`Self::listen`]'s default if metrics are `enabled`, and None otherwise.
    ///
    /// # Errors
    /// `Usage` for a malformed address.
    pub fn metrics_listen(&self, port: u16, enabled: bool) -> Result<Option<Endpoint>, Exit> {
        let default = if enabled { format!("{}:{port}", self.open_host()) } else { "off".into() };
        match self.metrics_listen.as_deref().unwrap_or(&default) {
            "off" => Ok(None),
            address => endpoint(address, "PERSIA_METRICS_LISTEN").map(Some),
        }
    }

    fn open_host(&self) -> &'static str {
        if self.token_file.is_some() { "0.0.0.0" } else { "127.0.0.1" }
    }

    /// The global configuration, or its defaults without a file.
    ///
    /// # Errors
    /// `Usage` with all errors.
    pub fn global(&self) -> Result<GlobalConfig, Exit> {
        let Some(path) = &self.global_config else { return Ok(GlobalConfig::default()) };
        read(path, "--global-config or PERSIA_GLOBAL_CONFIG", GlobalConfig::parse)
    }

    /// The embedding configuration: that of the features of `--config`, or `--embedding-config`; None without both.
    ///
    /// # Errors
    /// `Usage` with all errors.
    pub fn embedding_if_given(&self) -> Result<Option<EmbeddingConfig>, Exit> {
        match (&self.config, &self.embedding_config) {
            (Some(path), _) => {
                read(path, "--config or PERSIA_CONFIG", FeaturesConfig::parse_embedding).map(Some)
            }
            (None, Some(path)) => {
                read(path, "--embedding-config or PERSIA_EMBEDDING_CONFIG", EmbeddingConfig::parse).map(Some)
            }
            (None, None) => Ok(None),
        }
    }

    /// The embedding configuration.
    ///
    /// # Errors
    /// `Usage` without one, or with all errors.
    pub fn embedding(&self) -> Result<EmbeddingConfig, Exit> {
        self.embedding_if_given()?.ok_or_else(|| {
            Exit::Usage(
                "no embedding configuration: set PERSIA_CONFIG or --config to the job's persia.yml, or \
                 PERSIA_EMBEDDING_CONFIG or --embedding-config to its embedding_config.yml"
                    .into(),
            )
        })
    }

    /// The job's name.
    ///
    /// # Errors
    /// `Usage` for a name that is not allowed.
    pub fn job(&self, global: &GlobalConfig) -> Result<String, Exit> {
        let job = self.job.as_ref().unwrap_or(&global.job_name);
        check_job_name(job).map_err(|error| Exit::Usage(error.to_string()))?;
        Ok(job.clone())
    }
}

fn endpoint(address: &str, flag: &str) -> Result<Endpoint, Exit> {
    address.parse().map_err(|error| Exit::Usage(format!("{flag}: {error}")))
}

fn read<T>(
    path: &Path,
    given_by: &str,
    parse: impl Fn(&str, &str) -> Result<Parsed<T>, ConfigErrors>,
) -> Result<T, Exit> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Exit::Usage(format!("cannot read {name}: {error}; {given_by} sets its path")))?;
    let parsed = parse(&text, &name).map_err(|errors| {
        let found: Vec<String> = errors.errors.iter().map(ToString::to_string).collect();
        Exit::Usage(format!("{name}: {}", found.join("; ")))
    })?;
    if !parsed.warnings.is_empty() {
        let found: Vec<String> = parsed.warnings.iter().map(ToString::to_string).collect();
        tracing::warn!("{name}: {}", found.join("; "));
    }
    Ok(parsed.config)
}
