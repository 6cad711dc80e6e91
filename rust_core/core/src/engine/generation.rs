//! The current generation of an engine, and the transition to a new one.

use persia_engine::{Engine as RankEngine, EngineOptions};
use persia_types::tables::Run;
use persia_types::{JobId, TablesError, Token};
use pyo3::prelude::*;

use super::Engine;
use crate::errors;

/// A generation and its engine.
pub(super) struct Current {
    pub(super) generation: u64,
    /// The run; None if another process began the generation.
    pub(super) run: Option<Run>,
    pub(super) engine: RankEngine,
}

impl Engine {
    /// Return the run, and the step of the last batch that was taken. Raises an error if there is no run.
    pub(crate) fn running(&self, py: Python<'_>) -> PyResult<(Run, u64)> {
        let current = self.current.lock();
        let current = current.as_ref().ok_or_else(|| not_begun(py))?;
        let run = current.run.clone().ok_or_else(|| {
            let text = format!(
                "cannot save, load or continue generation {} in this process: rank 0 of the training began it; do so \
                 on rank 0",
                current.generation
            );
            errors::raise(py, "UsageError", text)
        })?;
        Ok((run, current.engine.step()))
    }

    /// The token of a step of this rank.
    pub(crate) fn token(&self, step: u64) -> Token {
        let job = JobId::from_name(&self.job);
        Token { job, generation: self.generation(), rank: self.rank, seq: step }
    }

    /// Wait for pushes in flight. Raises an error within a training loop, because the caller is about to change the
    /// generation or all rows.
    pub(crate) fn settle(&self, py: Python<'_>) -> PyResult<()> {
        if self.iterating() {
            let text = "a data loader is being iterated for training: leave its loop first";
            return Err(errors::raise(py, "UsageError", text));
        }
        let begun = self.current.lock().is_some();
        if begun { self.drain(py) } else { Ok(()) }
    }

    pub(super) fn rank_engine(&self, py: Python<'_>) -> PyResult<RankEngine> {
        let engine = self.current.lock().as_ref().map(|current| current.engine.clone());
        engine.ok_or_else(|| not_begun(py))
    }

    /// Begin `run` with a generation above `run.generation` and above all known generations. Unless the run is fresh,
    /// it continues with the rows of the engine's generation.
    pub(super) fn next_generation(&self, py: Python<'_>, mut run: Run, step: u64) -> PyResult<u64> {
        run.generation = run.generation.max(self.generation()).max(self.highest_generation(py)?) + 1;
        run.continues = if run.fresh { 0 } else { self.generation() };
        let tables = self.tables();
        py.detach(|| tables.begin(&run)).map_err(|error| errors::tables(py, &error))?;
        let generation = run.generation;
        let options = EngineOptions { first_seq: step + 1, ..EngineOptions::default() };
        self.adopt(py, generation, Some(run), options)?;
        Ok(generation)
    }

    /// Switch to `generation`. The threads of the previous engine are joined without the GIL.
    pub(super) fn adopt(
        &self,
        py: Python<'_>,
        generation: u64,
        run: Option<Run>,
        options: EngineOptions,
    ) -> PyResult<()> {
        let options = EngineOptions {
            job: self.job.clone(),
            generation,
            rank: self.rank,
            world_size: self.world_size,
            ..options
        };
        let device = self.device.lock().clone();
        let engine = RankEngine::with_device(self.tables(), self.schema.clone(), options, device);
        let engine = engine.map_err(|error| errors::engine(py, &error))?;
        let previous = self.current.lock().replace(Current { generation, run, engine });
        py.detach(move || drop(previous));
        Ok(())
    }
}

pub(super) fn not_begun(py: Python<'_>) -> PyErr {
    errors::tables(py, &TablesError::NotBegun)
}
