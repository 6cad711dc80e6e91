//! Pooling and segment sum with per-sample weights.
//!
//! With weights of 1 they give the bits of the ones without. Weighted features are the exception, so that these loops
//! are plain: they add in memory where those without weights keep their sums in registers.

use crate::step::kernels::{Pool, SegmentSum};
pub(crate) use crate::step::simd::{pool_weighted, segment_sum_weighted};

#[inline(always)]
pub(crate) fn pool_weighted_body(input: &Pool<'_>, weights: &[f32], out: &mut [f32]) {
    let Pool { rows, dim, places, offsets, divisors } = *input;
    for (sample, out) in out.chunks_exact_mut(dim).enumerate() {
        let (start, end) = match offsets {
            None => (sample, sample + 1),
            Some(offsets) => (offsets[sample] as usize, offsets[sample + 1] as usize),
        };
        out.fill(0.0);
        for (place, weight) in places[start..end].iter().zip(&weights[start..end]) {
            add_scaled(&rows[*place as usize * dim..][..dim], *weight, out);
        }
        if let Some(divisors) = divisors {
            let divisor = divisors[sample];
            out.iter_mut().for_each(|value| *value /= divisor);
        }
    }
}

/// `weights` are in the order of the samples.
#[inline(always)]
pub(crate) fn segment_sum_weighted_body(input: &SegmentSum<'_>, weights: &[f32], out: &mut [f32]) {
    let SegmentSum { gradients, dim, starts, samples, factors, map } = *input;
    for (unique, bounds) in starts.windows(2).enumerate() {
        let (start, end) = (bounds[0] as usize, bounds[1] as usize);
        let row = map.map_or(unique, |map| map[unique] as usize);
        let out = &mut out[row * dim..][..dim];
        if map.is_none() {
            out.fill(0.0);
        }
        for (&sample, weight) in samples[start..end].iter().zip(&weights[start..end]) {
            let factor = factors.map_or(1.0, |factors| factors[sample as usize]);
            add_scaled(&gradients[sample as usize * dim..][..dim], factor * weight, out);
        }
    }
}

#[inline(always)]
fn add_scaled(row: &[f32], factor: f32, out: &mut [f32]) {
    for (value, out) in row.iter().zip(out) {
        *out += value * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::kernels;

    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        (0..count).map(|i| (persia_types::id::hash_id(i as u64 ^ seed) >> 40) as f32 / 1e6 - 8.0).collect()
    }

    #[test]
    fn weights_multiply_rows_and_gradients_on_every_path() {
        let places: Vec<u32> = vec![3, 0, 0, 2, 5, 5, 1, 4, 2];
        let offsets: Vec<u32> = vec![0, 2, 2, 7, 9];
        let (divisors, weights, map) = ([2.0, 1.0, 5.0, 3.0], numbers(9, 5), [4, 1, 3, 0]);
        for dim in [1, 3, 16, 19, 64, 131] {
            let rows = numbers(6 * dim, 1);
            let (offsets, divisors) = (Some(&offsets[..]), Some(&divisors[..]));
            let input = Pool { rows: &rows, dim, places: &places, offsets, divisors };
            let [mut wide, mut plain] = [(); 2].map(|()| vec![f32::NAN; 4 * dim]);
            pool_weighted(&input, &weights, &mut wide);
            pool_weighted_body(&input, &weights, &mut plain);
            assert_eq!(wide, plain);
            for (sample, bounds) in input.offsets.unwrap().windows(2).enumerate() {
                for column in 0..dim {
                    let mut sum = 0.0f32;
                    for occurrence in bounds[0] as usize..bounds[1] as usize {
                        sum += rows[places[occurrence] as usize * dim + column] * weights[occurrence];
                    }
                    assert_eq!(wide[sample * dim + column], sum / input.divisors.unwrap()[sample]);
                }
            }
            let factors = numbers(6, 2);
            for map in [None, Some(&map[..])] {
                let (starts, samples, factors) = (offsets.unwrap(), &places[..], Some(&factors[..]));
                let input = SegmentSum { gradients: &rows, dim, starts, samples, factors, map };
                let start = numbers(5 * dim, 3);
                let [mut wide, mut plain] = [(); 2].map(|()| start.clone());
                segment_sum_weighted(&input, &weights, &mut wide);
                segment_sum_weighted_body(&input, &weights, &mut plain);
                assert_eq!(wide, plain);
                for unique in 0..4 {
                    let target = map.map_or(unique, |map| map[unique] as usize);
                    for column in 0..dim {
                        let mut sum = if map.is_some() { start[target * dim + column] } else { 0.0 };
                        for occurrence in starts[unique] as usize..starts[unique + 1] as usize {
                            let sample = places[occurrence] as usize;
                            sum += rows[sample * dim + column]
                                * (factors.unwrap()[sample] * weights[occurrence]);
                        }
                        assert_eq!(wide[target * dim + column], sum);
                    }
                }
            }
        }
    }

    #[test]
    fn weights_of_one_change_no_bit() {
        let (dim, places, offsets, ones) = (19, [3, 0, 0, 2, 5, 5], [0, 2, 2, 6], [1.0; 6]);
        let (rows, divisors) = (numbers(6 * dim, 1), [3.0, 1.0, 7.0]);
        let [mut one, mut other] = [(); 2].map(|()| vec![0.0; 3 * dim]);
        let input =
            Pool { rows: &rows, dim, places: &places, offsets: Some(&offsets), divisors: Some(&divisors) };
        pool_weighted(&input, &ones, &mut one);
        kernels::pool(&input, &mut other);
        assert_eq!(one, other);
        let factors = numbers(6, 2);
        let (gradients, starts, samples, factors) =
            (&rows[..], &offsets[..], &places[..], Some(&factors[..]));
        let input = SegmentSum { gradients, dim, starts, samples, factors, map: None };
        segment_sum_weighted(&input, &ones, &mut one);
        kernels::segment_sum(&input, &mut other);
        assert_eq!(one, other);
    }
}
