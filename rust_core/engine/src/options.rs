//! The options of an engine and of a push.

use persia_types::limits::MAX_STALENESS;

use crate::error::Error;

/// The options of an engine. [`Engine::new`](crate::Engine::new) checks every field that has a range.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// The job's name, which is part of every token.
    pub job: String,
    /// The run's generation, which is part of every token.
    pub generation: u64,
    /// The rank of this process, below `world_size`.
    pub rank: u32,
    /// The number of ranks of the run.
    pub world_size: u32,
    /// The staleness K, from 1 to 64: when a training look-up is served, at most K - 1 of this rank's pushes are
    /// unacknowledged. If `reproducible` is set, 1 is used instead.
    pub staleness: usize,
    /// Whether a batch is looked up only when it is requested and all earlier pushes are acknowledged.
    pub reproducible: bool,
    /// The number of batches that wait for their look-up before `feed` waits, at least 1.
    pub forward_buffer: usize,
    /// The first step, at least 1. A resumed run starts after the step of its checkpoint.
    pub first_seq: u64,
    /// The factor of every summed gradient: 1 / world size for a mean over ranks, 1 for a sum.
    pub gradient_scale: f32,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            job: "persia".into(),
            generation: 1,
            rank: 0,
            world_size: 1,
            staleness: 8,
            reproducible: false,
            forward_buffer: 10,
            first_seq: 1,
            gradient_scale: 1.0,
        }
    }
}

impl EngineOptions {
    /// Whether, at every step, ranks look up and push in ascending order.
    pub fn takes_turns(&self) -> bool {
        self.reproducible && self.world_size > 1
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let bad = |option, what: String| Err(Error::BadOption { option, what });
        if !(1..=MAX_STALENESS).contains(&self.staleness) {
            return bad("staleness", format!("is {}; it must be from 1 to {MAX_STALENESS}", self.staleness));
        }
        if self.rank >= self.world_size {
            let what = format!("is {}; it must be below the world size, {}", self.rank, self.world_size);
            return bad("rank", what);
        }
        if self.forward_buffer == 0 {
            return bad("forward_buffer", "is 0; it must be at least 1".into());
        }
        if self.first_seq == 0 {
            return bad("first_seq", "is 0; it must be at least 1".into());
        }
        if !(self.gradient_scale.is_finite() && self.gradient_scale > 0.0) {
            let what = format!("is {}; it must be a finite number above 0", self.gradient_scale);
            return bad("gradient_scale", what);
        }
        Ok(())
    }
}

/// The factors of a push.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PushOptions {
    /// The factor of the optimizer's learning rate; finite and at least 0.
    pub lr_factor: f32,
    /// The factor of every gradient, for example 1 / loss scale; finite and above 0.
    pub scale: f32,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self { lr_factor: 1.0, scale: 1.0 }
    }
}

impl PushOptions {
    pub(crate) fn check(self) -> Result<(), Error> {
        if !(self.lr_factor.is_finite() && self.lr_factor >= 0.0) {
            let what = format!("is {}; it must be a finite number of at least 0", self.lr_factor);
            return Err(Error::BadOption { option: "lr_factor", what });
        }
        if !(self.scale.is_finite() && self.scale > 0.0) {
            let what = format!("is {}; it must be a finite number above 0", self.scale);
            return Err(Error::BadOption { option: "scale", what });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_named() {
        let cases = [
            ("staleness", EngineOptions { staleness: 0, ..Default::default() }),
            ("staleness", EngineOptions { staleness: 65, ..Default::default() }),
            ("rank", EngineOptions { rank: 2, world_size: 2, ..Default::default() }),
            ("forward_buffer", EngineOptions { forward_buffer: 0, ..Default::default() }),
            ("first_seq", EngineOptions { first_seq: 0, ..Default::default() }),
            ("gradient_scale", EngineOptions { gradient_scale: f32::NAN, ..Default::default() }),
        ];
        for (name, options) in cases {
            let error = options.check().unwrap_err();
            assert!(matches!(error, Error::BadOption { option, .. } if option == name), "{error}");
        }
        EngineOptions::default().check().unwrap();
    }
}
