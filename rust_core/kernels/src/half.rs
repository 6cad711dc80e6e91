//! 16-bit floats, for weights that are not stored as f32.
//!
//! Widening is exact. Narrowing rounds to nearest, ties to even, or stochastically, that is, up or down with
//! the probability that makes the expected value exact. There are two exceptions. A magnitude beyond the
//! largest finite number, including infinity, becomes that number. Stochastic rounding to binary16 makes a
//! magnitude below 2⁻³² zero. A NaN stays NaN. The results are bit-identical for all instruction sets.

use ::half::f16;

use crate::simd::{LANES, Lanes};

/// A 16-bit floating-point format.
pub trait Half {
    /// The largest finite number of the format.
    const LARGEST: f32;
    /// Convert 16-bit numbers to f32.
    fn widen<L: Lanes>(from: &[u16; LANES]) -> [f32; LANES];
    /// Convert each f32 to the nearest 16-bit number, ties to even.
    fn narrow<L: Lanes>(from: &[f32; LANES]) -> [u16; LANES];
    /// Convert an f32 to one of the two neighboring 16-bit numbers. The top bits of `draw` are added to the
    /// discarded bits, and a carry rounds up. Over all draws, the probability of rounding up is therefore the
    /// discarded fraction.
    fn round_stochastic(from: f32, draw: u32) -> u16;
}

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;

/// IEEE 754 binary16.
pub struct F16;

/// The bits of 65504, the largest finite number, as an f32.
const F16_MAX: u32 = 0x477F_E000;
/// The bits of 2⁻¹⁴, the smallest normal number, as an f32.
const F16_NORMAL: u32 = 0x3880_0000;
/// The difference between the mantissa bits of an f32 and of an f16.
const F16_CUT: u32 = 13;
/// The difference between the exponent biases, as bits of an f32.
const F16_REBIAS: u32 = (127 - 15) << 23;

impl Half for F16 {
    const LARGEST: f32 = f32::from_bits(F16_MAX);

    #[inline(always)]
    fn widen<L: Lanes>(from: &[u16; LANES]) -> [f32; LANES] {
        L::widen_f16(from)
    }

    #[inline(always)]
    fn narrow<L: Lanes>(from: &[f32; LANES]) -> [u16; LANES] {
        L::narrow_f16(from)
    }

    #[inline(always)]
    fn round_stochastic(from: f32, draw: u32) -> u16 {
        let (sign, magnitude) = split(from);
        if magnitude > INFINITY {
            return sign | f16_nan(magnitude);
        }
        let magnitude = magnitude.min(F16_MAX);
        let normal = (magnitude.wrapping_sub(F16_REBIAS).wrapping_add(draw >> (32 - F16_CUT))) >> F16_CUT;
        // Subnormal numbers are 2⁻²⁴ apart, so the smaller the number, the more bits are discarded. A number
        // below 2⁻³² becomes 0, whatever the draw.
        let cut = (126 - (magnitude >> 23).min(112)).min(31);
        let mantissa = (magnitude & 0x007F_FFFF) | 0x0080_0000;
        let tiny = (mantissa + (draw >> (32 - cut))) >> cut;
        let tiny = if magnitude >> 23 < 95 { 0 } else { tiny };
        sign | (if magnitude >= F16_NORMAL { normal } else { tiny }) as u16
    }
}

/// Narrow a NaN. Like the processor's instruction, this makes the NaN quiet and keeps the upper bits of its
/// payload.
fn f16_nan(magnitude: u32) -> u16 {
    0x7E00 | (magnitude >> F16_CUT & 0x3FF) as u16
}

/// Like [`Lanes::widen_f16`] for one number, without the processor's instruction.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32_const()
}

/// Like [`Lanes::narrow_f16`] for one number, without the processor's instruction.
#[inline(always)]
pub fn f32_to_f16(number: f32) -> u16 {
    let (largest, smallest) = (f16::MAX.to_f32_const(), f16::MIN.to_f32_const());
    // A NaN is neither above nor below any number, so it is not changed.
    let number = if number > largest { largest } else { number };
    f16::from_f32_const(if number < smallest { smallest } else { number }).to_bits()
}

/// The upper half of a binary32.
pub struct Bf16;

/// The bits of the largest finite number, as an f32.
const BF16_MAX: u32 = 0x7F7F_0000;

impl Half for Bf16 {
    const LARGEST: f32 = f32::from_bits(BF16_MAX);

    #[inline(always)]
    fn widen<L: Lanes>(from: &[u16; LANES]) -> [f32; LANES] {
        from.map(|half| f32::from_bits(u32::from(half) << 16))
    }

    #[inline(always)]
    fn narrow<L: Lanes>(from: &[f32; LANES]) -> [u16; LANES] {
        from.map(|number| {
            let (sign, magnitude) = split(number);
            let rounded = (magnitude.min(BF16_MAX) + 0x7FFF + (magnitude >> 16 & 1)) >> 16;
            sign | if magnitude > INFINITY { bf16_nan(magnitude) } else { rounded as u16 }
        })
    }

    #[inline(always)]
    fn round_stochastic(from: f32, draw: u32) -> u16 {
        let (sign, magnitude) = split(from);
        let rounded = (magnitude.min(BF16_MAX) + (draw >> 16)) >> 16;
        sign | if magnitude > INFINITY { bf16_nan(magnitude) } else { rounded as u16 }
    }
}

fn bf16_nan(magnitude: u32) -> u16 {
    (magnitude >> 16) as u16 | 0x40
}

/// Split a number into its sign, at the position that it has in a 16-bit float, and its other bits.
#[inline(always)]
fn split(number: f32) -> (u16, u32) {
    let bits = number.to_bits();
    (((bits & SIGN) >> 16) as u16, bits & !SIGN)
}

/// Widen a row. Both slices must have the same length.
#[inline(always)]
pub fn widen<L: Lanes, H: Half>(from: &[u16], to: &mut [f32]) {
    let at = widen_blocks::<L, H, LANES>(from, to, 0);
    let at = widen_blocks::<L, H, 8>(from, to, at);
    let at = widen_blocks::<L, H, 4>(from, to, at);
    widen_blocks::<L, H, 1>(from, to, at);
}

/// Widen whole blocks, starting at element `at`. Returns the end of the last block. Copies have a constant width, so
/// that they are single moves. (A closure would be compiled without the instruction set, and would call a function
/// where one instruction suffices.)
#[inline(always)]
fn widen_blocks<L: Lanes, H: Half, const WIDTH: usize>(from: &[u16], to: &mut [f32], mut at: usize) -> usize {
    while at + WIDTH <= to.len() {
        let mut block = [0; LANES];
        block[..WIDTH].copy_from_slice(&from[at..at + WIDTH]);
        to[at..at + WIDTH].copy_from_slice(&H::widen::<L>(&block)[..WIDTH]);
        at += WIDTH;
    }
    at
}

/// Narrow a row by rounding to nearest. Both slices must have the same length.
#[inline(always)]
pub fn narrow<L: Lanes, H: Half>(from: &[f32], to: &mut [u16]) {
    let at = narrow_blocks::<L, H, LANES>(from, to, 0);
    let at = narrow_blocks::<L, H, 8>(from, to, at);
    let at = narrow_blocks::<L, H, 4>(from, to, at);
    narrow_blocks::<L, H, 1>(from, to, at);
}

/// Narrow whole blocks, as [`widen_blocks`] does.
#[inline(always)]
fn narrow_blocks<L: Lanes, H: Half, const WIDTH: usize>(
    from: &[f32],
    to: &mut [u16],
    mut at: usize,
) -> usize {
    while at + WIDTH <= from.len() {
        let mut block = [0.0; LANES];
        block[..WIDTH].copy_from_slice(&from[at..at + WIDTH]);
        to[at..at + WIDTH].copy_from_slice(&H::narrow::<L>(&block)[..WIDTH]);
        at += WIDTH;
    }
    at
}

/// Round a row stochastically. `draw(i)` is the draw for element `i`. Both slices must have the same length.
#[inline(always)]
pub fn round_stochastic<H: Half>(from: &[f32], to: &mut [u16], draw: impl Fn(u32) -> u32) {
    for (i, (from, to)) in from.iter().zip(to).enumerate() {
        *to = H::round_stochastic(*from, draw(i as u32));
    }
}

#[cfg(test)]
#[path = "half_tests.rs"]
mod tests;
