//! How a [`Node`] that was killed goes on: the base of its journal, then every request behind it, by the code that applied it.

use std::time::Instant;

use persia_kernels::Gradients;
use persia_types::tables::{LookupRequest, PushRequest, Run, TableGradients, TableIds};
use persia_types::{Mode, ShardedIds, Tables, TablesError};

use super::Node;
use super::journal::{Base, Mark, Rows};
use super::order::Phase;
use super::record::Entry;

impl Node {
    /// Go on where the journal ends. Where that fails, rows are not to be used.
    pub(super) fn recover(&self) -> Result<(), String> {
        let Some(journal) = &self.journal else { return Ok(()) };
        let started = Instant::now();
        let begin = |base: &Base| self.resume(base).map_err(|error| error.to_string());
        let apply = |entry| self.replay(entry).map_err(|error| error.to_string());
        let Some(recovered) = journal.recover(begin, apply)? else { return Ok(()) };
        let generation = self.current().map_err(|error| error.to_string())?.generation;
        if generation != self.generation.get() {
            return Err(format!(
                "it is of generation {generation}, and generation {} began since",
                self.generation.get()
            ));
        }
        if recovered.torn > 0 {
            tracing::warn!(
                bytes = recovered.torn,
                "the journal ends in a record that is not whole: it was not acknowledged, or not yet durable"
            );
        }
        tracing::info!(
            generation,
            records = recovered.records,
            seconds = started.elapsed().as_secs_f64(),
            "the run goes on where the journal ends"
        );
        Ok(())
    }

    /// Begin a run of the journal: a directory may have been another job's.
    fn start_again(&self, run: &Run) -> Result<(), TablesError> {
        if run.job == self.options.job {
            return self.start(run);
        }
        let what = format!("it is of job {:?}, this server works for {:?}", run.job, self.options.job);
        Err(TablesError::BadRun { what })
    }

    fn resume(&self, base: &Base) -> Result<(), TablesError> {
        self.start_again(&base.run)?;
        if let Some(Rows { directory, files }) = &base.rows {
            let dir = self.options.checkpoints.resolve(directory)?;
            self.store.restore(&dir, files)?;
        }
        self.store.resume(base.mark.progress.clone());
        self.order.resume(base.mark.reached);
        Ok(())
    }

    /// Do again what a record says; a cut with where the run stood then.
    fn replay(&self, entry: Entry) -> Result<Option<(u64, Mark)>, TablesError> {
        match entry {
            Entry::Begin(run) => self.start_again(&run)?,
            Entry::Cut(cut) => {
                self.store.prepare_snapshot(cut)?;
                return Ok(Some((cut, self.mark())));
            }
            Entry::Uncut(cut) => self.store.abort_snapshot(cut)?,
            Entry::Lookup { token, step, tables } => {
                let floats = |(table, ids): &(usize, ShardedIds)| {
                    self.options.schema.tables.get(*table).map_or(0, |table| table.dim * ids.len())
                };
                let mut rows: Vec<Vec<f32>> = tables.iter().map(|part| vec![0.0; floats(part)]).collect();
                let mut rows: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
                let tables: Vec<TableIds<'_>> = tables
                    .iter()
                    .map(|(table, ids)| TableIds { table: *table, ids, per_sample: None })
                    .collect();
                let request = LookupRequest { token, step, mode: Mode::Train, tables: &tables };
                self.store.lookup_at_once(&request, &mut rows)?;
                self.order.pass(token, Phase::Lookup);
            }
            Entry::Push { token, step, lr_factor, tables } => {
                let tables: Vec<TableGradients<'_>> = tables
                    .iter()
                    .map(|(table, ids, gradients)| TableGradients {
                        table: *table,
                        ids,
                        gradients: Gradients::Rows(gradients),
                    })
                    .collect();
                self.store.push_at_once(&PushRequest { token, step, lr_factor, tables: &tables })?;
                self.order.pass(token, Phase::Push);
            }
        }
        Ok(None)
    }
}
