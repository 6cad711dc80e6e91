//! Tests of TLS, with certificates that the tests create.

use std::path::PathBuf;
use std::time::Duration;

use persia_types::TablesError;
use persia_wire::client::{ClientOptions, WireTables};
use persia_wire::tls::TlsFiles;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::mock::{Running, ids, lookup, push, start, start_with};

struct Authority {
    dir: tempfile::TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let authority = Self { dir: tempfile::tempdir().unwrap(), issuer };
        authority.file("ca.pem", &authority.issuer.pem());
        authority
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Start a server with a certificate for `name`, which may be expired.
    fn server(&self, name: &str, expired: bool) -> Running {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        if expired {
            (params.not_before, params.not_after) =
                (rcgen::date_time_ymd(2001, 1, 1), rcgen::date_time_ymd(2002, 1, 1));
        }
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let files = TlsFiles {
            cert: Some(self.file("cert.pem", &cert.pem())),
            key: Some(self.file("key.pem", &key.serialize_pem())),
            ..TlsFiles::default()
        };
        start_with(&[], None, files.server().unwrap())
    }

    fn client(&self, running: &Running, name: Option<&str>) -> WireTables {
        let files = TlsFiles {
            ca: Some(self.dir.path().join("ca.pem")),
            name: name.map(str::to_owned),
            ..TlsFiles::default()
        };
        let tls = files.client().unwrap();
        let rpc_timeout = Duration::from_secs(20);
        WireTables::connect(ClientOptions { tls, rpc_timeout, ..running.options() }).unwrap()
    }
}

#[test]
fn rows_travel_encrypted() {
    let authority = Authority::new();
    for (name, asked) in [("persia", None), ("another.name", Some("another.name"))] {
        let running = authority.server(name, false);
        let client = authority.client(&running, asked);
        lookup(&client, &ids(20_000)).unwrap();
        push(&client, &ids(20_000)).unwrap();
    }
}

#[test]
fn a_certificate_that_is_not_accepted_is_refused_at_once() {
    let (authority, other) = (Authority::new(), Authority::new());
    let good = authority.server("persia", false);
    let expired = authority.server("persia", true);
    let plain = start(&[]);
    let clients = [
        ("another authority", other.client(&good, None)),
        ("another name", authority.client(&good, Some("elsewhere"))),
        ("expired", authority.client(&expired, None)),
        ("a server without TLS", authority.client(&plain, None)),
    ];
    for (what, client) in clients {
        let error = lookup(&client, &ids(10)).unwrap_err();
        assert!(matches!(error, TablesError::Refused { .. }), "{what}: {error}");
        assert!(error.to_string().contains("TLS"), "{what}: {error}");
    }
}

#[test]
fn an_authority_that_is_no_certificate_is_named_with_the_cause() {
    let (authority, running) = (Authority::new(), start(&[]));
    authority.file("ca.pem", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n");
    let error = lookup(&authority.client(&running, None), &ids(10)).unwrap_err();
    assert!(matches!(error, TablesError::Refused { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("parsing TLS certificate") && text.contains("PERSIA_TLS_CA"), "{text}");
    assert!(!text.contains("Some("), "{text}");
}

#[test]
fn a_client_without_tls_does_not_get_through() {
    let running = Authority::new().server("persia", false);
    let options = ClientOptions { rpc_timeout: Duration::from_secs(1), ..running.options() };
    let error = lookup(&WireTables::connect(options).unwrap(), &ids(10)).unwrap_err();
    assert!(matches!(error, TablesError::Unreachable { .. }), "{error}");
    assert!(running.calls().is_empty());
}
