//! `Tables` as a plain map under one lock: the slow and simple reference for the engine's tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use persia_types::id::{Id, hash_id};
use persia_types::limits::MAX_GRADIENT;
use persia_types::schema::{Initializer, Optimizer, Schema};
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, Mode, PerSample, PushReport, PushRequest, Run, Snapshot, Stats,
    TableGradients, Tables, TablesError,
};
use persia_types::token::{JobId, SeenTokens};

#[derive(Default, Clone)]
struct Row {
    weights: Vec<f32>,
    /// The velocity of each weight; empty if the optimizer has no momentum.
    state: Vec<f32>,
}

#[derive(Default)]
struct State {
    run: Option<Run>,
    looked_up: SeenTokens,
    pushed: SeenTokens,
    rows: Vec<BTreeMap<Id, Row>>,
    cut: Option<(u64, Vec<BTreeMap<Id, Row>>)>,
    last_cut: u64,
    stats: Stats,
}

pub(crate) struct PlainTables {
    schema: Schema,
    state: Mutex<State>,
}

impl PlainTables {
    pub(crate) fn new(schema: Schema) -> Self {
        let rows = schema.tables.iter().map(|_| BTreeMap::new()).collect();
        Self { schema, state: Mutex::new(State { rows, ..State::default() }) }
    }

    /// Set a row's weights, without optimizer state.
    pub(crate) fn set(&self, table: usize, id: Id, weights: Vec<f32>) {
        self.lock().rows[table].insert(id, Row { weights, state: Vec::new() });
    }

    /// All weights of a table.
    pub(crate) fn weights(&self, table: usize) -> BTreeMap<Id, Vec<f32>> {
        self.lock().rows[table].iter().map(|(id, row)| (*id, row.weights.clone())).collect()
    }

    /// The gradients with a defect: those after a missing id are shifted by one.
    pub(crate) fn shifted_by_missing(&self, step: u64, table: &TableGradients<'_>) -> Vec<f32> {
        let dim = self.schema.tables.get(table.table).map_or(1, |table| table.dim);
        let all = table.gradients.rows(0..table.ids.len(), dim);
        if table.table >= self.schema.tables.len() {
            return all.to_vec();
        }
        let state = self.lock();
        let admits = |id: &Id| state.run.as_ref().is_some_and(|run| admitted(run, *id, step));
        let known = |id: &Id| state.rows[table.table].contains_key(id) || admits(id);
        let mut rest = all.chunks(dim);
        let shifted = table.ids.ids().iter().filter(|id| known(id)).filter_map(|_| rest.next());
        let mut shifted: Vec<f32> = shifted.flatten().copied().collect();
        shifted.resize(all.len(), 0.0);
        shifted
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn check_tables(&self, tables: &[(usize, usize, usize)]) -> Result<(), TablesError> {
        for (index, (table, ids, floats)) in tables.iter().enumerate() {
            let bad = |what: &str| TablesError::BadTable {
                table: *table,
                tables: self.schema.tables.len(),
                what: what.into(),
            };
            let found = self.schema.tables.get(*table).ok_or_else(|| bad("unknown"))?;
            if tables[..index].iter().any(|(other, ..)| other == table) {
                return Err(bad("named twice"));
            }
            if *floats != ids * found.dim {
                return Err(TablesError::BadShape { what: format!("{floats} floats for {ids} rows") });
            }
        }
        Ok(())
    }
}

/// A number between -1 and 1 that depends on all arguments.
fn mixed(seed: u64, table: usize, id: Id, place: usize) -> f32 {
    let hash = hash_id(hash_id(hash_id(id) ^ seed) ^ ((table as u64) << 32 | place as u64));
    (hash >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn new_row(run: &Run, table: usize, id: Id) -> Row {
    let dim = run.schema.tables[table].dim;
    let weight = |place| {
        let mixed = mixed(run.seed, table, id, place);
        match run.initializer {
            Initializer::Zero => 0.0,
            Initializer::Uniform { low, high } => low + (high - low) * (mixed + 1.0) / 2.0,
            Initializer::Normal { mean, std } => mean + std * mixed, // uniform, which is enough for these tests
            other => panic!("the plain model does not know {other:?}"),
        }
    };
    let state = run.optimizer.map_or(0, |optimizer| optimizer.state_len(dim));
    Row { weights: (0..dim).map(weight).collect(), state: vec![0.0; state] }
}

fn update(row: &mut Row, gradient: &[f32], run: &Run, lr_factor: f32) {
    let Some(Optimizer::Sgd { lr, momentum, weight_decay }) = run.optimizer else {
        panic!("the plain model knows SGD only");
    };
    let lr = lr * lr_factor;
    for (place, gradient) in gradient.iter().enumerate() {
        let weight = &mut row.weights[place];
        let mut step = *gradient;
        if let Some(velocity) = row.state.get_mut(place) {
            *velocity = momentum * *velocity + step;
            step = *velocity;
        }
        *weight -= lr * (step + weight_decay * *weight);
        if run.weight_bound > 0.0 {
            *weight = weight.clamp(-run.weight_bound, run.weight_bound);
        }
    }
}

fn admitted(run: &Run, id: Id, step: u64) -> bool {
    (mixed(run.seed ^ step, usize::MAX, id, 0) + 1.0) / 2.0 < run.admit_probability
}

impl Tables for PlainTables {
    fn begin(&self, run: &Run) -> Result<(), TablesError> {
        let mut state = self.lock();
        let bad = |what: &str| Err(TablesError::BadRun { what: what.into() });
        if run.schema != self.schema {
            return bad("another schema");
        }
        if state.run.as_ref().is_some_and(|current| run.generation <= current.generation) {
            return bad("the generation is not above the current one");
        }
        if !(0.0..=1.0).contains(&run.admit_probability) || !(0.0..f32::INFINITY).contains(&run.weight_bound)
        {
            return bad("a number out of range");
        }
        if let Some(Optimizer::Sgd { lr, momentum, weight_decay }) = run.optimizer
            && ![lr, momentum, weight_decay].iter().all(|number| number.is_finite())
        {
            return bad("a number that is not finite");
        }
        for (table, rows) in self.schema.tables.iter().zip(&state.rows) {
            let wanted = run.optimizer.map_or(0, |optimizer| optimizer.state_len(table.dim));
            if rows.values().any(|row| row.state.len() != wanted) {
                return bad("rows with other optimizer state");
            }
        }
        let job = JobId::from_name(&run.job);
        state.looked_up = SeenTokens::begin(job, run.generation, run.world_size);
        state.pushed = SeenTokens::begin(job, run.generation, run.world_size);
        state.run = Some(run.clone());
        Ok(())
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let run = state.run.clone().ok_or(TablesError::NotBegun)?;
        state.looked_up.contains(request.token)?;
        if rows.len() != request.tables.len() {
            return Err(TablesError::BadShape { what: "buffers and tables differ in number".into() });
        }
        let shapes: Vec<_> = request
            .tables
            .iter()
            .zip(rows.iter())
            .map(|(t, rows)| (t.table, t.vectors(), rows.len()))
            .collect();
        self.check_tables(&shapes)?;
        for table in request.tables {
            match table.per_sample {
                None => {}
                Some(PerSample::Gathered(csr)) => csr.check(table.ids.len(), csr.indices.len())?,
                Some(PerSample::Pooled(_)) => {
                    return Err(TablesError::BadShape { what: "these tables do not pool".into() });
                }
            }
        }
        let trains = request.mode == Mode::Train;
        if trains && run.optimizer.is_none() {
            return Err(TablesError::NoOptimizer);
        }
        let counts = trains && state.looked_up.insert(request.token)?;
        let mut report = LookupReport::default();
        for (table, target) in request.tables.iter().zip(rows) {
            let dim = self.schema.tables[table.table].dim;
            for (number, &id) in table.ids.ids().iter().enumerate() {
                let row = if let Some(row) = state.rows[table.table].get(&id) {
                    report.hits += 1;
                    row.weights.clone()
                } else if trains && admitted(&run, id, request.step) {
                    report.initial += 1;
                    new_row(&run, table.table, id).weights
                } else {
                    report.missing += 1;
                    vec![0.0; dim]
                };
                let one = [number as u32];
                for place in table.gathered().map_or(&one[..], |csr| csr.of(number)) {
                    target[*place as usize * dim..][..dim].copy_from_slice(&row);
                }
            }
        }
        if counts {
            state.stats.lookups += report;
        }
        Ok(report)
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let run = state.run.clone().ok_or(TablesError::NotBegun)?;
        let seen = state.pushed.contains(request.token)?;
        let dim = |table: usize| self.schema.tables.get(table).map_or(1, |table| table.dim);
        let shapes: Vec<_> =
            request.tables.iter().map(|t| (t.table, t.ids.len(), t.ids.len() * dim(t.table))).collect();
        self.check_tables(&shapes)?;
        for table in request.tables {
            table.gradients.check(table.ids.len(), dim(table.table))?;
        }
        if run.optimizer.is_none() {
            return Err(TablesError::NoOptimizer);
        }
        let mut report = PushReport::default();
        for table in request.tables {
            let dim = self.schema.tables[table.table].dim;
            let gradients = table.gradients.rows(0..table.ids.len(), dim);
            for (id, gradient) in table.ids.ids().iter().zip(gradients.chunks(dim)) {
                report.rows_pushed += 1;
                if seen {
                    report.rows_duplicate += 1;
                    continue;
                }
                let held = &mut state.rows[table.table];
                if !held.contains_key(id) && admitted(&run, *id, request.step) {
                    held.insert(*id, new_row(&run, table.table, *id));
                    report.rows_inserted += 1;
                }
                match held.get_mut(id) {
                    None => report.rows_missing += 1,
                    Some(row) if gradient.iter().all(|value| value.abs() < MAX_GRADIENT) => {
                        report.rows_applied += 1;
                        update(row, gradient, &run, request.lr_factor);
                    }
                    Some(_) => report.add_nonfinite(table.table, *id),
                }
            }
        }
        state.pushed.insert(request.token)?;
        state.stats.pushes += report;
        Ok(report)
    }

    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        let mut state = self.lock();
        let held = state.cut.as_ref().is_some_and(|(held, _)| *held == number);
        if number <= state.last_cut && !held {
            return Err(TablesError::BadShape { what: format!("cut {number} comes late") });
        }
        if !held {
            (state.last_cut, state.cut) = (number, Some((number, state.rows.clone())));
        }
        Ok(())
    }

    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.lock().cut.take_if(|(held, _)| *held == number);
        Ok(())
    }

    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        let mut bytes = Vec::new();
        let mut state = self.lock();
        let held = match (number, state.cut.take()) {
            (None, _) => state.rows.clone(),
            (Some(number), Some((held, rows))) if number == held => rows,
            _ => return Err(TablesError::BadShape { what: "no such cut is held".into() }),
        };
        drop(state);
        let rows = held.iter().map(|rows| rows.len() as u64).collect();
        for rows in &held {
            bytes.extend((rows.len() as u64).to_le_bytes());
            for (id, row) in rows {
                bytes.extend(id.to_le_bytes());
                bytes.extend((row.state.len() as u64).to_le_bytes());
                bytes.extend(row.weights.iter().chain(&row.state).flat_map(|value| value.to_le_bytes()));
            }
        }
        let path = dir.join("rows.bin");
        fs::write(&path, &bytes).map_err(|source| TablesError::Io { path, source })?;
        let blake3 = blake3::hash(&bytes).to_hex().to_string();
        let files = vec![FileEntry { name: "rows.bin".into(), bytes: bytes.len() as u64, blake3 }];
        Ok(Snapshot { files, rows })
    }

    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let path = dir.join(&files[0].name);
        let bytes = fs::read(&path).map_err(|source| TablesError::Io { path: path.clone(), source })?;
        if blake3::hash(&bytes).to_hex().to_string() != files[0].blake3 {
            return Err(TablesError::Corrupt { path, what: "another hash than the manifest's".into() });
        }
        let mut at = bytes.as_slice();
        let mut take = |count: usize| at.split_off(..count).unwrap();
        let rows = self.schema.tables.iter().map(|table| {
            let count = u64::from_le_bytes(take(8).try_into().unwrap());
            let row = |_| {
                let id = u64::from_le_bytes(take(8).try_into().unwrap());
                let state = u64::from_le_bytes(take(8).try_into().unwrap()) as usize;
                let mut floats = take(4 * (table.dim + state))
                    .chunks(4)
                    .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
                let weights = floats.by_ref().take(table.dim).collect();
                (id, Row { weights, state: floats.collect() })
            };
            (0..count).map(row).collect()
        });
        let rows = rows.collect();
        let mut state = self.lock();
        (state.rows, state.cut) = (rows, None);
        Ok(())
    }

    fn stats(&self) -> Result<Stats, TablesError> {
        let state = self.lock();
        let held = state.rows.iter().flat_map(BTreeMap::values);
        let payload_bytes = held.map(|row| 4 * (row.weights.len() + row.state.len()) as u64).sum();
        Ok(Stats {
            rows: state.rows.iter().map(|rows| rows.len() as u64).collect(),
            payload_bytes,
            memory_bytes: payload_bytes,
            tokens: state.pushed.highest(),
            ..state.stats.clone()
        })
    }

    fn clear(&self) -> Result<(), TablesError> {
        let mut state = self.lock();
        state.rows.iter_mut().for_each(BTreeMap::clear);
        state.cut = None;
        Ok(())
    }
}
