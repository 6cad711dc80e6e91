//! Compares 16-bit floats with their definition in f64, and the instruction sets with each other.

use std::marker::PhantomData;

use super::*;
use crate::simd::{InstructionSet, Portable, SimdLoop};

struct Widen<'a, H>(&'a [u16; LANES], PhantomData<H>);

impl<H: Half> SimdLoop for Widen<'_, H> {
    type Output = [f32; LANES];
    #[inline(always)]
    fn run<L: Lanes>(self) -> [f32; LANES] {
        H::widen::<L>(self.0)
    }
}

struct Narrow<'a, H>(&'a [f32; LANES], PhantomData<H>);

impl<H: Half> SimdLoop for Narrow<'_, H> {
    type Output = [u16; LANES];
    #[inline(always)]
    fn run<L: Lanes>(self) -> [u16; LANES] {
        H::narrow::<L>(self.0)
    }
}

/// Narrow a number on every instruction set. All results must agree.
fn narrowed<H: Half>(number: f32) -> u16 {
    let bits: Vec<u16> = InstructionSet::supported()
        .into_iter()
        .map(|level| {
            let lanes = level.run(Narrow(&[number; LANES], PhantomData::<H>));
            assert!(lanes.iter().all(|lane| *lane == lanes[0]));
            lanes[0]
        })
        .collect();
    assert!(bits.iter().all(|other| *other == bits[0]), "{number:e}: {bits:x?}");
    bits[0]
}

/// The number that finite bits represent, by the definition of the format.
fn meaning(bits: u16, mantissa_bits: u32, bias: i32) -> f64 {
    let magnitude = u32::from(bits & 0x7FFF);
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    let size = if exponent == 0 {
        fraction * 2f64.powi(1 - bias)
    } else {
        (1.0 + fraction) * 2f64.powi(exponent as i32 - bias)
    };
    if bits & 0x8000 == 0 { size } else { -size }
}

/// Test every bit pattern. `largest` is the bit pattern of the largest finite number.
fn check_format<H: Half>(mantissa_bits: u32, bias: i32, largest: u16) {
    for bits in 0..=u16::MAX {
        let magnitude = bits & 0x7FFF;
        let number = wide::<H>(bits);
        for level in InstructionSet::supported() {
            let lanes = level.run(Widen(&[bits; LANES], PhantomData::<H>));
            assert!(lanes.iter().all(|lane| lane.to_bits() == number.to_bits()), "{bits:x} {level:?}");
        }
        match magnitude.cmp(&(largest + 1)) {
            std::cmp::Ordering::Less => assert_eq!(f64::from(number), meaning(bits, mantissa_bits, bias)),
            std::cmp::Ordering::Equal => assert!(number.is_infinite()),
            std::cmp::Ordering::Greater => assert!(number.is_nan()),
        }
        if magnitude > largest {
            continue;
        }
        // Each representable number stays the same. A number between two of them becomes the nearer one or, in
        // the middle, the even one.
        assert_eq!(narrowed::<H>(number), bits);
        if magnitude < largest {
            let middle = ((f64::from(number) + f64::from(wide::<H>(bits + 1))) / 2.0) as f32;
            assert_eq!(narrowed::<H>(middle), bits + (bits & 1), "{middle:e}");
            let (below, above) = (middle.abs().next_down(), middle.abs().next_up());
            assert_eq!(narrowed::<H>(below.copysign(number)), bits);
            assert_eq!(narrowed::<H>(above.copysign(number)), bits + 1);
        }
    }
    for beyond in [f32::INFINITY, f32::MAX] {
        assert_eq!((narrowed::<H>(beyond), narrowed::<H>(-beyond)), (largest, 0x8000 | largest));
        assert_eq!(H::round_stochastic(beyond, u32::MAX), largest);
        assert_eq!(H::round_stochastic(-beyond, 0), 0x8000 | largest);
    }
    for nan in [0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF, 0x7FA5_5A5A] {
        let (nearest, drawn) =
            (narrowed::<H>(f32::from_bits(nan)), H::round_stochastic(f32::from_bits(nan), 7));
        assert!(wide::<H>(nearest).is_nan() && wide::<H>(drawn).is_nan(), "{nan:x}");
    }
}

fn wide<H: Half>(bits: u16) -> f32 {
    H::widen::<Portable>(&[bits; LANES])[0]
}

#[test]
fn every_f16_has_its_value_and_every_f32_rounds_to_the_nearest() {
    check_format::<F16>(10, 15, 0x7BFF);
}

#[test]
fn every_bf16_has_its_value_and_every_f32_rounds_to_the_nearest() {
    check_format::<Bf16>(7, 127, 0x7F7F);
}

#[test]
fn all_levels_agree_on_any_bits() {
    let mut bits = 1u32;
    for _ in 0..300_000 {
        bits = bits.wrapping_mul(0x915F_77F5).wrapping_add(12_345);
        narrowed::<F16>(f32::from_bits(bits ^ bits >> 15));
        narrowed::<Bf16>(f32::from_bits(bits ^ bits >> 15));
    }
}

/// Check that the mean of the results over evenly spaced draws is `number`, up to the resolution of the draws.
fn check_expectation<H: Half>(number: f32) {
    const DRAWS: u32 = 1 << 16;
    let exact = |bits| f64::from(wide::<H>(bits));
    let mean = (0..DRAWS).map(|draw| exact(H::round_stochastic(number, draw << 16 | 0x8000))).sum::<f64>()
        / f64::from(DRAWS);
    let nearest = H::narrow::<Portable>(&[number; LANES])[0];
    let distance = (exact(nearest) - f64::from(number)).abs().max(exact(1));
    // The result may be inexact only in the bits below the 16 that this test draws.
    let error = (mean - f64::from(number)).abs();
    assert!(error <= 2.0 * distance / f64::from(DRAWS), "{number:e}: {mean:e}");
}

#[test]
fn stochastic_rounding_has_the_number_as_its_expectation() {
    for number in [1.0, -1.0, 1.0001, 3.1459, -0.02, 6.2e-5, 1e-3, 65_500.0, 2047.3] {
        check_expectation::<F16>(number);
        check_expectation::<Bf16>(number);
    }
    // Subnormal numbers of f16, and numbers below the smallest one, which only some draws round up.
    for number in [6e-5, -3.3e-5, 1e-6, 6e-8, -2e-8, 1e-9] {
        check_expectation::<F16>(number);
    }
    assert_eq!(F16::round_stochastic(1e-10, u32::MAX), 0);
    assert_eq!(F16::round_stochastic(-0.0, u32::MAX), 0x8000);
    // An exactly representable number does not change with any draw.
    for bits in [0u16, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF] {
        for draw in [0, 1, u32::MAX] {
            assert_eq!(F16::round_stochastic(wide::<F16>(bits), draw), bits);
        }
    }
}

#[test]
fn rows_of_any_length_are_converted_element_by_element() {
    for len in 0..70 {
        let numbers: Vec<f32> = (0..len).map(|i| (i as f32 - 30.0) * 0.37).collect();
        let (mut halves, mut drawn, mut wide) = (vec![0; len], vec![0; len], vec![0.0; len]);
        narrow::<Portable, F16>(&numbers, &mut halves);
        widen::<Portable, F16>(&halves, &mut wide);
        round_stochastic::<F16>(&numbers, &mut drawn, |i| i.wrapping_mul(0x9E37_79B9));
        for i in 0..len {
            assert_eq!(halves[i], f32_to_f16(numbers[i]));
            assert_eq!(wide[i], f16_to_f32(halves[i]));
            assert_eq!(drawn[i], F16::round_stochastic(numbers[i], (i as u32).wrapping_mul(0x9E37_79B9)));
        }
    }
}
