//! Cases about samples with many ids. Tables that pool must return results that are bit-identical to pooling
//! their rows outside the tables. Tables that do not pool must refuse such look-ups.

use persia_kernels::{Bags, Csr, Gradients, Pool, SegmentSum};
use persia_types::id::{Id, ShardedIds, hash_id};
use persia_types::schema::Initializer;
use persia_types::tables::{
    LookupReport, LookupRequest, Mode, PerSample, PushRequest, Run, TableGradients, TableIds, TablesError,
};

use crate::fixture::{Fixture, begun, begun_with, run, token};
use crate::{Case, Make};

pub(super) const CASES: &[Case] = &[
    ("samples of many ids get the bits of pooled rows", pooled_equals_rows),
    ("gradients of samples give the bits of summed rows", sums_equal_rows),
    ("a bad number of a sample costs its own ids only", bad_sample),
    ("bags that do not fit are refused whole", misfits),
];

const TABLE: usize = 1;
const DIM: usize = 19;
const SAMPLES: usize = 60;

/// Samples with 0 to 22 ids each, in both forms in which the engine describes samples.
struct Many {
    ids: ShardedIds,
    indices: Vec<u32>,
    offsets: Vec<u32>,
    /// The start of each id's samples in `samples`.
    starts: Vec<u32>,
    /// The samples of each id.
    samples: Vec<u32>,
    /// A weight for each index, in the order of `indices`.
    weights: Vec<f32>,
    /// The same weights, in the order of `samples`.
    grouped: Vec<f32>,
    divisors: Vec<f32>,
    factors: Vec<f32>,
}

fn number(of: u64) -> f32 {
    (hash_id(of) >> 40) as f32 / 1e6 - 8.0
}

impl Many {
    fn new(seed: u64) -> Self {
        let lists: Vec<Vec<Id>> = (0..SAMPLES as u64)
            .map(|sample| {
                (0..hash_id(sample ^ seed) % 23).map(|i| hash_id(sample * 31 + i * seed) % 400).collect()
            })
            .collect();
        assert!(lists.iter().any(Vec::is_empty), "some samples have no id");
        let mut unique = lists.concat();
        unique.sort_unstable();
        unique.dedup();
        let ids = ShardedIds::group(&unique).unwrap();
        let place = |id: &Id| ids.ids().iter().position(|other| other == id).unwrap() as u32;
        let indices: Vec<u32> = lists.iter().flatten().map(place).collect();
        let weights: Vec<f32> = (0..indices.len() as u64).map(number).collect();
        let mut offsets = vec![0];
        let mut of_index = Vec::new();
        for (sample, list) in (0..).zip(&lists) {
            of_index.extend(std::iter::repeat_n(sample, list.len()));
            offsets.push(of_index.len() as u32);
        }
        let (mut starts, mut samples, mut grouped) = (vec![0], Vec::new(), Vec::new());
        for unique in 0..ids.len() as u32 {
            for index in (0..indices.len()).filter(|index| indices[*index] == unique) {
                samples.push(of_index[index]);
                grouped.push(weights[index]);
            }
            starts.push(samples.len() as u32);
        }
        let divisors: Vec<f32> = lists.iter().map(|list| list.len().max(1) as f32).collect();
        let factors = divisors.iter().map(|divisor| 1.0 / divisor).collect();
        Self { ids, indices, offsets, starts, samples, weights, grouped, divisors, factors }
    }

    fn bags(&self, weighted: bool, divided: bool) -> Bags<'_> {
        let (weights, divisors) =
            (weighted.then_some(&self.weights[..]), divided.then_some(&self.divisors[..]));
        Bags { indices: &self.indices, offsets: Some(&self.offsets), per_sample_weights: weights, divisors }
    }

    fn sum<'a>(&'a self, gradients: &'a [f32], weighted: bool, divided: bool, scale: f32) -> SegmentSum<'a> {
        let csr = Csr { offsets: &self.starts, indices: &self.samples };
        let (weights, factors) =
            (weighted.then_some(&self.grouped[..]), divided.then_some(&self.factors[..]));
        SegmentSum { gradients, dim: DIM, csr, factors, per_sample_weights: weights, scale }
    }

    fn try_lookup(
        &self,
        fixture: &Fixture,
        seq: u64,
        mode: Mode,
        bags: Bags<'_>,
    ) -> Result<(LookupReport, Vec<f32>), TablesError> {
        let mut out = vec![f32::NAN; SAMPLES * DIM];
        let tables = [TableIds { table: TABLE, ids: &self.ids, per_sample: Some(PerSample::Pooled(bags)) }];
        let request = LookupRequest { token: token(0, seq), step: seq, mode, tables: &tables };
        fixture.0.lookup(&request, &mut [&mut out]).map(|report| (report, out))
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn lively() -> Run {
    Run { initializer: Initializer::Uniform { low: -1.0, high: 1.0 }, ..run() }
}

/// A sum and a mean, each without and with weights.
const KINDS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

fn pooled_equals_rows(make: Make<'_>) {
    let (by_sample, by_row) = (begun_with(make, &lively()), begun_with(make, &lively()));
    for (seq, (weighted, divided)) in (1..).zip(KINDS) {
        let many = Many::new(seq);
        let bags = many.bags(weighted, divided);
        if !by_sample.0.pools(DIM, many.ids.len(), &bags) {
            let error = many.try_lookup(&by_sample, seq, Mode::Train, bags).unwrap_err();
            assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
            assert_eq!(by_sample.rows_held(), [0, 0]);
            continue;
        }
        for mode in [Mode::Train, Mode::Eval] {
            if mode == Mode::Eval {
                for fixture in [&by_sample, &by_row] {
                    fixture.insert(seq, TABLE, many.ids.ids());
                }
            }
            let (report, out) = many.try_lookup(&by_sample, seq, mode, bags).expect("a pooled look-up");
            let (rows, of_rows) = by_row.try_lookup(token(0, seq), mode, TABLE, many.ids.ids()).unwrap();
            let mut pooled = vec![f32::NAN; SAMPLES * DIM];
            persia_kernels::pool(&Pool { rows: &rows.concat(), dim: DIM, bags }, &mut pooled);
            assert_eq!((report, bits(&out)), (of_rows, bits(&pooled)));
        }
    }
}

fn sums_equal_rows(make: Make<'_>) {
    let (by_sample, by_row) = (begun_with(make, &lively()), begun_with(make, &lively()));
    for (seq, (weighted, divided)) in (1..).zip(KINDS) {
        let many = Many::new(seq);
        let ids = many.ids.ids();
        assert_eq!(by_sample.train(seq, TABLE, ids), by_row.train(seq, TABLE, ids));
        let gradients: Vec<f32> = (0..(SAMPLES * DIM) as u64).map(|place| number(place + seq)).collect();
        let sum = many.sum(&gradients, weighted, divided, if seq % 2 == 0 { 0.3 } else { 1.0 });
        let tables = [TableGradients { table: TABLE, ids: &many.ids, gradients: Gradients::Samples(sum) }];
        let request = PushRequest { token: token(0, seq), step: seq, lr_factor: 1.0, tables: &tables };
        let report = by_sample.0.push(&request).expect("a push of samples");
        let rows: Vec<Vec<f32>> =
            Gradients::Samples(sum).rows(0..ids.len(), DIM).chunks(DIM).map(<[f32]>::to_vec).collect();
        assert_eq!(report, by_row.push(seq, TABLE, ids, &rows));
        assert_eq!(by_sample.0.push(&request).unwrap().rows_duplicate, ids.len() as u64);
        let [left, right] = [&by_sample, &by_row].map(|fixture| fixture.read(TABLE, ids));
        assert_eq!(bits(&left.concat()), bits(&right.concat()));
    }
}

fn bad_sample(make: Make<'_>) {
    let fixture = begun(make);
    let many = Many::new(5);
    fixture.train(1, TABLE, many.ids.ids());
    let sample = many.samples[0];
    let mut gradients = vec![1.0; SAMPLES * DIM];
    gradients[sample as usize * DIM + 3] = f32::NAN;
    let sum = many.sum(&gradients, false, true, 1.0);
    let tables = [TableGradients { table: TABLE, ids: &many.ids, gradients: Gradients::Samples(sum) }];
    let request = PushRequest { token: token(0, 1), step: 1, lr_factor: 1.0, tables: &tables };
    let report = fixture.0.push(&request).unwrap();
    let bad = (0..many.ids.len()).filter(|unique| sum.csr.of(*unique).contains(&sample)).count() as u64;
    assert_eq!((report.rows_nonfinite, report.rows_applied), (bad, many.ids.len() as u64 - bad));
    assert_eq!(report.first_nonfinite, Some((TABLE, many.ids.ids()[0])));
}

fn misfits(make: Make<'_>) {
    let fixture = begun(make);
    let many = Many::new(7);
    let good = many.bags(true, true);
    let (mut indices, mut offsets) = (many.indices.clone(), many.offsets.clone());
    indices[5] = many.ids.len() as u32;
    offsets.swap(10, 40);
    let weights = vec![f32::INFINITY; indices.len()];
    let bad = [
        Bags { indices: &indices, ..good },
        Bags { offsets: Some(&offsets), ..good },
        Bags { offsets: Some(&many.offsets[1..]), ..good },
        Bags { per_sample_weights: Some(&weights), ..good },
        Bags { per_sample_weights: Some(&many.weights[1..]), ..good },
        Bags { divisors: Some(&[0.0; SAMPLES]), ..good },
        Bags { divisors: Some(&many.divisors[1..]), ..good },
    ];
    for bags in bad {
        let refused = many.try_lookup(&fixture, 1, Mode::Train, bags);
        assert!(matches!(refused, Err(TablesError::BadShape { .. })), "{refused:?}");
    }
    assert_eq!(fixture.rows_held(), [0, 0]);
    assert_eq!(fixture.train(1, TABLE, many.ids.ids()).1.initial, many.ids.len() as u64);
}
