//! Sends ids, rows, gradients and lists of samples as chunks. Each chunk is created when it is requested.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use persia_kernels::{Bags, Gradients, Pool, SegmentSum};
use persia_types::Dtype;
use persia_types::id::Id;

use super::chunk::{Width, new_chunk};
use super::floats::RowFormat;
use super::parts::Part;
use crate::proto::Chunk;

/// The chunks with the `ids` of part number `part`.
pub fn id_chunks(part: u32, ids: &[Id]) -> impl Iterator<Item = Chunk> + '_ {
    Width::ID.ranges(ids.len()).map(move |range| {
        new_chunk(part, range.start, Bytes::copy_from_slice(bytemuck::cast_slice(&ids[range])))
    })
}

/// The chunks with the gradients of part number `index`: sums for ids, or gradients of samples. Their lengths
/// have been checked. 16-bit gradients of samples are scaled before they are sent, so that they have the range of
/// the sums.
pub fn gradient_chunks<'a>(
    index: u32,
    part: &'a Part,
    gradients: Gradients<'a>,
) -> impl Iterator<Item = Chunk> + 'a {
    let format = part.format;
    format.width().ranges(part.vectors()).map(move |range| {
        let data = match (&gradients, part.samples) {
            (Gradients::Samples(sum), Some(_)) => sample_gradients(format, range.clone(), sum),
            _ => match gradients.rows(range.clone(), format.dim) {
                Cow::Borrowed(rows) => format.encode_copy(rows),
                Cow::Owned(rows) => format.encode(rows),
            },
        };
        new_chunk(index, range.start, data)
    })
}

fn sample_gradients(format: RowFormat, samples: Range<usize>, sum: &SegmentSum<'_>) -> Bytes {
    let rows = &sum.gradients[samples.start * sum.dim..samples.end * sum.dim];
    if format.dtype == Dtype::F32 {
        return format.encode_copy(rows);
    }
    let mut scaled = rows.to_vec();
    persia_kernels::scale(&mut scaled, sum.scale);
    format.encode(scaled)
}

/// The chunks with the pooled samples of part number `index`. `bags` have been checked.
pub fn pooled_chunks<'a>(
    index: u32,
    format: RowFormat,
    rows: &'a [f32],
    bags: Bags<'a>,
) -> impl Iterator<Item = Chunk> + 'a {
    format.width().ranges(bags.samples()).map(move |range| {
        let (first, mut pooled) = (range.start, vec![0.0; range.len() * format.dim]);
        persia_kernels::pool(&Pool { rows, dim: format.dim, bags: bags.of(range) }, &mut pooled);
        new_chunk(index, first, format.encode(pooled))
    })
}

/// The chunks with the lists of words of part number `part`, one after another.
pub fn word_chunks(part: u32, lists: [&[u32]; 4]) -> impl Iterator<Item = Chunk> + '_ {
    let mut next = 0;
    lists.into_iter().flat_map(move |words| {
        let first = next;
        next += words.len();
        Width::WORD.ranges(words.len()).map(move |range| {
            let data = Bytes::copy_from_slice(bytemuck::cast_slice(&words[range.clone()]));
            new_chunk(part, first + range.start, data)
        })
    })
}

/// The chunks with the rows of part number `part`, which have the shape `[n, dim]`. Rows that are sent as f32
/// are not copied.
pub fn row_chunks(part: u32, format: RowFormat, rows: Vec<f32>) -> impl Iterator<Item = Chunk> + Send {
    let (width, dim) = (format.width(), format.dim);
    let items = rows.len().checked_div(dim).unwrap_or(0);
    let (floats, bytes) =
        if format.dtype == Dtype::F32 { (Vec::new(), Some(format.encode(rows))) } else { (rows, None) };
    width.ranges(items).map(move |range| {
        let data = match &bytes {
            Some(bytes) => bytes.slice(range.start * width.0..range.end * width.0),
            None => format.encode_copy(&floats[range.start * dim..range.end * dim]),
        };
        new_chunk(part, range.start, data)
    })
}
