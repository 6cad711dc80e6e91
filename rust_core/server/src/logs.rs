//! Logs: one line for each event on standard error, as JSON or text.

use std::fmt::{self, Write as _};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::exit::Exit;

/// Levels of libraries: this crate logs changes of connections itself, once each.
const QUIET: &str = "async_nats=error,h2=warn,hyper=warn,rustls=warn,tonic=warn,tower=warn";

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// One readable line.
    Text,
}

/// Log events from `level` up, or as `PERSIA_LOG` says, and panics. Each line has `service` and `replica`.
///
/// # Errors
/// `Usage` for an unknown level.
pub fn start(format: LogFormat, level: &str, service: &'static str, replica: u32) -> Result<(), Exit> {
    let ours = !level.contains(['=', ',']);
    let directives = if ours { format!("{level},{QUIET}") } else { level.to_owned() };
    let own = persia_wire::logs::directives(&std::env::var("PERSIA_LOG").unwrap_or_default());
    let directives = std::iter::once(directives).chain(own).collect::<Vec<_>>().join(",");
    let filter = EnvFilter::builder().parse(&directives).map_err(|error| {
        Exit::Usage(format!(
            "LOG_LEVEL={level}, PERSIA_LOG: {error} in {directives}; use error, warn, info, debug or trace"
        ))
    })?;
    let lines = Lines { format, service, replica };
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Fails only if a test has a subscriber already.
    let _ = logs.event_format(lines).try_init();
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!(place = ?panic.location().map(ToString::to_string), "panic: {}", reason(panic));
    }));
    Ok(())
}

fn reason(panic: &std::panic::PanicHookInfo<'_>) -> String {
    let payload = panic.payload();
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

struct Lines {
    format: LogFormat,
    service: &'static str,
    replica: u32,
}

/// Fields of one event, including `message`.
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
        let mut fields = Fields::default();
        event.record(&mut fields);
        let level = event.metadata().level().as_str().to_lowercase();
        let message = fields.0.remove("message").unwrap_or_default();
        match self.format {
            LogFormat::Json => {
                let mut line = Map::new();
                line.insert("time".into(), time.into());
                line.insert("level".into(), level.into());
                line.insert("service".into(), self.service.into());
                line.insert("replica".into(), self.replica.into());
                line.insert("message".into(), message);
                line.insert("target".into(), event.metadata().target().into());
                line.extend(fields.0);
                writeln!(writer, "{}", Value::Object(line))
            }
            LogFormat::Text => {
                let mut line = format!("{time} {level:5} {} {}: ", self.service, self.replica);
                line.push_str(message.as_str().unwrap_or_default());
                for (name, value) in fields.0 {
                    write!(line, " {name}={value}")?;
                }
                writeln!(writer, "{}", line.replace('\n', " | "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn line(format: LogFormat) -> String {
        let sink = Sink::default();
        let lines = Lines { format, service: "persia-server", replica: 3 };
        let writer = sink.clone();
        let logs = tracing_subscriber::fmt().event_format(lines).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(logs, || tracing::info!(generation = 7, name = "a\nb", "begun"));
        String::from_utf8(sink.0.lock().clone()).unwrap()
    }

    #[test]
    fn a_json_line_has_the_process_and_the_fields() {
        let value: Value = serde_json::from_str(&line(LogFormat::Json)).unwrap();
        let text = |name: &str| value[name].as_str().unwrap().to_owned();
        assert_eq!([text("service"), text("message"), text("level")], ["persia-server", "begun", "info"]);
        assert_eq!((value["replica"].as_u64(), value["generation"].as_u64()), (Some(3), Some(7)));
        assert!(text("time").ends_with('Z'), "{value}");
    }

    #[test]
    fn an_event_is_one_line_of_text() {
        let line = line(LogFormat::Text);
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(line.contains("info  persia-server 3: begun generation=7"), "{line}");
    }
}
