//! Compares pooling and sums of gradients with plain loops.

use persia_kernels::{Bags, Csr, Pool, SegmentSum, pool, segment_sum, segment_sum_onto};

fn numbers(count: usize, seed: u64) -> Vec<f32> {
    (0..count)
        .map(|i| ((i as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f32 / 1e6 - 8.0)
        .collect()
}

#[test]
fn every_dimension_gives_the_bits_of_plain_loops() {
    let indices: Vec<u32> = vec![3, 0, 0, 2, 5, 5, 1, 4, 2];
    let offsets: Vec<u32> = vec![0, 2, 2, 7, 9];
    let divisors = [2.0, 1.0, 5.0, 3.0];
    for dim in (1..=40).chain([63, 64, 65, 127, 128, 129, 200, 256, 300]) {
        let rows = numbers(6 * dim, 1);
        let mut out = vec![f32::NAN; 4 * dim];
        let bags = Bags {
            indices: &indices,
            offsets: Some(&offsets),
            per_sample_weights: None,
            divisors: Some(&divisors),
        };
        pool(&Pool { rows: &rows, dim, bags }, &mut out);
        for sample in 0..4 {
            for column in 0..dim {
                let mut sum = 0.0f32;
                for index in &indices[offsets[sample] as usize..offsets[sample + 1] as usize] {
                    sum += rows[*index as usize * dim + column];
                }
                assert_eq!(out[sample * dim + column], sum / divisors[sample]);
            }
        }
        let mut single = vec![f32::NAN; indices.len() * dim];
        let bags = Bags { offsets: None, divisors: None, ..bags };
        pool(&Pool { rows: &rows, dim, bags }, &mut single);
        for (index, row) in indices.iter().zip(single.chunks(dim)) {
            assert_eq!(row, &rows[*index as usize * dim..][..dim]);
        }

        let factors = numbers(6, 2);
        let map = [4, 1, 3, 0];
        for (factors, map) in [(None, None), (Some(&factors[..]), None), (Some(&factors[..]), Some(&map[..]))]
        {
            let start = numbers(5 * dim, 3);
            let mut out = start.clone();
            let (gradients, samples) = (&rows, &indices);
            let csr = Csr { offsets: &offsets, indices: samples };
            let scale = if map.is_some() { 1.0 } else { 0.7 };
            let input = SegmentSum { gradients, dim, csr, factors, per_sample_weights: None, scale };
            match map {
                None => segment_sum(&input, 0, &mut out[..4 * dim]),
                Some(map) => segment_sum_onto(&input, map, &mut out),
            }
            for unique in 0..4 {
                let target = map.map_or(unique, |map| map[unique] as usize);
                for column in 0..dim {
                    let mut sum = if map.is_some() { start[target * dim + column] } else { 0.0 };
                    for sample in &samples[offsets[unique] as usize..offsets[unique + 1] as usize] {
                        let factor = factors.map_or(1.0, |factors| factors[*sample as usize]);
                        sum += gradients[*sample as usize * dim + column] * factor;
                    }
                    assert_eq!(out[target * dim + column], sum * scale);
                }
            }
        }
    }
}
