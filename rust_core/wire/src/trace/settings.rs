//! [`TraceSettings`]: the OpenTelemetry variables that set where spans are sent.

use std::path::PathBuf;

use tonic::codegen::http::Uri;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use crate::error::with_causes;
use crate::settings::CONNECT_TIMEOUT;

const ENDPOINT: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const PROTOCOL: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const CERTIFICATE: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"];
const COMPRESSION: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"];
const EXPORTER: &str = "OTEL_TRACES_EXPORTER";
const DISABLED: &str = "OTEL_SDK_DISABLED";

/// An OpenTelemetry variable has an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value}: {what}")]
pub struct BadTraceSettings {
    variable: &'static str,
    value: String,
    what: String,
}

/// The endpoint to which spans are sent.
#[derive(Debug, Clone)]
pub struct TraceSettings {
    /// The URL of the endpoint.
    pub endpoint: String,
    /// The variable that sets the URL.
    pub variable: &'static str,
    authority: Option<Authority>,
}

/// The certificate authority that must have issued the endpoint's certificate, instead of those that this
/// host trusts.
#[derive(Debug, Clone)]
struct Authority {
    variable: &'static str,
    path: String,
    certificate: Certificate,
}

/// Returns the value of a variable.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl TraceSettings {
    /// Read the settings from the environment. Returns None if no endpoint is set or tracing is disabled. An
    /// empty variable counts as not set.
    ///
    /// # Errors
    /// The first variable with an invalid value.
    pub fn from_env() -> Result<Option<Self>, BadTraceSettings> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    fn from_variables(variables: Lookup<'_>) -> Result<Option<Self>, BadTraceSettings> {
        let read =
            |name: &str| variables(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        let first = |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, read(name)?)));
        if read(DISABLED).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let bad = |variable, value: String, what: &str| {
            Err(BadTraceSettings { variable, value, what: what.to_owned() })
        };
        match read(EXPORTER) {
            Some(name) if name == "none" => return Ok(None),
            Some(name) if name != "otlp" => return bad(EXPORTER, name, "expected otlp or none"),
            _ => {}
        }
        let Some((set_by, endpoint)) = first(ENDPOINT) else { return Ok(None) };
        let url: Option<Uri> = endpoint.parse().ok();
        let scheme = url.as_ref().and_then(Uri::scheme_str);
        if !matches!(scheme, Some("http" | "https")) {
            let what = "expected the URL of an OTLP receiver for gRPC, such as http://HOST:4317";
            return bad(set_by, hidden(&endpoint), what);
        }
        if endpoint.contains('@') {
            let what =
                "a user and password are not supported; set OTEL_EXPORTER_OTLP_HEADERS=authorization=...";
            return bad(set_by, hidden(&endpoint), what);
        }
        if let Some((variable, protocol)) = first(PROTOCOL).filter(|(_, protocol)| protocol != "grpc") {
            let what = "expected grpc: spans are sent by OTLP over gRPC, usually to port 4317";
            return bad(variable, protocol, what);
        }
        if let Some((variable, name)) = first(COMPRESSION).filter(|(_, name)| name != "none") {
            return bad(
                variable,
                name,
                "expected the value none, because spans are sent without compression",
            );
        }
        let authority = match first(CERTIFICATE) {
            None => None,
            Some((variable, path)) => match std::fs::read(PathBuf::from(&path)) {
                Ok(content) => {
                    Some(Authority { variable, path, certificate: Certificate::from_pem(content) })
                }
                Err(error) => return bad(variable, path, &error.to_string()),
            },
        };
        Ok(Some(Self { endpoint, variable: set_by, authority }))
    }

    pub(super) fn unusable(&self, what: String) -> BadTraceSettings {
        BadTraceSettings { variable: self.variable, value: self.endpoint.clone(), what }
    }

    /// The connection, which is opened when it is first used.
    pub(super) fn connection(&self) -> Result<Endpoint, BadTraceSettings> {
        let endpoint = Endpoint::from_shared(self.endpoint.clone())
            .map_err(|error| self.unusable(format!("the address cannot be used: {}", with_causes(&error))))?
            .connect_timeout(CONNECT_TIMEOUT);
        if !self.endpoint.starts_with("https:") {
            return Ok(endpoint);
        }
        let tls = match &self.authority {
            Some(authority) => ClientTlsConfig::new().ca_certificate(authority.certificate.clone()),
            None => ClientTlsConfig::new().with_enabled_roots(),
        };
        endpoint.tls_config(tls).map_err(|error| self.without_tls(&with_causes(&error)))
    }

    /// The error of an endpoint whose TLS cannot be configured: its host name or the certificate authority is invalid,
    /// or this host trusts no authority.
    fn without_tls(&self, why: &str) -> BadTraceSettings {
        let next = match &self.authority {
            Some(Authority { variable, path, .. }) => {
                format!("check the host name, and that {variable}={path} is a certificate in PEM format")
            }
            None => format!(
                "check the host name, or set {} to the certificate file of the authority",
                CERTIFICATE[1]
            ),
        };
        self.unusable(format!("cannot use TLS: {why}; {next}"))
    }
}

/// The endpoint without user and password.
fn hidden(endpoint: &str) -> String {
    match (endpoint.find("://"), endpoint.rfind('@')) {
        (Some(scheme), Some(at)) if at > scheme => {
            format!("{}...{}", &endpoint[..scheme + 3], &endpoint[at..])
        }
        (None, Some(at)) => format!("...{}", &endpoint[at..]),
        _ => endpoint.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &[(&str, &str)]) -> Result<Option<TraceSettings>, BadTraceSettings> {
        TraceSettings::from_variables(&|name| {
            set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const URL: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");

    #[test]
    fn it_is_off_unless_an_endpoint_is_set() {
        assert!(read(&[]).unwrap().is_none());
        assert!(read(&[(URL.0, "  ")]).unwrap().is_none());
        assert!(read(&[URL, ("OTEL_SDK_DISABLED", "TRUE")]).unwrap().is_none());
        assert!(read(&[URL, ("OTEL_TRACES_EXPORTER", "none")]).unwrap().is_none());
        assert_eq!(read(&[URL]).unwrap().unwrap().endpoint, URL.1);
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces:4317");
        let both = read(&[URL, own, ("OTEL_TRACES_EXPORTER", "otlp")]).unwrap().unwrap();
        assert_eq!((both.endpoint.as_str(), both.variable), (own.1, own.0));
        read(&[URL]).unwrap().unwrap().connection().unwrap();
    }

    #[test]
    fn an_authority_that_is_no_certificate_is_named_with_the_cause() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n").unwrap();
        let path = file.path().display().to_string();
        let https = (URL.0, "https://collector:4317");
        let settings = read(&[https, ("OTEL_EXPORTER_OTLP_CERTIFICATE", path.as_str())]).unwrap().unwrap();
        let text = settings.connection().unwrap_err().to_string();
        assert!(
            text.starts_with("OTEL_EXPORTER_OTLP_ENDPOINT=https://collector:4317: cannot use TLS: "),
            "{text}"
        );
        assert!(text.contains("parsing TLS certificate"), "{text}");
        assert!(text.contains(&format!("OTEL_EXPORTER_OTLP_CERTIFICATE={path}")), "{text}");
        // Without an authority, the next step is to set one.
        let text = read(&[https]).unwrap().unwrap().without_tls("no native certs found").to_string();
        assert!(text.contains("set OTEL_EXPORTER_OTLP_CERTIFICATE to the certificate file"), "{text}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases: [(&[(&str, &str)], &str); 7] = [
            (&[(URL.0, "collector:4317")], "OTEL_EXPORTER_OTLP_ENDPOINT=collector:4317: expected the URL"),
            (&[(URL.0, "ftp://collector")], "http://HOST:4317"),
            (&[(URL.0, "http://me:secret@collector:4317")], "=http://...@collector:4317: a user"),
            (&[URL, ("OTEL_TRACES_EXPORTER", "zipkin")], "OTEL_TRACES_EXPORTER=zipkin: expected otlp"),
            (
                &[URL, ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")],
                "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
            ),
            (
                &[URL, ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")],
                "OTEL_EXPORTER_OTLP_COMPRESSION=gzip: expected the value none",
            ),
            (&[URL, ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/gone")], "OTEL_EXPORTER_OTLP_CERTIFICATE=/gone: "),
        ];
        for (set, wanted) in cases {
            let text = read(set).unwrap_err().to_string();
            assert!(text.contains(wanted) && !text.contains("secret"), "{text}");
        }
    }
}
