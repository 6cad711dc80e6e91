//! Logs: one line for each event on standard error, as JSON or text.

use persia_wire::logs::{Lines, Origin, directives};
use tracing_subscriber::EnvFilter;

use crate::exit::Exit;

/// The log levels of libraries, unless LOG_LEVEL has filters. Most events of libraries are not logged, because this
/// crate logs each change of a connection once.
const QUIET: &str = "async_nats=error,h2=warn,hyper=warn,object_store=warn,rustls=warn,tonic=warn,tower=warn";

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Each line is a JSON object.
    Json,
    /// Each line is readable text.
    Text,
}

impl LogFormat {
    fn lines(self, origin: Origin) -> Lines {
        match self {
            Self::Json => Lines::json(origin),
            Self::Text => Lines::text(origin),
        }
    }
}

/// Start to log panics and events. `level`, the value of LOG_LEVEL, and PERSIA_LOG select the events. Each line has
/// `service` and `replica`.
///
/// # Errors
/// `Usage` for a filter that cannot be parsed, such as a target with an unknown level.
pub fn start(format: LogFormat, level: &str, service: &'static str, replica: u32) -> Result<(), Exit> {
    let filter = filter(level, &std::env::var("PERSIA_LOG").unwrap_or_default())?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // This fails only if a test has already set a subscriber.
    let _ = logs.event_format(format.lines(Origin::here(service, replica, None))).try_init();
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!(place = ?panic.location().map(ToString::to_string), "panic: {}", reason(panic));
    }));
    Ok(())
}

/// The filter for `level`, the value of LOG_LEVEL, and `own`, the value of PERSIA_LOG.
fn filter(level: &str, own: &str) -> Result<EnvFilter, Exit> {
    let levels = "use error, warn, info, debug or trace";
    let parse = |name: &str, value: &str| {
        directives(value).map_err(|error| Exit::Usage(format!("{name}={value:?}: {error}; {levels}")))
    };
    let mut filters = parse("LOG_LEVEL", level)?;
    match filters.as_slice() {
        [] => filters.extend(["info".to_owned(), QUIET.to_owned()]),
        [one] if !one.contains('=') => filters.push(QUIET.to_owned()),
        _ => {}
    }
    filters.extend(parse("PERSIA_LOG", own)?);
    EnvFilter::builder().parse(filters.join(",")).map_err(|error| {
        Exit::Usage(format!(
            "LOG_LEVEL={level:?}, PERSIA_LOG={own:?}: {error}; use LEVEL or TARGET=LEVEL, separated by commas"
        ))
    })
}

fn reason(panic: &std::panic::PanicHookInfo<'_>) -> String {
    let payload = panic.payload();
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use serde_json::Value;

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
        let lines = format.lines(Origin::here("persia-server", 3, None));
        let writer = sink.clone();
        let logs = tracing_subscriber::fmt().event_format(lines).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(logs, || {
            tracing::info!(generation = 7, name = "a\nb", rank = 1, token = "7/1/3", "begun");
        });
        String::from_utf8(sink.0.lock().clone()).unwrap()
    }

    /// `tests/unit/test_logger.py` checks that Python uses the same keys.
    #[test]
    fn a_json_line_has_the_process_and_the_fields() {
        persia_wire::logs::name_run("ads");
        let value: Value = serde_json::from_str(&line(LogFormat::Json)).unwrap();
        let keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let of_all = ["event", "generation", "level", "name", "node", "rank", "replica", "run_id"];
        assert_eq!(keys, [&of_all[..], &["service", "target", "token", "ts"]].concat());
        let text = |name: &str| value[name].as_str().unwrap().to_owned();
        assert_eq!([text("service"), text("event"), text("level")], ["persia-server", "begun", "info"]);
        assert_eq!([text("run_id"), text("token")], ["ads", "7/1/3"]);
        assert_eq!((value["replica"].as_u64(), value["generation"].as_u64()), (Some(3), Some(7)));
        assert_eq!(value["rank"].as_u64(), Some(1), "of the event, because a server is no rank");
        assert!(text("ts").ends_with('Z') && !text("node").is_empty(), "{value}");
    }

    #[test]
    fn the_variable_that_cannot_be_used_is_named() {
        for (level, own) in
            [("info", ""), ("", ""), ("WARNING", ""), ("warn,persia_wire=trace", "persia.wire=debug")]
        {
            filter(level, own).unwrap();
        }
        assert!(filter("WARNING", "").unwrap().to_string().contains("warn"));
        for (level, own, named) in [
            ("loud", "", "LOG_LEVEL=\"loud\": "),
            ("persia_wire=loud", "persia.wire=debug", "LOG_LEVEL=\"persia_wire=loud\": "),
            ("info", "persia.wire=loud", "PERSIA_LOG=\"persia.wire=loud\": "),
        ] {
            let text = filter(level, own).unwrap_err().to_string();
            assert!(text.starts_with(named), "{text}");
        }
    }

    #[test]
    fn an_event_is_one_line_of_text() {
        let line = line(LogFormat::Text);
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(
            line.contains("info  persia-server 3: begun generation=7 ") && line.contains(r#"token="7/1/3""#),
            "{line}"
        );
    }
}
