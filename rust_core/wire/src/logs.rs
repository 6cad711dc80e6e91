//! The grammar of `PERSIA_LOG`, and the format of log lines. A JSON line has the same keys as a line of
//! `persia.runtime.logging` in Python.

use std::fmt::{self, Write as _};
use std::sync::OnceLock;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The job of this process.
static RUN: OnceLock<String> = OnceLock::new();

/// Set the name of this process's job, which later JSON lines contain as `run_id`. Only the first call
/// has an effect.
pub fn name_run(job: &str) {
    RUN.get_or_init(|| job.to_owned());
}

/// The name of this host; empty if it cannot be read.
pub(crate) fn node() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// The fields of each log line that describe the process.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The service, such as `persia-server`.
    pub service: &'static str,
    /// The index of the replica.
    pub replica: u32,
    /// The rank, if the process is a rank.
    pub rank: Option<u32>,
    /// The name of the host.
    pub node: String,
}

impl Origin {
    /// Describe a process of this host.
    pub fn here(service: &'static str, replica: u32, rank: Option<u32>) -> Self {
        Self { service, replica, rank, node: node() }
    }

    /// Format an event as a JSON object with `ts`, `level`, `event`, `run_id`, `service`, `replica`, `rank`,
    /// `node`, `target`, and the fields of the event, such as `step` and `token`. `run_id` and `rank` are
    /// absent if they are unknown. A field of the event replaces a field of the process with the same name.
    fn json(&self, time: String, event: &Event<'_>) -> String {
        let (message, fields) = fields_of(event);
        let mut line = Map::new();
        if let Some(run) = RUN.get() {
            line.insert("run_id".into(), run.as_str().into());
        }
        line.insert("service".into(), self.service.into());
        line.insert("replica".into(), self.replica.into());
        if let Some(rank) = self.rank {
            line.insert("rank".into(), rank.into());
        }
        line.insert("node".into(), self.node.as_str().into());
        line.extend(fields);
        line.insert("ts".into(), time.into());
        line.insert("level".into(), event.metadata().level().as_str().to_lowercase().into());
        line.insert("event".into(), message.into());
        line.insert("target".into(), event.metadata().target().into());
        Value::Object(line).to_string()
    }

    /// Format an event as text: its time, level, process and message, followed by its fields as `name=value`.
    fn text(&self, time: &str, event: &Event<'_>) -> Result<String, fmt::Error> {
        let level = event.metadata().level().as_str().to_lowercase();
        let (message, fields) = fields_of(event);
        let mut line = format!("{time} {level:5} {} {}: {message}", self.service, self.replica);
        for (name, value) in fields {
            write!(line, " {name}={value}")?;
        }
        Ok(line.replace('\n', " | "))
    }
}

/// Formats each event as one line.
#[derive(Debug)]
pub struct Lines {
    origin: Origin,
    json: bool,
}

impl Lines {
    /// Format each event as a JSON object.
    pub fn json(origin: Origin) -> Self {
        Self { origin, json: true }
    }

    /// Format each event as readable text.
    pub fn text(origin: Origin) -> Self {
        Self { origin, json: false }
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let line = if self.json { self.origin.json(time, event) } else { self.origin.text(&time, event)? };
        writeln!(writer, "{line}")
    }
}

/// The message of an event, and the other fields.
fn fields_of(event: &Event<'_>) -> (String, Map<String, Value>) {
    let mut fields = Fields::default();
    event.record(&mut fields);
    let message = fields.0.remove("message").unwrap_or_default();
    (message.as_str().unwrap_or_default().to_owned(), fields.0)
}

/// The fields of one event, including `message`.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().into(), Value::String(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().into(), value.into());
    }
}

/// Convert the directives of `PERSIA_LOG` to the syntax of `tracing-subscriber`.
///
/// For example, `persia.wire=debug,warning` becomes `persia_wire=debug` and `warn`. `persia.server` stands for the
/// library of servers and middlewares and for their binaries.
///
/// # Errors
/// [`UnknownLevel`] for a part that is not a level, or whose level is unknown. `tracing-subscriber` would interpret a
/// single word as a target, and log only this target.
pub fn directives(text: &str) -> Result<Vec<String>, UnknownLevel> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let directives: Result<Vec<_>, _> = parts.map(directive).collect();
    Ok(directives?.concat())
}

/// A text that is not a log level.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a level")]
pub struct UnknownLevel(String);

fn directive(part: &str) -> Result<Vec<String>, UnknownLevel> {
    if part.contains('[') {
        return Ok(vec![part.to_owned()]); // a filter of spans or fields, which tracing-subscriber checks
    }
    let Some((target, level)) = part.rsplit_once('=') else { return Ok(vec![level_of(part)?]) };
    let level = level_of(level)?;
    let target = match target.trim().split_once('.') {
        Some(("persia", "server")) => {
            let binaries = ["server", "middleware"].map(|name| format!("persia_embedding_sharded_{name}"));
            let targets = std::iter::once("persia_server".to_owned()).chain(binaries);
            return Ok(targets.map(|target| format!("{target}={level}")).collect());
        }
        Some(("persia", rest)) => format!("persia_{}", rest.replace('.', "::")),
        _ => target.trim().to_owned(),
    };
    Ok(vec![format!("{target}={level}")])
}

/// The level with this name, which may be one of Python's.
fn level_of(name: &str) -> Result<String, UnknownLevel> {
    let name = name.trim();
    let level = match name.to_lowercase().as_str() {
        "warning" => "warn",
        "critical" | "fatal" => "error",
        "notset" => "info",
        known @ ("error" | "warn" | "info" | "debug" | "trace" | "off") => return Ok(known.to_owned()),
        _ => return Err(UnknownLevel(name.to_owned())),
    };
    Ok(level.to_owned())
}

#[cfg(test)]
mod tests {
    use super::directives;

    #[test]
    fn names_of_python_are_targets_of_tracing() {
        let text = "persia.wire=DEBUG, persia.wire.client=trace,persia.server=warning,,persia=info,critical";
        let wanted = [
            "persia_wire=debug",
            "persia_wire::client=trace",
            "persia_server=warn",
            "persia_embedding_sharded_server=warn",
            "persia_embedding_sharded_middleware=warn",
            "persia=info",
            "error",
        ];
        assert_eq!(directives(text).unwrap(), wanted);
        assert!(directives(" ").unwrap().is_empty());
    }

    #[test]
    fn what_is_no_level_is_refused() {
        for text in ["loud", "persia.wire=debug,loud", "persia.wire=loud", "persia.wire"] {
            let error = directives(text).unwrap_err().to_string();
            assert!(error.ends_with("is not a level"), "{text}: {error}");
        }
        assert_eq!(directives("WARNING,NOTSET").unwrap(), ["warn", "info"]);
        assert_eq!(
            directives("persia_wire[call{step=1}]=debug").unwrap(),
            ["persia_wire[call{step=1}]=debug"]
        );
    }
}
