use bytes::Bytes;
use persia_kernels::Gradients;
use persia_types::TablesError;
use persia_types::id::ShardedIds;
use persia_types::limits::MAX_CHUNK_BYTES;
use tonic::Status;

use crate::chunk::{CHUNK_BYTES, ChunkError};
use crate::collect::Collector;
use crate::floats::RowFormat;
use crate::parts::Part;
use crate::proto::Chunk;
use crate::scatter::Scatter;
use crate::send::{gradient_chunks, id_chunks, row_chunks};

fn sharded(count: u64) -> ShardedIds {
    ShardedIds::group(&(0..count).map(|id| id * 3 + 1).collect::<Vec<_>>()).unwrap()
}

fn part(dim: usize, ids: u64) -> Part {
    Part::new(0, RowFormat::f32(dim), &sharded(ids))
}

#[test]
fn ids_and_gradients_round_trip() {
    let ids = sharded(50_000);
    let gradients: Vec<f32> = (0..50_000 * 19).map(|value| value as f32).collect();
    let parts = [part(4, 0), Part::new(1, RowFormat::f32(19), &ids)];
    let mut collect = Collector::ids(&parts);
    assert!(id_chunks(1, ids.ids()).count() > 1);
    for chunk in id_chunks(1, ids.ids()) {
        // The data starts at an odd address, as a chunk inside a message may.
        let shifted = [&[0u8][..], &chunk.data].concat();
        collect.take(&Chunk { data: Bytes::from(shifted).slice(1..), ..chunk }).unwrap();
    }
    assert_eq!(collect.finish().unwrap(), [vec![], ids.ids().to_vec()]);

    for chunks in [
        gradient_chunks(1, &parts[1], Gradients::Rows(&gradients)).collect::<Vec<_>>(),
        row_chunks(1, RowFormat::f32(19), gradients.clone()).collect(),
    ] {
        assert!(
            chunks.iter().all(|chunk| chunk.data.len() <= CHUNK_BYTES && chunk.data.len() % (19 * 4) == 0)
        );
        let mut collect = Collector::gradients(&parts);
        chunks.iter().for_each(|chunk| collect.take(chunk).unwrap());
        assert_eq!(collect.finish().unwrap(), [vec![], gradients.clone()]);
    }
}

#[test]
fn rows_are_written_to_their_place_in_any_order() {
    let rows: Vec<f32> = (0..20_000 * 7).map(|value| value as f32).collect();
    let parts = [part(7, 20_000)];
    let mut chunks: Vec<Chunk> = row_chunks(0, RowFormat::f32(7), rows.clone()).collect();
    chunks.reverse();
    chunks.swap(0, 2);
    let mut buffer = vec![f32::NAN; rows.len()];
    let mut buffers = [&mut buffer[..]];
    let mut scatter = Scatter::new(&parts, &[None; 1], &mut buffers).unwrap();
    chunks.iter().for_each(|chunk| scatter.take(chunk).unwrap());
    scatter.finish().unwrap();
    assert_eq!(buffer, rows);
}

#[test]
fn every_flipped_bit_is_found() {
    let ids = sharded(20);
    let good = id_chunks(0, ids.ids()).next().unwrap();
    for bit in 0..good.data.len() * 8 {
        let mut data = good.data.to_vec();
        data[bit / 8] ^= 1 << (bit % 8);
        let bad = Chunk { data: data.into(), ..good.clone() };
        let error = Collector::ids(&[part(1, 20)]).take(&bad).unwrap_err();
        assert!(matches!(error, ChunkError::Damaged { .. }), "bit {bit}: {error}");
        assert_eq!(Status::from(error).code(), tonic::Code::DataLoss);
    }
}

#[test]
fn what_was_not_announced_is_refused() {
    let ids = sharded(100);
    let good: Vec<Chunk> = id_chunks(0, ids.ids()).collect();
    let refused = |parts: &[Part], chunk: Chunk| Collector::ids(parts).take(&chunk).unwrap_err();
    let whole = [part(1, 100)];
    let summed =
        |data: &'static [u8]| Chunk { crc32c: crc32c::crc32c(data), data: data.into(), ..good[0].clone() };
    let bad = [
        Chunk { part: 1, ..good[0].clone() },
        Chunk { first: 1, ..good[0].clone() },
        Chunk { first: u64::MAX, ..good[0].clone() },
        summed(&[]),
        summed(&[1; 7]),
        summed(&[1; MAX_CHUNK_BYTES + 8]),
    ];
    for chunk in bad {
        let error = refused(&whole, chunk);
        assert!(matches!(error, ChunkError::Malformed(TablesError::BadShape { .. })), "{error}");
    }
    let error = refused(&[part(1, 99)], good[0].clone());
    assert!(error.to_string().contains("99 were announced"), "{error}");
    let mut collect = Collector::ids(&[part(1, 101)]);
    collect.take(&good[0]).unwrap();
    assert!(matches!(collect.finish().unwrap_err(), ChunkError::CutShort { .. }));
}

#[test]
fn a_duplicate_or_missing_row_is_refused() {
    let rows = [1.0; 10 * 3];
    let parts = [part(3, 10)];
    let mut buffer = [0.0; 30];
    let piece = |range: std::ops::Range<usize>| {
        let chunk =
            row_chunks(0, RowFormat::f32(3), rows[range.start * 3..range.end * 3].to_vec()).next().unwrap();
        Chunk { first: range.start as u64, ..chunk }
    };
    for (first, again) in [(0..4, 0..4), (0..4, 3..5), (4..6, 0..5), (4..6, 5..6), (4..6, 0..10)] {
        let mut buffers = [&mut buffer[..]];
        let mut scatter = Scatter::new(&parts, &[None; 1], &mut buffers).unwrap();
        scatter.take(&piece(first)).unwrap();
        assert!(scatter.take(&piece(again)).unwrap_err().to_string().contains("arrived before"));
    }
    let mut buffers = [&mut buffer[..]];
    let mut scatter = Scatter::new(&parts, &[None; 1], &mut buffers).unwrap();
    for range in [6..8, 0..2, 3..6, 8..10] {
        scatter.take(&piece(range)).unwrap();
    }
    let error = scatter.finish().unwrap_err();
    assert!(error.to_string().contains("9 of 10 rows"), "{error}");
}

#[test]
fn buffers_of_another_size_are_refused() {
    let parts = [part(3, 10)];
    assert!(Scatter::new(&parts, &[None; 1], &mut []).is_err());
    assert!(Scatter::new(&parts, &[None; 1], &mut [&mut [0.0; 29]]).is_err());
}
