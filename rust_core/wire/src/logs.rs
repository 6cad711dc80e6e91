//! The grammar of `PERSIA_LOG`, which is that of `persia.runtime.logging` in Python.

/// The directives of `PERSIA_LOG` as `tracing-subscriber` has them.
///
/// `persia.wire=debug,warning` gives `persia_wire=debug` and `warn`; `persia.server` is the crate of the servers.
pub fn directives(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(directive).collect()
}

fn directive(part: &str) -> String {
    let Some((target, level)) = part.split_once('=') else { return level_of(part) };
    let target = match target.trim().split_once('.') {
        Some(("persia", "server")) => "persia_embedding_sharded_server".to_owned(),
        Some(("persia", rest)) => format!("persia_{}", rest.replace('.', "::")),
        _ => target.trim().to_owned(),
    };
    format!("{target}={}", level_of(level))
}

fn level_of(level: &str) -> String {
    match level.trim().to_lowercase().as_str() {
        "warning" => "warn".to_owned(),
        "critical" | "fatal" => "error".to_owned(),
        other => other.to_owned(),
    }
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
            "persia_embedding_sharded_server=warn",
            "persia=info",
            "error",
        ];
        assert_eq!(directives(text), wanted);
        assert!(directives(" ").is_empty());
    }
}
