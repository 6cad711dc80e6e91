//! Look-ups and pushes as a rank sends them.

use persia_kernels::{Bags, Csr, Gradients, SegmentSum};
use persia_types::{Dtype, JobId, Mode, ShardedIds, Token};
use persia_wire::floats::RowFormat;
use persia_wire::parts::Part;
use persia_wire::proto::{self, lookup_request, push_request};
use persia_wire::samples::Samples;
use persia_wire::send::{gradient_chunks, id_chunks, word_chunks};
use prost::Message;

use super::PUSH;

/// Inputs that the target accepts.
pub fn seeds() -> Vec<Vec<u8>> {
    let ids = ShardedIds::group(&[1, 2, 3, 900, u64::MAX]).expect("some ids");
    let half = RowFormat { dim: 3, dtype: Dtype::F16 };
    let brain = RowFormat { dim: 1, dtype: Dtype::Bf16 };
    let formats = [vec![RowFormat::f32(2)], vec![half, brain], vec![]];
    let rows = formats.iter().flat_map(|formats| {
        let parts: Vec<Part> =
            (0..).zip(formats).map(|(table, format)| Part::new(table, *format, &ids)).collect();
        [lookup_of(&parts, &ids, None, 2), push_of(&parts, &ids, None, 4)]
    });
    // There are two samples: one with all ids, and one without ids.
    let (places, ones) = ([0, 1, 2, 3, 4], [1.0; 5]);
    let bags = Bags {
        indices: &places,
        offsets: Some(&[0, 5, 5]),
        per_sample_weights: Some(&ones),
        divisors: Some(&[2.0, 1.0]),
    };
    let csr = Csr { offsets: &[0, 1, 2, 3, 4, 5], indices: &[0, 1, 0, 1, 0] };
    let gradients = [0.5; 4];
    let sum = SegmentSum {
        gradients: &gradients,
        dim: 2,
        csr,
        factors: None,
        per_sample_weights: Some(&ones),
        scale: 0.5,
    };
    let part = Part::new(0, RowFormat::f32(2), &ids);
    let pooled = [
        lookup_of(&[part.clone().with_samples(Samples::of_bags(&bags))], &ids, Some(bags), 2),
        push_of(&[part.with_samples(Some(Samples::of_sum(&sum)))], &ids, Some(sum), 4),
    ];
    rows.chain(pooled).collect()
}

fn token() -> Option<proto::Token> {
    Some(Token { job: JobId::from_name("job"), generation: 1, rank: 0, seq: 1 }.into())
}

fn bits(floats: Option<&[f32]>) -> Vec<u32> {
    floats.unwrap_or_default().iter().map(|float| float.to_bits()).collect()
}

fn input<M: Message>(how: u8, messages: &[M]) -> Vec<u8> {
    let of_messages = messages.iter().flat_map(Message::encode_length_delimited_to_vec);
    [how].into_iter().chain(of_messages).collect()
}

fn lookup_of(parts: &[Part], ids: &ShardedIds, bags: Option<Bags<'_>>, how: u8) -> Vec<u8> {
    use lookup_request::Part as Message;
    let mode = proto::Mode::from(Mode::Train).into();
    let sent = parts.iter().map(Part::to_proto).collect();
    let mut all = vec![Message::Head(proto::LookupHead { token: token(), step: 1, mode, parts: sent })];
    if let Some(bags) = bags {
        let (weights, divisors) = (bits(bags.per_sample_weights), bits(bags.divisors));
        let lists = [bags.indices, bags.offsets.unwrap_or_default(), &weights, &divisors];
        all.extend(word_chunks(0, lists).map(Message::Csr));
    }
    all.extend((0..parts.len()).flat_map(|at| id_chunks(at as u32, ids.ids())).map(Message::Ids));
    let all: Vec<_> = all.into_iter().map(|part| proto::LookupRequest { part: Some(part) }).collect();
    input(how, &all)
}

fn push_of(parts: &[Part], ids: &ShardedIds, sum: Option<SegmentSum<'_>>, how: u8) -> Vec<u8> {
    use push_request::Part as Message;
    let sent = parts.iter().map(Part::to_proto).collect();
    let head = proto::PushHead { token: token(), step: 1, lr_factor: 1.0, parts: sent, only: vec![] };
    let mut all = vec![Message::Head(head)];
    if let Some(sum) = &sum {
        let (weights, factors) = (bits(sum.per_sample_weights), bits(sum.factors));
        all.extend(word_chunks(0, [sum.csr.indices, sum.csr.offsets, &weights, &factors]).map(Message::Csr));
    }
    for (at, part) in parts.iter().enumerate() {
        let rows = vec![0.25; part.vectors() * part.format.dim];
        all.extend(id_chunks(at as u32, ids.ids()).map(Message::Ids));
        let gradients = sum.map_or(Gradients::Rows(&rows), Gradients::Samples);
        all.extend(gradient_chunks(at as u32, part, gradients).map(Message::Gradients));
    }
    let all: Vec<_> = all.into_iter().map(|part| proto::PushRequest { part: Some(part) }).collect();
    input(how | PUSH, &all)
}
