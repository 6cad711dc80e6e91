use persia_kernels::{Bags, Csr, Gradients, Pool, SegmentSum};
use persia_types::id::{Id, ShardedIds, hash_id};
use persia_types::{Dtype, TablesError};
use tonic::{Code, Status};

use crate::chunk::CHUNK_BYTES;
use crate::collect::Collector;
use crate::csr::{ReceivedCsr, bag_words, receive_csr, sum_words};
use crate::error::from_status;
use crate::floats::RowFormat;
use crate::parts::{Part, check_parts};
use crate::proto::Chunk;
use crate::samples::{RequestKind, Samples};
use crate::send::{gradient_chunks, pooled_chunks, word_chunks};

fn ids(count: u64) -> ShardedIds {
    ShardedIds::group(&(0..count).collect::<Vec<Id>>()).unwrap()
}

fn part_of(samples: Samples, ids: &ShardedIds) -> Part {
    let part = Part::new(6, RowFormat::f32(4), ids).with_samples(Some(samples));
    check_parts(&[part.to_proto()]).unwrap().remove(0)
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().unwrap().block_on(future)
}

/// Receive the lists of one part. In `messages`, None stands for a message without words.
fn receive(
    kind: RequestKind,
    part: &Part,
    messages: Vec<Option<Chunk>>,
) -> Result<Option<ReceivedCsr>, Status> {
    let mut stream = tokio_stream::iter(messages.into_iter().map(Ok));
    let parts = std::slice::from_ref(part);
    run(receive_csr(&mut stream, kind, parts, |message| message)).map(|mut csr| csr.remove(0))
}

fn sent(lists: [&[u32]; 4]) -> Vec<Option<Chunk>> {
    word_chunks(0, lists).map(Some).collect()
}

const PLACES: &[u32] = &[2, 0, 1];
const OFFSETS: &[u32] = &[0, 2, 2, 3];
const WEIGHTS: &[f32] = &[1.0, -2.0, 0.5];
const DIVISORS: &[f32] = &[2.0, 1.0, 0.5];

#[test]
fn lists_round_trip() {
    let ids = ids(60_000);
    let places: Vec<u32> = (0..70_000).map(|place| place * 7 % 60_000).collect();
    let offsets: Vec<u32> = (0..=7_000).map(|sample| sample * 10).collect();
    let weights: Vec<f32> = places.iter().map(|place| *place as f32).collect();
    let divisors: Vec<f32> = offsets[1..].iter().map(|offset| *offset as f32).collect();
    for (weights, divisors) in [
        (None, None),
        (Some(&weights[..]), None),
        (None, Some(&divisors[..])),
        (Some(&weights[..]), Some(&divisors[..])),
    ] {
        let bags = Bags { indices: &places, offsets: Some(&offsets), per_sample_weights: weights, divisors };
        let chunks = sent(bag_words(&bags));
        assert!(chunks.iter().flatten().all(|chunk| chunk.data.len() <= CHUNK_BYTES));
        let part_of_bags = part_of(Samples::of_bags(&bags).unwrap(), &ids);
        let csr = receive(RequestKind::Lookup, &part_of_bags, chunks).unwrap().unwrap();
        let back = csr.bags();
        assert_eq!((back.indices, back.offsets), (bags.indices, bags.offsets));
        assert_eq!((back.per_sample_weights, back.divisors), (bags.per_sample_weights, bags.divisors));

        let starts: Vec<u32> = (0..=60_000).map(|id| id * 70_000 / 60_000).collect();
        let samples: Vec<u32> = (0..70_000).map(|sample| sample % 7_000).collect();
        let gradients = vec![0.5; 7_000 * 4];
        let csr = Csr { offsets: &starts, indices: &samples };
        let sum = SegmentSum {
            gradients: &gradients,
            dim: 4,
            csr,
            factors: divisors,
            per_sample_weights: weights,
            scale: 0.3,
        };
        let part_of_sum = part_of(Samples::of_sum(&sum), &ids);
        let csr = receive(RequestKind::Push, &part_of_sum, sent(sum_words(&sum))).unwrap().unwrap();
        let back = csr.sum(&gradients, 4);
        back.check(60_000).unwrap();
        assert_eq!((back.csr.offsets, back.csr.indices), (&starts[..], &samples[..]));
        assert_eq!(
            (back.per_sample_weights, back.factors, back.scale),
            (sum.per_sample_weights, sum.factors, 0.3)
        );
    }
}

#[test]
fn samples_are_sent_where_they_are_fewer_bytes() {
    let samples =
        |samples, indices| Samples { samples, indices, per_sample_weights: false, factors: true, scale: 1.0 };
    let format = |dim, dtype| RowFormat { dim, dtype };
    // Compare the bytes that are sent in addition to the ids. There are 4,096 samples of 10 ids, and 33,000
    // of the ids are unique.
    let many = samples(4096, 40_960);
    for (dim, dtype, times) in
        [(16, Dtype::F32, 3.6), (128, Dtype::F32, 6.6), (16, Dtype::F16, 1.8), (128, Dtype::Bf16, 5.0)]
    {
        let rows = 33_000 * format(dim, dtype).width().0;
        for kind in [RequestKind::Lookup, RequestKind::Push] {
            assert!(many.save(kind, 33_000, format(dim, dtype)));
            let bytes = 4096 * format(dim, dtype).width().0 + many.words(kind, 33_000) * 4;
            assert!(rows as f64 / bytes as f64 > times, "{kind:?} {dim} {dtype:?}: {rows} and {bytes}");
        }
    }
    // Vectors do not save bytes for samples with one id each, for ids that are used often, and for rows as
    // small as the words that replace them.
    for kind in [RequestKind::Lookup, RequestKind::Push] {
        assert!(!samples(4096, 4096).save(kind, 4000, format(128, Dtype::F32)));
        assert!(!samples(4096, 40_960).save(kind, 2000, format(16, Dtype::F32)));
        assert!(!many.save(kind, 33_000, format(1, Dtype::F32)));
        assert!(!samples(0, 0).save(kind, 0, format(16, Dtype::F32)));
    }
    assert!(
        Samples::of_bags(&Bags { indices: PLACES, offsets: None, per_sample_weights: None, divisors: None })
            .is_none()
    );
}

#[test]
fn malformed_lists_are_refused_by_name() {
    let good = Bags {
        indices: PLACES,
        offsets: Some(OFFSETS),
        per_sample_weights: Some(WEIGHTS),
        divisors: Some(DIVISORS),
    };
    let part = part_of(Samples::of_bags(&good).unwrap(), &ids(3));
    let said = |messages| {
        receive(RequestKind::Lookup, &part, messages).map(drop).map_err(|status| {
            let error = from_status("", &status);
            assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
            error.to_string()
        })
    };
    said(sent(bag_words(&good))).unwrap();
    for (bags, named) in [
        (
            Bags { indices: &[2, 0, 3], ..good },
            "table 6: a sample uses row index 3, but the number of rows is 3",
        ),
        (Bags { indices: &[2, 0, u32::MAX], ..good }, "row index 4294967295, but the number of rows is 3"),
        (Bags { offsets: Some(&[0, 3, 2, 3]), ..good }, "table 6: offsets of samples must ascend"),
        (Bags { offsets: Some(&[0, 2, 2, 2]), ..good }, "from 0 to 2"),
        (Bags { per_sample_weights: Some(&[1.0, f32::NAN, 1.0]), ..good }, "weight NaN at index 1"),
        (Bags { divisors: Some(&[1.0, -1.0, 1.0]), ..good }, "divisor -1 of sample 1"),
    ] {
        let error = said(sent(bag_words(&bags))).unwrap_err();
        assert!(error.contains(named), "{error}");
    }
    let sum = |samples, starts| SegmentSum {
        gradients: &[0.0; 12],
        dim: 4,
        csr: Csr { offsets: starts, indices: samples },
        factors: None,
        per_sample_weights: None,
        scale: 1.0,
    };
    for (samples, starts, named) in [
        (
            &[0u32, 1, 3][..],
            &[0u32, 1, 2, 3][..],
            "table 6: an id uses sample index 3, but the number of samples is 3",
        ),
        (&[0, 1, 2], &[0, 3, 2, 3], "table 6: offsets of ids must ascend"),
        (&[0, 1, 2], &[0, 1, 2, 2], "from 0 to 2"),
    ] {
        let sum = sum(samples, starts);
        let part = part_of(Samples::of_sum(&sum), &ids(3));
        let status = receive(RequestKind::Push, &part, sent(sum_words(&sum))).unwrap_err();
        assert!(from_status("", &status).to_string().contains(named), "{status}");
    }
}

#[test]
fn lists_that_are_missing_damaged_or_out_of_place_are_refused() {
    let bags = Bags {
        indices: PLACES,
        offsets: Some(OFFSETS),
        per_sample_weights: Some(WEIGHTS),
        divisors: Some(DIVISORS),
    };
    let part = part_of(Samples::of_bags(&bags).unwrap(), &ids(3));
    let whole = sent(bag_words(&bags));
    let mut damaged = whole.clone();
    damaged[1].as_mut().unwrap().crc32c ^= 1;
    let mut elsewhere = whole.clone();
    elsewhere[0].as_mut().unwrap().part = 1;
    let longer: Vec<u32> = vec![0; 14];
    for (messages, code) in [
        (vec![], Code::DataLoss),
        (whole[..3].to_vec(), Code::DataLoss),
        (damaged, Code::DataLoss),
        (elsewhere, Code::InvalidArgument),
        (whole[1..].to_vec(), Code::InvalidArgument),
        (vec![whole[0].clone(), None], Code::InvalidArgument),
        (sent([&longer, &[], &[], &[]]), Code::InvalidArgument),
    ] {
        let status = receive(RequestKind::Lookup, &part, messages).unwrap_err();
        assert_eq!(status.code(), code, "{status}");
    }
    let rows = Part::new(6, RowFormat::f32(4), &ids(3));
    assert!(receive(RequestKind::Lookup, &rows, vec![None]).unwrap().is_none());
}

/// Arbitrary words must be either refused or summed without a panic.
#[test]
fn no_words_do_harm() {
    let (mut taken, ids) = (0, ids(3));
    for seed in 0..20_000u64 {
        let small = |of: u64| (hash_id(seed * 64 + of) >> 32) as u32 % 4;
        let head = Samples {
            samples: small(0) as usize,
            indices: small(1) as usize,
            per_sample_weights: small(2) % 2 == 0,
            factors: small(3) % 2 == 0,
            scale: f32::NAN,
        };
        let part = part_of(head, &ids);
        for kind in [RequestKind::Lookup, RequestKind::Push] {
            let words: Vec<u32> = (0..head.words(kind, 3) as u64)
                .map(|at| match small(at + 9) {
                    3 if seed % 3 == 0 => hash_id(seed + at) as u32,
                    word => (word + at as u32) % 4,
                })
                .collect();
            let Ok(Some(csr)) = receive(kind, &part, sent([&words, &[], &[], &[]])) else { continue };
            taken += 1;
            let mut out = [0.0; 3 * 4];
            let gradients = vec![1.0; head.samples * 4];
            match kind {
                RequestKind::Lookup => {
                    let (rows, bags) = (&[1.0; 3 * 4], csr.bags());
                    persia_kernels::pool(&Pool { rows, dim: 4, bags }, &mut out[..head.samples * 4]);
                    assert_eq!(pooled_chunks(0, part.format, rows, bags).count(), head.samples.min(1));
                }
                RequestKind::Push => {
                    let sum = csr.sum(&gradients, 4);
                    persia_kernels::segment_sum(&sum, 0, &mut out);
                    let of_ids = part.clone().with_samples(None);
                    assert_eq!(gradient_chunks(0, &of_ids, Gradients::Samples(sum)).count(), 1);
                }
            }
        }
    }
    assert!(taken > 100, "{taken} were taken");
}

#[test]
fn an_announcement_of_lists_allocates_little_before_they_arrive() {
    let head =
        Samples { samples: 1, indices: 1 << 27, per_sample_weights: false, factors: false, scale: 1.0 };
    let words = Collector::csr(&[part_of(head, &ids(3))], RequestKind::Lookup);
    assert!(!words.is_complete());
    assert!(words.finish().unwrap_err().to_string().contains("0 of 134217730 values"));
}
