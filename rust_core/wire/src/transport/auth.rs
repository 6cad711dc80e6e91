//! Authentication: the job has one secret, from which a token for each role is derived.
//!
//! A token is `sha256("persia role <role> " || secret)` in lower-case hex. Every call carries a role and its token.
//! Without a secret, a process serves only its own host (*protected mode*) and does not check tokens.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Extensions, Request, Status};

use crate::settings::Endpoint;

/// The minimum size of a secret, in bytes.
pub const MIN_SECRET_BYTES: usize = 32;
/// The maximum size of a token file, in bytes.
const MAX_SECRET_BYTES: u64 = 4096;
const ROLE: &str = "persia-role";
const AUTHORIZATION: &str = "authorization";

/// The role of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// A rank: look-ups, pushes and statistics.
    Trainer,
    /// A data-compose replica, which sends batches to ranks.
    Data,
    /// A middleware: look-ups and pushes for ranks.
    Middleware,
    /// An administrator, which begins runs and saves, restores or clears rows.
    Admin,
    /// Any process that connects to NATS.
    Nats,
}

impl Role {
    /// The name of the role on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trainer => "trainer",
            Self::Data => "data",
            Self::Middleware => "middleware",
            Self::Admin => "admin",
            Self::Nats => "nats",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let all = [Self::Trainer, Self::Data, Self::Middleware, Self::Admin, Self::Nats];
        all.into_iter().find(|role| role.name() == name).ok_or(())
    }
}

/// The reason why a secret is invalid or missing.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// The token file cannot be read.
    #[error("cannot read token file {}: {source}; PERSIA_TOKEN_FILE sets its path", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The secret in the token file has an invalid size.
    #[error(
        "token file {}: a secret of {found} bytes, expected {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}; \
         create one with: head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n'",
        .path.display()
    )]
    BadLength {
        /// The file.
        path: PathBuf,
        /// The size of the secret without trailing white space or, if the file is too large, of the file.
        found: u64,
    },
    /// There is no secret, but other hosts can reach the address.
    #[error(
        "refusing to listen on {endpoint} without a token: any host on the network could connect; \
         set PERSIA_TOKEN_FILE, or listen on 127.0.0.1 or unix:/path"
    )]
    Unprotected {
        /// The address on which to listen.
        endpoint: Endpoint,
    },
}

/// The job's secret. It is never printed.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Secret {
    /// Read a secret: the content of a token file, without trailing white space.
    ///
    /// # Errors
    /// [`AuthError::Unreadable`], [`AuthError::BadLength`].
    pub fn read(path: &Path) -> Result<Self, AuthError> {
        let unreadable = |source| AuthError::Unreadable { path: path.to_owned(), source };
        let size = std::fs::metadata(path).map_err(unreadable)?.len();
        if size > MAX_SECRET_BYTES {
            return Err(AuthError::BadLength { path: path.to_owned(), found: size });
        }
        let content = std::fs::read(path).map_err(unreadable)?;
        let secret = content.trim_ascii_end();
        if secret.len() < MIN_SECRET_BYTES {
            return Err(AuthError::BadLength { path: path.to_owned(), found: secret.len() as u64 });
        }
        Ok(Self(secret.to_vec()))
    }

    /// Read the secret from the file, if a file is given.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn read_if_given(path: Option<&Path>) -> Result<Option<Self>, AuthError> {
        path.map(Self::read).transpose()
    }

    /// Derive the token of `role`.
    pub fn token(&self, role: Role) -> RoleToken {
        let mut hash = Sha256::new();
        hash.update(format!("persia role {role} "));
        hash.update(&self.0);
        RoleToken(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// The token of one role. It is never printed.
#[derive(Clone)]
pub struct RoleToken(String);

impl fmt::Debug for RoleToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RoleToken(…)")
    }
}

impl RoleToken {
    /// The token as it is sent.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// A caller's role and token. As an interceptor, this adds them to every call.
#[derive(Debug, Clone)]
pub struct Credentials {
    role: MetadataValue<Ascii>,
    authorization: Option<MetadataValue<Ascii>>,
}

impl Credentials {
    /// The credentials of `role`. Without a secret, only processes in protected mode accept them.
    pub fn new(role: Role, secret: Option<&Secret>) -> Self {
        let authorization = secret.and_then(|secret| {
            let bearer = format!("Bearer {}", secret.token(role).reveal());
            let mut value = MetadataValue::try_from(bearer).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Self { role: MetadataValue::from_static(role.name()), authorization }
    }
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let metadata = request.metadata_mut();
        metadata.insert(ROLE, self.role.clone());
        if let Some(authorization) = &self.authorization {
            metadata.insert(AUTHORIZATION, authorization.clone());
        }
        Ok(request)
    }
}

/// Authenticates every call to a service. As an interceptor, this stores the [`Role`] in the request's extensions
/// for [`require`].
#[derive(Debug, Clone)]
pub struct Guard {
    secret: Option<Secret>,
}

impl Guard {
    /// Create a guard with `secret`. Without a secret, it does not check tokens, so `listen` must be local.
    ///
    /// # Errors
    /// [`AuthError::Unprotected`] if there is no secret and other hosts can reach `listen`.
    pub fn new(secret: Option<Secret>, listen: &Endpoint) -> Result<Self, AuthError> {
        if secret.is_none() && !listen.is_local() {
            return Err(AuthError::Unprotected { endpoint: listen.clone() });
        }
        Ok(Self { secret })
    }

    /// Check the token in the metadata of a call. Returns the authenticated role. Without a secret, this is
    /// the role that the caller claims, by default `Admin`.
    ///
    /// # Errors
    /// `Unauthenticated`, with a message that says what is missing or wrong.
    pub fn check(&self, metadata: &MetadataMap) -> Result<Role, Status> {
        let claimed = match metadata.get(ROLE) {
            Some(name) => {
                let name = name.to_str().unwrap_or_default();
                // The text is truncated because the peer chooses it.
                let shown = || name.chars().take(32).collect::<String>();
                let of_services = name.parse().ok().filter(|role| *role != Role::Nats);
                of_services.ok_or_else(|| Status::unauthenticated(format!("unknown role {:?}", shown())))?
            }
            None if self.secret.is_none() => Role::Admin,
            None => return Err(Status::unauthenticated(format!("the header {ROLE} is missing"))),
        };
        let Some(secret) = &self.secret else { return Ok(claimed) };
        let Some(sent) = metadata.get(AUTHORIZATION) else {
            return Err(Status::unauthenticated(
                "no token was sent: set PERSIA_TOKEN_FILE of the caller to the job's token file",
            ));
        };
        let expected = format!("Bearer {}", secret.token(claimed).reveal());
        if bool::from(sent.as_bytes().ct_eq(expected.as_bytes())) {
            Ok(claimed)
        } else {
            Err(Status::unauthenticated(format!(
                "the token is not that of role {claimed}: caller and receiver have different token files \
                 (PERSIA_TOKEN_FILE)"
            )))
        }
    }
}

impl Interceptor for Guard {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let role = self.check(request.metadata())?;
        request.extensions_mut().insert(role);
        Ok(request)
    }
}

/// Check that the caller has one of the `allowed` roles, or is an administrator. Pass `request.extensions()`.
///
/// # Errors
/// `PermissionDenied`, with the role and the method; `Unauthenticated` if the call was not authenticated.
pub fn require(extensions: &Extensions, method: &str, allowed: &[Role]) -> Result<(), Status> {
    match extensions.get::<Role>() {
        Some(role) if *role == Role::Admin || allowed.contains(role) => Ok(()),
        Some(role) => Err(Status::permission_denied(format!("role {role} may not call {method}"))),
        None => Err(Status::unauthenticated("the call was not authenticated")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn secret(text: &str) -> Secret {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, text).unwrap();
        Secret::read(&path).unwrap()
    }

    const SECRET: &str = "0123456789abcdef0123456789abcdef\n";

    fn guard() -> Guard {
        Guard::new(Some(secret(SECRET)), &"0.0.0.0:1".parse().unwrap()).unwrap()
    }

    fn metadata(role: Role, secret: Option<&Secret>) -> MetadataMap {
        Credentials::new(role, secret).call(Request::new(())).unwrap().metadata().clone()
    }

    #[test]
    fn the_token_is_what_the_shell_makes_of_it() {
        // printf 'persia role nats %s' 0123456789abcdef0123456789abcdef | sha256sum
        let token = secret(SECRET).token(Role::Nats);
        assert_eq!(token.reveal(), "562bfe8887dd10b3a062e0869fa0c75faf7f5f83265586b6ffccf98ed620cbf0");
    }

    #[test]
    fn a_role_is_accepted_with_its_own_token_only() {
        let (good, other) = (secret(SECRET), secret("another secret of at least 32 bytes"));
        for role in [Role::Trainer, Role::Data, Role::Middleware, Role::Admin] {
            assert_eq!(guard().check(&metadata(role, Some(&good))).unwrap(), role);
            for bad in [metadata(role, None), metadata(role, Some(&other)), MetadataMap::new()] {
                assert_eq!(guard().check(&bad).unwrap_err().code(), tonic::Code::Unauthenticated);
            }
        }
        let mut forged = metadata(Role::Trainer, Some(&good));
        forged.insert(ROLE, MetadataValue::from_static("admin"));
        assert!(guard().check(&forged).is_err());
    }

    #[test]
    fn an_allowed_role_may_call_and_another_may_not() {
        let request = |role| {
            let mut request = Request::new(());
            request.extensions_mut().insert::<Role>(role);
            request
        };
        require(request(Role::Trainer).extensions(), "Push", &[Role::Trainer]).unwrap();
        require(request(Role::Admin).extensions(), "Push", &[Role::Trainer]).unwrap();
        let denied = require(request(Role::Data).extensions(), "Push", &[Role::Trainer]).unwrap_err();
        assert_eq!(denied.message(), "role data may not call Push");
        assert!(require(Request::new(()).extensions(), "Push", &[Role::Trainer]).is_err());
    }

    #[test]
    fn without_a_secret_only_this_host_is_served() {
        for local in ["127.0.0.1:8888", "localhost:0", "[::1]:8888", "unix:/run/persia.sock"] {
            let guard = Guard::new(None, &local.parse().unwrap()).unwrap();
            assert_eq!(guard.check(&metadata(Role::Data, None)).unwrap(), Role::Data);
        }
        for open in ["0.0.0.0:8888", "[::]:8888", "10.0.0.1:8888", "host:8888"] {
            let error = Guard::new(None, &open.parse().unwrap()).unwrap_err().to_string();
            assert!(error.contains(open) && error.contains("PERSIA_TOKEN_FILE"), "{error}");
        }
    }

    #[test]
    fn a_bad_token_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let error = Secret::read(&path).unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
        for content in ["short\n".to_owned(), " ".repeat(100), "x".repeat(5000)] {
            fs::write(&path, content).unwrap();
            assert!(matches!(Secret::read(&path).unwrap_err(), AuthError::BadLength { .. }));
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let secret = secret(SECRET);
        let credentials = Credentials::new(Role::Admin, Some(&secret));
        let token = secret.token(Role::Admin);
        let text = format!("{secret:?} {token:?} {credentials:?} {:?}", guard());
        assert!(!text.contains("0123456789abcdef") && !text.contains(token.reveal()), "{text}");
    }
}
