//! Tests of samples that a middleware refuses, and of 16-bit floats in a middleware.

use persia_kernels::{Bags, Csr, Gradients, Pool, SegmentSum};
use persia_store::{Store, StoreOptions};
use persia_types::tables::{LookupRequest, PerSample, PushRequest, TableGradients, TableIds};
use persia_types::{Dtype, Id, Mode, ShardedIds, Tables, TablesError};
use persia_wire::auth::{Credentials, Role};
use persia_wire::bounded;
use persia_wire::client::WireTables;
use persia_wire::error::from_status;
use persia_wire::floats::RowFormat;
use persia_wire::parts::Part;
use persia_wire::proto::embedding_server_client::EmbeddingServerClient;
use persia_wire::proto::middleware_client::MiddlewareClient;
use persia_wire::proto::{self, lookup_request, push_request};
use persia_wire::send::{id_chunks, row_chunks, word_chunks};
use tonic::Status;

use crate::equal::sixteen_bits;
use crate::limits::memory_kib;
use crate::stack::{self, Plan, Stack, lookup, push_as, run_of, token};

const DIM: usize = 4;
/// The dimension. It is so large that samples take fewer bytes than rows.
const WIDE: usize = 32;
const IDS: usize = 3;

/// Two samples: one with the first two ids, and one with the third id and the first.
const PLACES: &[u32] = &[0, 1, 2, 0];
const OFFSETS: &[u32] = &[0, 2, 4];
const WEIGHTS: &[f32] = &[1.0, 1.0, 1.0, 1.0];
const DIVISORS: &[f32] = &[2.0, 2.0];
/// The same samples, grouped by id.
const SAMPLES: &[u32] = &[0, 1, 0, 1];
const STARTS: &[u32] = &[0, 2, 3, 4];

fn begun(servers: u32) -> (Stack, WireTables) {
    let stack = Stack::start(Plan::new(servers));
    let client = stack.client();
    client.begin(&run_of(&stack.plan)).unwrap();
    (stack, client)
}

fn ids() -> ShardedIds {
    ShardedIds::group(&(0..IDS as Id).collect::<Vec<Id>>()).unwrap()
}

fn part() -> proto::TablePart {
    let samples =
        proto::Samples { samples: 2, indices: 4, per_sample_weights: true, factors: true, scale: 1.0 };
    proto::TablePart { samples: Some(samples), ..Part::new(0, RowFormat::f32(DIM), &ids()).to_proto() }
}

fn with(change: impl Fn(&mut proto::Samples)) -> proto::TablePart {
    let mut part = part();
    part.samples.iter_mut().for_each(change);
    part
}

fn words(list: &[u32], starts: &[u32], weights: &[f32], factors: &[f32]) -> Vec<u32> {
    let floats: Vec<u32> = weights.iter().chain(factors).map(|value| value.to_bits()).collect();
    [list, starts, &floats].concat()
}

/// Call a middleware or a server directly, without the checks of the client.
fn raw_lookup(
    stack: &Stack,
    server: Option<usize>,
    messages: Vec<lookup_request::Part>,
) -> Result<(), Status> {
    let endpoint = server.map_or(&stack.front, |server| &stack.servers[server]);
    stack.block_on(async {
        let credentials = Credentials::new(Role::Trainer, None);
        let channel = endpoint.channel(None).unwrap();
        let messages = messages.into_iter().map(|part| proto::LookupRequest { part: Some(part) });
        let messages = tokio_stream::iter(messages.collect::<Vec<_>>());
        let replies = if server.is_some() {
            bounded!(EmbeddingServerClient::with_interceptor(channel, credentials)).lookup(messages).await
        } else {
            bounded!(MiddlewareClient::with_interceptor(channel, credentials)).lookup(messages).await
        };
        let mut replies = replies?.into_inner();
        while replies.message().await?.is_some() {}
        Ok(())
    })
}

fn raw_push(stack: &Stack, server: Option<usize>, messages: Vec<push_request::Part>) -> Result<(), Status> {
    let endpoint = server.map_or(&stack.front, |server| &stack.servers[server]);
    stack.block_on(async {
        let credentials = Credentials::new(Role::Trainer, None);
        let channel = endpoint.channel(None).unwrap();
        let messages = messages.into_iter().map(|part| proto::PushRequest { part: Some(part) });
        let messages = tokio_stream::iter(messages.collect::<Vec<_>>());
        let reply = if server.is_some() {
            bounded!(EmbeddingServerClient::with_interceptor(channel, credentials)).push(messages).await
        } else {
            bounded!(MiddlewareClient::with_interceptor(channel, credentials)).push(messages).await
        };
        reply.map(drop)
    })
}

fn lookup_messages(part: proto::TablePart, words: &[u32]) -> Vec<lookup_request::Part> {
    let mode = proto::Mode::Train.into();
    let head = proto::LookupHead { token: Some(token(0, 1).into()), step: 1, mode, parts: vec![part] };
    let uses = word_chunks(0, [&words[..5], &words[5..], &[], &[]]).map(lookup_request::Part::Csr);
    let mut messages = vec![lookup_request::Part::Head(head)];
    messages.extend(uses.chain(id_chunks(0, ids().ids()).map(lookup_request::Part::Ids)));
    messages
}

fn push_messages(part: proto::TablePart, words: &[u32], gradients: Vec<f32>) -> Vec<push_request::Part> {
    let (token, parts) = (Some(token(0, 1).into()), vec![part]);
    let head = proto::PushHead { token, step: 1, lr_factor: 1.0, parts, only: vec![] };
    let uses = word_chunks(0, [&words[..5], &words[5..], &[], &[]]).map(push_request::Part::Csr);
    let mut messages = vec![push_request::Part::Head(head)];
    messages.extend(uses.chain(id_chunks(0, ids().ids()).map(push_request::Part::Ids)));
    messages.extend(row_chunks(0, RowFormat::f32(DIM), gradients).map(push_request::Part::Gradients));
    messages
}

fn rows(client: &WireTables) -> Vec<f32> {
    lookup(client, token(0, 9), Mode::Eval, &[DIM], &[ids().ids().to_vec()]).unwrap().1.remove(0)
}

#[test]
fn malformed_samples_of_a_look_up_are_refused_by_name_and_bring_no_rows() {
    let (stack, client) = begun(3);
    let good = words(PLACES, OFFSETS, WEIGHTS, DIVISORS);
    let refused = |part, words: &[u32], named: &str| {
        let status = raw_lookup(&stack, None, lookup_messages(part, words)).unwrap_err();
        let error = from_status("", &status);
        assert!(matches!(error, TablesError::BadShape { .. }), "{named}: {error}");
        assert!(error.to_string().contains("table 0") && error.to_string().contains(named), "{error}");
    };
    refused(with(|samples| samples.samples = 1 << 25), &good, "33554432 samples, but the limit is");
    refused(with(|samples| samples.indices = u32::MAX), &good, "indices of ids, but the limit is");
    refused(proto::TablePart { shard_counts: vec![0; 256], ..part() }, &good, "2 samples use no ids");
    refused(
        part(),
        &words(&[0, 1, 2, 3], OFFSETS, WEIGHTS, DIVISORS),
        "a sample uses row index 3, but the number of rows is 3",
    );
    refused(part(), &words(PLACES, &[0, 5, 4], WEIGHTS, DIVISORS), "offsets of samples must ascend");
    refused(part(), &words(PLACES, &[0, 2, 3], WEIGHTS, DIVISORS), "from 0 to 3");
    refused(part(), &words(PLACES, OFFSETS, &[1.0, f32::NAN, 1.0, 1.0], DIVISORS), "weight NaN at index 1");
    refused(part(), &words(PLACES, OFFSETS, WEIGHTS, &[2.0, 0.0]), "divisor 0 of sample 1");
    let status = raw_lookup(&stack, None, lookup_messages(with(|samples| samples.indices = 1 << 28), &good));
    assert!(status.unwrap_err().message().contains("bytes of samples and their indices"));

    let whole = lookup_messages(part(), &good);
    let missing = [&whole[..2], &whole[3..]].concat();
    let late = [&whole[..1], &whole[3..], &whole[1..3]].concat();
    for messages in [missing, late] {
        let status = raw_lookup(&stack, None, messages).unwrap_err();
        assert!(status.message().contains("the lists of all samples must come first"), "{status}");
    }
    assert!(raw_lookup(&stack, None, whole[..2].to_vec()).unwrap_err().message().contains("cut short"));
    let twice = [&whole[..], &whole[2..3]].concat();
    assert!(raw_lookup(&stack, None, twice).unwrap_err().message().contains("a look-up has only ids"));

    let status = raw_lookup(&stack, Some(0), whole.clone()).unwrap_err();
    assert!(status.message().contains("pooled by a middleware"), "{status}");
    assert_eq!(client.stats().unwrap().rows, [0]);
    raw_lookup(&stack, None, whole).unwrap();
    assert_eq!(client.stats().unwrap().lookups.initial, IDS as u64);
}

#[test]
fn malformed_samples_of_a_push_are_refused_by_name_and_change_no_row() {
    let (stack, client) = begun(3);
    push_as(&client, token(0, 50), &[DIM], &[ids().ids().to_vec()], |_| 0.0).unwrap();
    let (good, gradients) = (words(SAMPLES, STARTS, WEIGHTS, &[0.5, 0.5]), vec![1.0; 2 * DIM]);
    let refused = |part, words: &[u32], gradients: Vec<f32>, named: &str| {
        let status = raw_push(&stack, None, push_messages(part, words, gradients)).unwrap_err();
        assert!(status.message().contains(named), "{status}");
    };
    let of = |list, starts| words(list, starts, WEIGHTS, &[0.5, 0.5]);
    refused(
        part(),
        &of(&[0, 1, 0, 2], STARTS),
        gradients.clone(),
        "table 0: an id uses sample index 2, but the number of samples is 2",
    );
    refused(part(), &of(SAMPLES, &[0, 3, 2, 4]), gradients.clone(), "table 0: offsets of ids must ascend");
    refused(part(), &of(SAMPLES, &[0, 2, 3, 9]), gradients.clone(), "from 0 to 9");
    refused(with(|samples| samples.samples = 1 << 25), &good, gradients.clone(), "the limit is");
    refused(part(), &good, vec![1.0; DIM], "cut short");
    refused(part(), &good, vec![1.0; 3 * DIM], "2 were announced");
    let status = raw_push(&stack, Some(0), push_messages(part(), &good, gradients.clone())).unwrap_err();
    assert!(status.message().contains("pooled by a middleware"), "{status}");
    assert_eq!(rows(&client), [0.0; IDS * DIM]);

    let scaled = with(|samples| samples.scale = 3.0);
    raw_push(&stack, None, push_messages(scaled, &good, gradients)).unwrap();
    // The first id occurs twice, and the other two ids occur once.
    assert_eq!(rows(&client), [[-3.0; DIM], [-1.5; DIM], [-1.5; DIM]].concat());
}

#[test]
fn claims_of_samples_cost_nothing() {
    let (stack, _client) = begun(1);
    let before = memory_kib();
    let claim = proto::TablePart {
        shard_counts: vec![7_800; 256],
        dim: 128,
        ..with(|samples| (samples.samples, samples.indices) = (1 << 20, 1 << 26))
    };
    for _ in 0..20 {
        let messages = lookup_messages(claim.clone(), &[0; 1000]);
        raw_lookup(&stack, None, messages[..2].to_vec()).unwrap_err();
        let messages = push_messages(claim.clone(), &[0; 1000], vec![]);
        raw_push(&stack, None, messages[..2].to_vec()).unwrap_err();
    }
    // A middleware that trusted such a request would allocate more than a gigabyte.
    assert!(memory_kib() - before < 200 * 1024, "{} KiB more", memory_kib() - before);
}

#[test]
fn sixteen_bits_are_rounded_between_all_processes() {
    let (places, samples): (Vec<u32>, u32) = ((0..600).map(|place| place * 7 % 400).collect(), 40);
    let ids = ShardedIds::group(&(0..400).collect::<Vec<Id>>()).unwrap();
    let offsets: Vec<u32> = (0..=samples).map(|sample| sample * 15).collect();
    let divisors = vec![15.0; samples as usize];
    let bags = Bags {
        indices: &places,
        offsets: Some(&offsets),
        per_sample_weights: None,
        divisors: Some(&divisors),
    };
    let (mut starts, mut of_ids) = (vec![0], Vec::new());
    for unique in 0..400 {
        of_ids.extend((0..600).filter(|use_| places[*use_ as usize] == unique).map(|use_: u32| use_ / 15));
        starts.push(of_ids.len() as u32);
    }
    let csr = Csr { offsets: &starts, indices: &of_ids };
    let gradients: Vec<f32> = (0..40 * WIDE).map(|place| (place as f32 / 3.0 - 20.0) * 1024.0).collect();
    let factors = [1.0 / 15.0; 40];
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let round =
            |values: &[f32]| -> Vec<f32> { values.iter().map(|value| sixteen_bits(dtype, *value)).collect() };
        let stack = Stack::start(Plan { schema: stack::schema(&[WIDE]), ..Plan::new(3) });
        let mut options = stack.options();
        options.wire_dtype = dtype;
        let client = WireTables::connect(options).unwrap();
        let store = Store::new(stack.plan.schema.clone(), StoreOptions::default()).unwrap();
        assert!(client.pools(WIDE, 400, &bags));
        client.begin(&run_of(&stack.plan)).unwrap();
        store.begin(&run_of(&stack.plan)).unwrap();
        let all = [ids.ids().to_vec()];
        for seq in 1..=2 {
            let mut out = vec![f32::NAN; 40 * WIDE];
            let tables = [TableIds { table: 0, ids: &ids, per_sample: Some(PerSample::Pooled(bags)) }];
            let request =
                LookupRequest { token: token(0, seq), step: seq, mode: Mode::Train, tables: &tables };
            client.lookup(&request, &mut [&mut out]).unwrap();
            let rows = lookup(&store, token(0, seq), Mode::Train, &[WIDE], &all).unwrap().1.remove(0);
            let mut pooled = vec![0.0; 40 * WIDE];
            persia_kernels::pool(&Pool { rows: &round(&rows), dim: WIDE, bags }, &mut pooled);
            assert_eq!(out, round(&pooled), "{dtype:?}");

            let sum = |gradients, scale| {
                let factors = Some(&factors[..]);
                SegmentSum { gradients, dim: WIDE, csr, factors, per_sample_weights: None, scale }
            };
            let loss_scale = 1.0 / 1024.0;
            let gradients_of_samples = Gradients::Samples(sum(&gradients, loss_scale));
            let tables = [TableGradients { table: 0, ids: &ids, gradients: gradients_of_samples }];
            let request = PushRequest { token: token(0, seq), step: seq, lr_factor: 1.0, tables: &tables };
            client.push(&request).unwrap();
            let scaled: Vec<f32> = gradients.iter().map(|gradient| gradient * loss_scale).collect();
            let scaled = round(&scaled);
            let summed = Gradients::Samples(sum(&scaled, 1.0)).rows(0..400, WIDE).into_owned();
            let tables =
                [TableGradients { table: 0, ids: &ids, gradients: Gradients::Rows(&round(&summed)) }];
            store.push(&PushRequest { tables: &tables, ..request }).unwrap();
        }
        let [left, right] = [&client as &dyn Tables, &store]
            .map(|tables| lookup(tables, token(0, 9), Mode::Eval, &[WIDE], &all).unwrap().1.remove(0));
        assert_eq!(left, round(&right), "{dtype:?}");
    }
}
