//! Look-ups and pushes.

use std::time::Duration;

use persia_types::tables::{LookupReport, LookupRequest, PushReport, PushRequest};
use persia_types::{Mode, ShardedIds, Table, TablesError, VIRTUAL_SHARDS};

use crate::request::check::{
    check_buffer, check_samples_once, check_step, check_tables, malformed, of_table,
};
use crate::request::lookup::{CheckedLookup, asked};
use crate::request::push::{CheckedPush, TableUpdate};
use crate::run::ActiveRun;
use crate::store::Store;

impl Store {
    /// Whether the copy budget is used up.
    pub fn is_full(&self) -> bool {
        self.copy_budget.is_full()
    }

    /// Wait until the copy budget has space, but no longer than `timeout`. Call this before a push takes
    /// anything that other requests wait for.
    pub fn wait_for_room(&self, timeout: Duration) {
        self.copy_budget.wait(timeout);
    }

    pub(super) fn apply_lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        let run = self.run.read();
        let run = run.as_ref().ok_or(TablesError::NotBegun)?;
        if rows.len() != request.tables.len() {
            return malformed(format!(
                "the number of buffers is {}, but the number of tables is {}",
                rows.len(),
                request.tables.len()
            ));
        }
        check_tables(&self.schema, request.tables.iter().map(|part| (part.table, part.ids.len())))?;
        for (part, rows) in request.tables.iter().zip(rows.iter()) {
            check_buffer(&self.schema.tables[part.table], part, rows.len())?;
        }
        self.check_shards(request.tables.iter().map(|part| part.ids))?;
        if self.threads.parts(asked(request.tables)) > 1 {
            let mut parts = request.tables.iter();
            parts.try_for_each(|part| check_samples_once(&self.schema.tables[part.table], part))?;
        }
        let trains = request.mode == Mode::Train;
        let step = if trains {
            self.claims.check(request.token)?;
            check_trains(run)?;
            check_step(request.step)?
        } else {
            u32::try_from(request.step).unwrap_or(u32::MAX)
        };
        let mut found = self.row_index_cache.buffer();
        let (schema, level, tables) = (&self.schema, self.level, request.tables);
        let lookup = CheckedLookup { schema, run, level, step, trains, tables };
        let reports = lookup.run(&self.shards, &self.threads, rows, &mut found);
        let counts = if trains {
            self.row_index_cache.insert(request.token, found)
        } else {
            self.row_index_cache.recycle(found);
            self.options.serves
        };
        if counts {
            self.counters.lock().add_lookup(tables, &reports);
        }
        let mut sum = LookupReport::default();
        reports.into_iter().for_each(|report| sum += report);
        Ok(sum)
    }

    pub(super) fn apply_push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        let run = self.run.read();
        let run = run.as_ref().ok_or(TablesError::NotBegun)?;
        let rows_pushed = request.tables.iter().map(|part| part.ids.len() as u64).sum();
        let report = match self.claims.claim(request.token)? {
            None => PushReport { rows_pushed, rows_duplicate: rows_pushed, ..PushReport::default() },
            Some(claim) => {
                let push = self.check_push(run, request)?;
                let mut found = self.row_index_cache.take(request.token).unwrap_or_default();
                push.reserve(&self.shards, &self.threads, &mut found)?;
                let report = push.apply(&self.shards, &self.threads, &found);
                claim.applied();
                self.row_index_cache.recycle(found);
                report?
            }
        };
        self.counters.lock().pushes += report;
        Ok(report)
    }

    /// Check the whole request, before anything changes.
    fn check_push<'a>(
        &'a self,
        run: &'a ActiveRun,
        request: &PushRequest<'a>,
    ) -> Result<CheckedPush<'a>, TablesError> {
        check_trains(run)?;
        let step = check_step(request.step)?;
        if !(0.0..=f32::MAX).contains(&request.lr_factor) {
            let factor = request.lr_factor;
            return malformed(format!("lr_factor is {factor}; it must be from 0 to {:?}", f32::MAX));
        }
        check_tables(&self.schema, request.tables.iter().map(|part| (part.table, part.ids.len())))?;
        for part in request.tables {
            let Table { name, dim, .. } = &self.schema.tables[part.table];
            part.gradients.check(part.ids.len(), *dim).map_err(|error| of_table(name, error.into()))?;
        }
        self.check_shards(request.tables.iter().map(|part| part.ids))?;
        let (lr_factor, rank) = (request.lr_factor, request.token.rank);
        let updates =
            request.tables.iter().map(|part| TableUpdate::new(run, part.table, lr_factor, step, rank));
        let updates = updates.collect::<Option<_>>().ok_or(TablesError::NoOptimizer)?;
        let (schema, level, tables) = (&self.schema, self.level, request.tables);
        Ok(CheckedPush { schema, run, level, step, tables, updates })
    }

    /// Refuse ids of shards that are not held.
    fn check_shards<'a>(&self, mut ids: impl Iterator<Item = &'a ShardedIds>) -> Result<(), TablesError> {
        let held = &self.options.shards;
        let foreign = ids.find_map(|ids| {
            let before = (0..held.start).rev().find(|shard| !ids.range(*shard).is_empty());
            before.or_else(|| (held.end..VIRTUAL_SHARDS).find(|shard| !ids.range(*shard).is_empty()))
        });
        match foreign {
            None => Ok(()),
            Some(shard) => {
                Err(TablesError::WrongShard { peer: "this store".into(), held: held.clone(), shard })
            }
        }
    }
}

/// Refuse a training request of a run that does not train.
fn check_trains(run: &ActiveRun) -> Result<(), TablesError> {
    if run.trains { Ok(()) } else { Err(TablesError::NoOptimizer) }
}
