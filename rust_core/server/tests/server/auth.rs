//! Tests of the methods that each role may call, and of TLS.

use std::fs;
use std::path::Path;
use std::process::Command;

use persia_types::{Tables, TablesError};
use persia_wire::auth::{Credentials, Role, Secret};
use persia_wire::client::WireTables;
use persia_wire::proto::embedding_server_client::EmbeddingServerClient;
use persia_wire::proto::{
    AbortSnapshotRequest, BeginRequest, ClearRequest, CommitSnapshotRequest, LookupRequest,
    PrepareSnapshotRequest, PushRequest, RestoreRequest, StatsRequest, WriteSnapshotRequest,
};
use persia_wire::tls::TlsFiles;
use tonic::Code;

use crate::stack::{Plan, Stack, run_of};

fn secret(text: &str) -> Secret {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    Secret::read(file.path()).unwrap()
}

/// The status code of each method for an empty request.
async fn codes(stack: &Stack, credentials: Credentials) -> [Code; 10] {
    let channel = stack.servers[0].channel(None).unwrap();
    let mut client = EmbeddingServerClient::with_interceptor(channel, credentials);
    let code = |result: Result<(), tonic::Status>| result.map_or_else(|status| status.code(), |()| Code::Ok);
    let nothing = tokio_stream::empty::<LookupRequest>;
    [
        code(client.lookup(nothing()).await.map(drop)),
        code(client.push(tokio_stream::empty::<PushRequest>()).await.map(drop)),
        code(client.begin(BeginRequest::default()).await.map(drop)),
        code(client.prepare_snapshot(PrepareSnapshotRequest::default()).await.map(drop)),
        code(client.abort_snapshot(AbortSnapshotRequest::default()).await.map(drop)),
        code(client.commit_snapshot(CommitSnapshotRequest::default()).await.map(drop)),
        code(client.write_snapshot(WriteSnapshotRequest::default()).await.map(drop)),
        code(client.restore(RestoreRequest::default()).await.map(drop)),
        code(client.clear(ClearRequest::default()).await.map(drop)),
        code(client.stats(StatsRequest {}).await.map(drop)),
    ]
}

#[test]
fn every_role_may_do_what_it_is_for_and_nothing_else() {
    let good = secret("a secret of at least thirty-two bytes");
    let stack = Stack::start(Plan { secret: Some(good.clone()), middleware: false, ..Plan::new(1) });
    // The requests are invalid, so a caller with the right role gets the error of an invalid request.
    let data = [Code::InvalidArgument; 2];
    let no = Code::PermissionDenied;
    let admin = [Code::FailedPrecondition; 7];
    let expected = |data: [Code; 2], admin: [Code; 7]| {
        let [begin, prepare, abort, commit, write, restore, clear] = admin;
        [data[0], data[1], begin, prepare, abort, commit, write, restore, clear, Code::Ok]
    };
    let matrix = [
        (Role::Trainer, expected(data, [no; 7])),
        (Role::Middleware, expected(data, [no; 7])),
        (Role::Data, expected([no; 2], [no; 7])),
        (Role::Admin, expected(data, admin)),
    ];
    for (role, expected) in matrix {
        let found = stack.block_on(codes(&stack, Credentials::new(role, Some(&good))));
        assert_eq!(found, expected, "{role}");
        let unauthenticated = [None, Some(secret("another secret of thirty-two bytes"))];
        for peer in unauthenticated {
            let found = stack.block_on(codes(&stack, Credentials::new(role, peer.as_ref())));
            assert_eq!(found, [Code::Unauthenticated; 10], "{role}");
        }
    }
}

#[test]
fn a_wrong_token_is_refused_at_once_and_by_name() {
    let stack =
        Stack::start(Plan { secret: Some(secret("a secret of at least thirty-two bytes")), ..Plan::new(2) });
    stack.client().begin(&run_of(&stack.plan)).unwrap();
    for wrong in [None, Some(secret("another secret of thirty-two bytes"))] {
        let mut options = stack.options();
        options.secret = wrong;
        let client = WireTables::connect(options).unwrap();
        let error = client.wait_ready(std::time::Duration::from_secs(60)).unwrap_err();
        assert!(matches!(error, TablesError::Refused { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("PERSIA_TOKEN_FILE") && text.contains(&stack.front.to_string()), "{text}");
    }
}

/// A certificate for "persia", and the authority that signed it.
fn certificates(dir: &Path, name: &str) -> TlsFiles {
    let file = |end: &str| dir.join(format!("{name}.{end}"));
    let openssl = |arguments: &[&str]| {
        let done = Command::new("openssl").args(arguments).current_dir(dir).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    let (ca, ca_key) = (format!("{name}.ca"), format!("{name}.ca.key"));
    let (key, request, cert) = (format!("{name}.key"), format!("{name}.csr"), format!("{name}.cert"));
    let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    openssl(
        &[
            &["req", "-x509", "-days", "2", "-subj", "/CN=test authority", "-keyout", &ca_key, "-out", &ca],
            &new_key[..],
        ]
        .concat(),
    );
    openssl(&[&["req", "-subj", "/CN=persia", "-keyout", &key, "-out", &request], &new_key[..]].concat());
    fs::write(file("ext"), "subjectAltName=DNS:persia\n").unwrap();
    let extension = format!("{name}.ext");
    openssl(&[
        "x509",
        "-req",
        "-days",
        "2",
        "-in",
        &request,
        "-CA",
        &ca,
        "-CAkey",
        &ca_key,
        "-CAcreateserial",
        "-extfile",
        &extension,
        "-out",
        &cert,
    ]);
    TlsFiles { cert: Some(file("cert")), key: Some(file("key")), ca: Some(file("ca")), name: None }
}

#[test]
fn tls_works_and_refuses_what_it_should() {
    let dir = tempfile::tempdir().unwrap();
    let good = certificates(dir.path(), "good");
    let other = certificates(dir.path(), "other");
    let stack = Stack::start(Plan { tls: good.clone(), ..Plan::new(2) });
    let client = stack.client();
    client.begin(&run_of(&stack.plan)).unwrap();

    let wait = |tls: &TlsFiles, seconds: u64| {
        let mut options = stack.options();
        options.tls = tls.client().unwrap();
        let client = WireTables::connect(options).unwrap();
        client.wait_ready(std::time::Duration::from_secs(seconds)).map_err(|error| error.to_string())
    };
    wait(&good, 60).unwrap();
    let wrong_name = TlsFiles { name: Some("another".into()), ..good.clone() };
    for wrong in [&other, &wrong_name] {
        let error = wait(wrong, 3).unwrap_err();
        assert!(error.contains("refused") && error.contains("certificate"), "{error}");
    }
    let plain = wait(&TlsFiles::default(), 3).unwrap_err();
    assert!(plain.contains(&stack.front.to_string()), "{plain}");
}
