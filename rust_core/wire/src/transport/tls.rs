//! Optional TLS between processes: `PERSIA_TLS_CERT` and `PERSIA_TLS_KEY` for a server, `PERSIA_TLS_CA` for a
//! client.

use std::io;
use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

use crate::settings::CONNECT_TIMEOUT;

/// The default name against which certificates are checked.
pub const DEFAULT_NAME: &str = "persia";

/// The files with certificates and keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate chain, in PEM format.
    pub cert: Option<PathBuf>,
    /// The server's key, in PEM format.
    pub key: Option<PathBuf>,
    /// The certificate authority that a client trusts, in PEM format. Without an authority, the client does
    /// not use TLS.
    pub ca: Option<PathBuf>,
    /// The name that the server's certificate must have; None means [`DEFAULT_NAME`].
    pub name: Option<String>,
}

/// The reason why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("{variable}={}: {source}", .path.display())]
    Unreadable {
        /// The variable that sets it.
        variable: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file has no PEM block of the required kind.
    #[error("{variable}={}: the file has no PEM block {kind}", .path.display())]
    NotPem {
        /// The variable that sets it.
        variable: &'static str,
        /// The file.
        path: PathBuf,
        /// The kind of the missing block.
        kind: &'static str,
    },
    /// A certificate is set without a key, or a key without a certificate.
    #[error("{given} is set, but {missing} is not: set both, or neither")]
    Half {
        /// The variable that is set.
        given: &'static str,
        /// The variable that is not set.
        missing: &'static str,
    },
}

impl TlsFiles {
    /// Read `PERSIA_TLS_CERT`, `_KEY`, `_CA` and `_NAME`. An empty variable counts as not set.
    pub fn from_env() -> Self {
        let file = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            cert: file("PERSIA_TLS_CERT"),
            key: file("PERSIA_TLS_KEY"),
            ca: file("PERSIA_TLS_CA"),
            name: std::env::var("PERSIA_TLS_NAME").ok().filter(|name| !name.is_empty()),
        }
    }

    /// The configuration of a server; None without a certificate.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn server(&self) -> Result<Option<ServerTlsConfig>, TlsError> {
        let (cert, key) = match (&self.cert, &self.key) {
            (None, None) => return Ok(None),
            (Some(cert), Some(key)) => (cert, key),
            (Some(_), None) => {
                return Err(TlsError::Half { given: "PERSIA_TLS_CERT", missing: "PERSIA_TLS_KEY" });
            }
            (None, Some(_)) => {
                return Err(TlsError::Half { given: "PERSIA_TLS_KEY", missing: "PERSIA_TLS_CERT" });
            }
        };
        let cert = read("PERSIA_TLS_CERT", cert, "CERTIFICATE")?;
        let key = read("PERSIA_TLS_KEY", key, "PRIVATE KEY")?;
        let identity = Identity::from_pem(cert, key);
        Ok(Some(ServerTlsConfig::new().identity(identity).timeout(CONNECT_TIMEOUT)))
    }

    /// The configuration of a client; None without an authority.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn client(&self) -> Result<Option<ClientTlsConfig>, TlsError> {
        let Some(ca) = &self.ca else { return Ok(None) };
        let ca = read("PERSIA_TLS_CA", ca, "CERTIFICATE")?;
        let name = self.name.as_deref().unwrap_or(DEFAULT_NAME);
        let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name(name);
        Ok(Some(config.timeout(CONNECT_TIMEOUT)))
    }
}

fn read(variable: &'static str, path: &Path, kind: &'static str) -> Result<Vec<u8>, TlsError> {
    let content = std::fs::read(path).map_err(|source| TlsError::Unreadable {
        variable,
        path: path.to_owned(),
        source,
    })?;
    let end = format!("{kind}-----");
    if content.windows(end.len()).any(|window| window == end.as_bytes()) {
        return Ok(content);
    }
    Err(TlsError::NotPem { variable, path: path.to_owned(), kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        assert!(TlsFiles::default().server().unwrap().is_none());
        assert!(TlsFiles::default().client().unwrap().is_none());
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = Some(file.path().to_owned());
        let half = TlsFiles { cert: path.clone(), ..TlsFiles::default() };
        assert!(half.server().unwrap_err().to_string().contains("PERSIA_TLS_KEY is not"));
        let empty = TlsFiles { cert: path.clone(), key: path.clone(), ca: path, name: None };
        assert!(matches!(empty.server().unwrap_err(), TlsError::NotPem { .. }));
        assert!(matches!(empty.client().unwrap_err(), TlsError::NotPem { .. }));
        let gone = TlsFiles { ca: Some("/does/not/exist".into()), ..TlsFiles::default() };
        assert!(gone.client().unwrap_err().to_string().starts_with("PERSIA_TLS_CA=/does/not/exist: "));
    }
}
