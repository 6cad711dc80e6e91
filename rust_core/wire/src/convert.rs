//! Converts tokens, modes, reports, snapshots and files to messages and back, and runs to JSON.

use persia_types::tables::{FileEntry, LookupReport, PushReport, Run, Snapshot};
use persia_types::{Id, JobId, Mode, TablesError, Token};

use crate::proto;

impl From<Token> for proto::Token {
    fn from(token: Token) -> Self {
        Self { job: token.job.0, generation: token.generation, rank: token.rank, seq: token.seq }
    }
}

impl From<proto::Token> for Token {
    fn from(token: proto::Token) -> Self {
        Self { job: JobId(token.job), generation: token.generation, rank: token.rank, seq: token.seq }
    }
}

/// The token in the head of a look-up or push.
///
/// # Errors
/// `BadShape` if it is missing.
pub fn token(token: Option<proto::Token>) -> Result<Token, TablesError> {
    token.map(Token::from).ok_or_else(|| TablesError::BadShape { what: "the head has no token".into() })
}

impl From<Mode> for proto::Mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Train => Self::Train,
            Mode::Eval => Self::Eval,
            Mode::Infer => Self::Infer,
        }
    }
}

/// The mode in the head of a look-up.
///
/// # Errors
/// `BadShape` for an unspecified or unknown mode.
pub fn mode(number: i32) -> Result<Mode, TablesError> {
    match proto::Mode::try_from(number) {
        Ok(proto::Mode::Train) => Ok(Mode::Train),
        Ok(proto::Mode::Eval) => Ok(Mode::Eval),
        Ok(proto::Mode::Infer) => Ok(Mode::Infer),
        _ => Err(TablesError::BadShape { what: format!("a look-up has the unknown mode {number}") }),
    }
}

/// Implements the conversions between a type and a message with the same fields. An optional field
/// follows the semicolon.
macro_rules! same_fields {
    ($type:ident as $message:ident { $($field:ident),+ $(; $optional:ident)? }) => {
        impl From<$type> for proto::$message {
            fn from(value: $type) -> Self {
                let $type { $($field,)+ $($optional)? } = value;
                Self { $($field,)+ $($optional: $optional.map(Into::into))? }
            }
        }

        impl From<proto::$message> for $type {
            fn from(value: proto::$message) -> Self {
                let proto::$message { $($field,)+ $($optional)? } = value;
                Self { $($field,)+ $($optional: $optional.map(Into::into))? }
            }
        }
    };
}

same_fields!(LookupReport as LookupReport { hits, initial, missing });
same_fields!(PushReport as PushReport {
    rows_pushed,
    rows_applied,
    rows_missing,
    rows_nonfinite,
    rows_duplicate,
    rows_inserted,
    rows_evicted,
    rows_expired;
    first_nonfinite
});
same_fields!(FileEntry as File { name, bytes, blake3 });

impl From<(usize, Id)> for proto::NonFinite {
    fn from((table, id): (usize, Id)) -> Self {
        Self { table: table as u32, id }
    }
}

impl From<proto::NonFinite> for (usize, Id) {
    fn from(row: proto::NonFinite) -> Self {
        (row.table as usize, row.id)
    }
}

impl From<Snapshot> for proto::WriteSnapshotReply {
    fn from(snapshot: Snapshot) -> Self {
        Self { files: snapshot.files.into_iter().map(Into::into).collect(), rows: snapshot.rows }
    }
}

impl From<proto::WriteSnapshotReply> for Snapshot {
    fn from(reply: proto::WriteSnapshotReply) -> Self {
        Self { files: reply.files.into_iter().map(Into::into).collect(), rows: reply.rows }
    }
}

/// The run as the JSON of a `BeginRequest`.
///
/// # Errors
/// `BadRun` for a run that cannot be serialized.
pub fn run_to_json(run: &Run) -> Result<String, TablesError> {
    let what = |error: serde_json::Error| format!("it cannot be encoded: {error}");
    serde_json::to_string(run).map_err(|error| TablesError::BadRun { what: what(error) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_are_reversible() {
        let sent = Token { job: JobId(9), generation: 2, rank: 3, seq: 4 };
        assert_eq!(token(Some(sent.into())).unwrap(), sent);
        assert!(token(None).is_err());
        for sent in [Mode::Train, Mode::Eval, Mode::Infer] {
            assert_eq!(mode(proto::Mode::from(sent) as i32).unwrap(), sent);
        }
        assert!(mode(0).is_err() && mode(9).is_err());
        let report = PushReport {
            rows_pushed: 15,
            rows_applied: 1,
            rows_missing: 2,
            rows_nonfinite: 4,
            rows_duplicate: 8,
            rows_inserted: 3,
            rows_evicted: 5,
            rows_expired: 6,
            first_nonfinite: Some((1, u64::MAX)),
        };
        assert_eq!(PushReport::from(proto::PushReport::from(report)), report);
        let report = LookupReport { hits: 1, initial: 2, missing: 3 };
        assert_eq!(LookupReport::from(proto::LookupReport::from(report)), report);
        let file = FileEntry { name: "shard-003.arrow".into(), bytes: 7, blake3: "ab".into() };
        let snapshot = Snapshot { files: vec![file], rows: vec![1, 2] };
        assert_eq!(Snapshot::from(proto::WriteSnapshotReply::from(snapshot.clone())), snapshot);
    }
}
