use futures_util::StreamExt;
use persia_types::id::ShardedIds;
use persia_types::{JobId, Mode, TablesError, Token};
use tonic::{Code, Status};

use crate::error::from_status;
use crate::floats::RowFormat;
use crate::parts::Part;
use crate::proto;
use crate::receive::{ReceivedLookup, ReceivedPush, lookup, push};
use crate::send::{id_chunks, row_chunks};

const DIM: usize = 2;

fn sent_ids() -> ShardedIds {
    ShardedIds::group(&[5, 6, 7]).unwrap()
}

fn sent_token() -> Token {
    Token { job: JobId(1), generation: 2, rank: 3, seq: 4 }
}

fn lookup_messages() -> Vec<proto::LookupRequest> {
    use proto::lookup_request::Part as Message;
    let head = proto::LookupHead {
        token: Some(sent_token().into()),
        step: 9,
        mode: proto::Mode::Eval.into(),
        parts: vec![Part::new(1, RowFormat::f32(DIM), &sent_ids()).to_proto()],
    };
    let ids = sent_ids();
    let chunks = id_chunks(0, ids.ids()).map(Message::Ids);
    std::iter::once(Message::Head(head))
        .chain(chunks)
        .map(|part| proto::LookupRequest { part: Some(part) })
        .collect()
}

fn push_messages() -> Vec<proto::PushRequest> {
    use proto::push_request::Part as Message;
    let head = proto::PushHead {
        token: Some(sent_token().into()),
        step: 9,
        lr_factor: 0.5,
        parts: vec![Part::new(1, RowFormat::f32(DIM), &sent_ids()).to_proto()],
        only: vec![],
    };
    let ids = sent_ids();
    let chunks = id_chunks(0, ids.ids()).map(Message::Ids);
    let gradients =
        row_chunks(0, RowFormat::f32(DIM), vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).map(Message::Gradients);
    let all: Vec<Message> = std::iter::once(Message::Head(head)).chain(chunks).chain(gradients).collect();
    all.into_iter().map(|part| proto::PushRequest { part: Some(part) }).collect()
}

fn run<F: Future>(future: F) -> F::Output {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().unwrap().block_on(future)
}

fn receive_lookup(messages: Vec<proto::LookupRequest>) -> Result<ReceivedLookup, Status> {
    run(lookup(&mut tokio_stream::iter(messages.into_iter().map(Ok))))
}

fn receive_push(messages: Vec<proto::PushRequest>) -> Result<ReceivedPush, Status> {
    run(push(&mut tokio_stream::iter(messages.into_iter().map(Ok))))
}

#[test]
fn requests_are_what_was_sent() {
    let found = receive_lookup(lookup_messages()).unwrap();
    assert_eq!((found.token, found.step, found.mode), (sent_token(), 9, Mode::Eval));
    assert_eq!((found.ids.as_slice(), found.parts[0].table), (&[sent_ids()][..], 1));
    assert_eq!(found.buffers(), [[0.0; 3 * DIM]]);
    let found = receive_push(push_messages()).unwrap();
    assert_eq!((found.token, found.step, found.lr_factor), (sent_token(), 9, 0.5));
    assert_eq!(found.gradients, [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]);
    assert_eq!(found.tables()[0].gradients.rows(0..3, DIM).len(), 3 * DIM);
}

#[test]
fn a_stream_that_is_not_a_request_is_refused() {
    let whole = lookup_messages();
    let empty = proto::LookupRequest { part: None };
    let cases = [
        (vec![], Code::InvalidArgument),
        (whole[1..].to_vec(), Code::InvalidArgument),
        (vec![empty.clone()], Code::InvalidArgument),
        ([&whole[..], &whole[..1]].concat(), Code::InvalidArgument),
        ([&whole[..], &[empty]].concat(), Code::InvalidArgument),
        ([&whole[..], &whole[1..]].concat(), Code::InvalidArgument),
        (whole[..1].to_vec(), Code::DataLoss),
    ];
    for (messages, code) in cases {
        let count = messages.len();
        let status = receive_lookup(messages).unwrap_err();
        assert_eq!(status.code(), code, "{count} messages: {status}");
    }
    let whole = push_messages();
    for (messages, code) in [
        (vec![], Code::InvalidArgument),
        (whole[..2].to_vec(), Code::DataLoss),
        ([&whole[..1], &whole[2..]].concat(), Code::DataLoss),
        ([&whole[..], &whole[2..]].concat(), Code::InvalidArgument),
    ] {
        assert_eq!(receive_push(messages).unwrap_err().code(), code);
    }
}

#[test]
fn a_head_without_token_or_with_a_foreign_mode_is_refused() {
    use proto::lookup_request::Part as Message;
    let change = |change: fn(&mut proto::LookupHead)| {
        let mut messages = lookup_messages();
        if let Some(Message::Head(head)) = &mut messages[0].part {
            change(head);
        }
        from_status("client", &receive_lookup(messages).unwrap_err())
    };
    assert!(matches!(change(|head| head.token = None), TablesError::BadShape { .. }));
    assert!(matches!(change(|head| head.mode = 0), TablesError::BadShape { .. }));
    assert!(matches!(change(|head| head.mode = 77), TablesError::BadShape { .. }));
    let many = change(|head| head.parts[0].shard_counts[0] = u32::MAX);
    assert!(matches!(many, TablesError::TooManyIds { .. }));
}

#[test]
fn an_id_in_a_foreign_shard_is_refused() {
    use proto::lookup_request::Part as Message;
    let mut messages = lookup_messages();
    let mut ids = sent_ids().ids().to_vec();
    ids.reverse();
    messages[1].part = id_chunks(0, &ids).map(Message::Ids).next();
    let error = from_status("client", &receive_lookup(messages).unwrap_err());
    assert!(error.to_string().contains("belongs to shard"), "{error}");
}

#[test]
fn a_sender_that_falls_silent_is_given_up() {
    let status = run(async {
        let mut stream = tokio_stream::iter(lookup_messages().into_iter().take(1).map(Ok))
            .chain(futures_util::stream::pending());
        lookup(&mut stream).await.unwrap_err()
    });
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert!(status.message().contains("60 s"), "{status}");
}
