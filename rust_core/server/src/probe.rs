//! The flag `--health`: asks the process at `--listen` whether it serves.

use std::process::ExitCode;
use std::time::Duration;

use persia_wire::error::with_causes;
use persia_wire::settings::Endpoint;
use tonic::Status;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::args::CommonArgs;
use crate::exit::Exit;
use crate::kind::Kind;

const TIMEOUT: Duration = Duration::from_secs(2);
/// The variable that sets the certificate authority.
const AUTHORITY: &str = "PERSIA_TLS_CA";

/// Ask the process. Returns the exit code 0 if it serves, and 1 if it does not.
///
/// # Errors
/// `Usage` for a malformed address, an address with port 0, or certificates that cannot be used.
#[allow(clippy::print_stderr, reason = "the answer for a person; the exit code is for the container engine")]
pub async fn ask(args: &CommonArgs, kind: Kind) -> Result<ExitCode, Exit> {
    let endpoint = match args.listen(kind.port)? {
        Endpoint::Tcp { host, port } if matches!(host.as_str(), "0.0.0.0" | "::") => {
            let host = if host == "::" { "::1" } else { "127.0.0.1" };
            Endpoint::Tcp { host: host.into(), port }
        }
        other => other,
    };
    if matches!(endpoint, Endpoint::Tcp { port: 0, .. }) {
        return Err(Exit::Usage("--health needs the port of the process, but --listen has port 0".into()));
    }
    let mut tls = args.tls();
    let mut authority = AUTHORITY;
    if tls.cert.is_none() {
        tls.ca = None;
    } else if tls.ca.is_none() {
        // Without an authority, the process's own certificate is used as the authority, so it must be
        // self-signed.
        tls.ca.clone_from(&tls.cert);
        authority = "PERSIA_TLS_CERT";
    }
    let tls = tls.client();
    let tls = tls.map_err(|error| Exit::Usage(error.to_string().replacen(AUTHORITY, authority, 1)))?;
    let answer = async {
        let channel = endpoint.channel(tls.as_ref()).map_err(|error| {
            let why = with_causes(&error);
            let what = match &tls {
                Some(_) => format!("cannot use {authority} and PERSIA_TLS_NAME"),
                None => "the address cannot be used".to_owned(),
            };
            Status::unavailable(format!("{what}: {why}"))
        })?;
        let request = HealthCheckRequest { service: kind.grpc.into() };
        HealthClient::new(channel).check(request).await
    };
    let what = match tokio::time::timeout(TIMEOUT, answer).await {
        Ok(Ok(reply)) if reply.get_ref().status() == ServingStatus::Serving => return Ok(ExitCode::SUCCESS),
        Ok(Ok(reply)) => {
            let status = reply.get_ref().status().as_str_name();
            format!("the process responds, but does not serve: its status is {status}")
        }
        Ok(Err(status)) => persia_wire::error::describe(&status),
        Err(_) => format!("no response within {} s", TIMEOUT.as_secs()),
    };
    eprintln!("{endpoint}: {what}");
    Ok(ExitCode::FAILURE)
}
