//! Cases about rows that are written directly to the samples that use them, and gradients that are read
//! directly from samples.

use persia_kernels::{Csr, Gradients, SegmentSum};
use persia_types::id::{Id, ShardedIds, hash_id};
use persia_types::schema::Initializer;
use persia_types::tables::{
    LookupRequest, Mode, PerSample, PushReport, PushRequest, Run, TableGradients, TableIds, TablesError,
};

use crate::fixture::{Fixture, begun, begun_with, run, token};
use crate::{Case, Make};

pub(super) const CASES: &[Case] = &[
    ("samples get the rows of their ids and give their gradients", samples_equal_rows),
    ("a sample's bad gradient costs its own ids only", bad_sample),
    ("lists that do not fit are refused whole", misfits),
];

const TABLE: usize = 1;
const DIM: usize = 19;

/// The unique ids of a batch and their samples.
struct Used {
    ids: ShardedIds,
    starts: Vec<u32>,
    samples: Vec<u32>,
}

impl Used {
    /// `of_samples[sample]` is the id of a sample.
    fn new(of_samples: &[Id]) -> Self {
        let mut unique = of_samples.to_vec();
        unique.sort_unstable();
        unique.dedup();
        let ids = ShardedIds::group(&unique).unwrap();
        let (mut starts, mut samples) = (vec![0], Vec::new());
        for id in ids.ids() {
            let users = of_samples.iter().zip(0..).filter(|(of_sample, _)| *of_sample == id);
            samples.extend(users.map(|(_, sample): (_, u32)| sample));
            starts.push(samples.len() as u32);
        }
        Self { ids, starts, samples }
    }

    fn csr(&self) -> Csr<'_> {
        Csr { offsets: &self.starts, indices: &self.samples }
    }

    fn lookup(&self, fixture: &Fixture, seq: u64, mode: Mode) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.samples.len() * DIM];
        let tables =
            [TableIds { table: TABLE, ids: &self.ids, per_sample: Some(PerSample::Gathered(self.csr())) }];
        let request = LookupRequest { token: token(0, seq), step: seq, mode, tables: &tables };
        fixture.0.lookup(&request, &mut [&mut out]).expect("a look-up for samples");
        out
    }

    fn push(&self, fixture: &Fixture, seq: u64, sum: SegmentSum<'_>) -> PushReport {
        let tables = [TableGradients { table: TABLE, ids: &self.ids, gradients: Gradients::Samples(sum) }];
        let request = PushRequest { token: token(0, seq), step: seq, lr_factor: 1.0, tables: &tables };
        fixture.0.push(&request).expect("a push of samples")
    }
}

/// The number for `of`. The numbers have various magnitudes and both signs, and include -0.
fn number(of: usize) -> f32 {
    let hash = hash_id(of as u64);
    let magnitude = (hash >> 40) as f32 * 10f32.powi((hash % 9) as i32 - 12);
    match hash % 11 {
        0 => -0.0,
        odd if odd % 2 == 1 => -magnitude,
        _ => magnitude,
    }
}

/// Look-ups and pushes by sample must be bit-identical to those by row, whether ids are known or new, and
/// whether one sample or many use them.
fn samples_equal_rows(make: Make<'_>) {
    let run = Run { initializer: Initializer::Uniform { low: -1.0, high: 1.0 }, ..run() };
    let (by_sample, by_row) = (begun_with(make, &run), begun_with(make, &run));
    for seq in 1..=4 {
        let of_samples: Vec<Id> = (0..900).map(|i| hash_id(i * seq) % (i % 700 + 1)).collect();
        let used = Used::new(&of_samples);
        let out = used.lookup(&by_sample, seq, Mode::Train);
        let (rows, _) = by_row.train(seq, TABLE, used.ids.ids());
        let row_of = |id: &Id| &rows[used.ids.ids().iter().position(|other| other == id).unwrap()];
        for (id, out) in of_samples.iter().zip(out.chunks(DIM)) {
            assert_eq!(bits(out), bits(row_of(id)));
        }
        let gradients: Vec<f32> = (0..900 * DIM).map(|place| number(place + seq as usize)).collect();
        let factors: Vec<f32> = (0..900).map(|sample| 1.0 / (1 + sample % 7) as f32).collect();
        let factors = (seq % 2 == 0).then_some(&factors[..]);
        let weight = |sample: usize| if seq == 3 { number(sample + 7) } else { 1.0 };
        let weights: Vec<f32> = used.csr().indices.iter().map(|sample| weight(*sample as usize)).collect();
        let weights = (seq > 2).then_some(&weights[..]);
        let scale = if seq < 3 { 0.3 } else { 1.0 };
        let sum = SegmentSum {
            gradients: &gradients,
            dim: DIM,
            csr: used.csr(),
            factors,
            per_sample_weights: weights,
            scale,
        };
        let report = used.push(&by_sample, seq, sum);
        let summed: Vec<Vec<f32>> = used
            .ids
            .ids()
            .iter()
            .map(|id| {
                let mut sum = [0.0; DIM];
                for (sample, _) in of_samples.iter().enumerate().filter(|(_, other)| *other == id) {
                    let factor = factors.map_or(1.0, |factors| factors[sample]) * weight(sample);
                    let gradient = &gradients[sample * DIM..][..DIM];
                    sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient * factor);
                }
                sum.iter().map(|sum| sum * scale).collect()
            })
            .collect();
        assert_eq!(report, by_row.push(seq, TABLE, used.ids.ids(), &summed));
        let [left, right] = [&by_sample, &by_row].map(|fixture| fixture.read(TABLE, used.ids.ids()));
        assert_eq!(bits(&left.concat()), bits(&right.concat()));
    }
    let unknown = Used::new(&[5_000, 5_001, 5_000]);
    assert_eq!(unknown.lookup(&by_sample, 9, Mode::Eval), [0.0; 3 * DIM]);
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn bad_sample(make: Make<'_>) {
    let fixture = begun(make);
    let used = Used::new(&[7, 8, 7, 9]);
    used.lookup(&fixture, 1, Mode::Train);
    let mut gradients = vec![1.0; 4 * DIM];
    gradients[2 * DIM + 18] = f32::NAN;
    let sum = SegmentSum {
        gradients: &gradients,
        dim: DIM,
        csr: used.csr(),
        factors: None,
        per_sample_weights: None,
        scale: 2.0,
    };
    let report = used.push(&fixture, 1, sum);
    assert_eq!((report.rows_applied, report.rows_nonfinite), (2, 1));
    assert_eq!(report.first_nonfinite, Some((TABLE, 7)));
    let rows = [vec![0.0; DIM], vec![-2.0; DIM], vec![-2.0; DIM]];
    assert_eq!(fixture.read(TABLE, &[7, 8, 9]), rows);
}

fn misfits(make: Make<'_>) {
    let fixture = begun(make);
    let used = Used::new(&[7, 8, 7, 9]);
    let Csr { offsets, indices } = used.csr();
    let misfits = [
        Csr { offsets: &offsets[..3], indices },
        Csr { offsets: &[0, 1, 2, 3], indices },
        Csr { offsets, indices: &[0, 1, 2, 4] },
    ];
    for csr in misfits {
        let tables = [TableIds { table: TABLE, ids: &used.ids, per_sample: Some(PerSample::Gathered(csr)) }];
        let request = LookupRequest { token: token(0, 1), step: 1, mode: Mode::Train, tables: &tables };
        let refused = fixture.0.lookup(&request, &mut [&mut [0.0; 4 * DIM]]);
        assert!(matches!(refused, Err(TablesError::BadShape { .. })), "{csr:?}: {refused:?}");
    }
    assert_eq!(fixture.rows_held(), [0, 0]);
    fixture.insert(1, TABLE, used.ids.ids());
    let gradients = [1.0; 4 * DIM];
    let good = SegmentSum {
        gradients: &gradients,
        dim: DIM,
        csr: used.csr(),
        factors: None,
        per_sample_weights: None,
        scale: 1.0,
    };
    let mut bad: Vec<SegmentSum<'_>> = misfits.map(|csr| SegmentSum { csr, ..good }).to_vec();
    bad.push(SegmentSum { gradients: &gradients[1..], ..good });
    bad.push(SegmentSum { factors: Some(&[1.0; 3]), ..good });
    bad.push(SegmentSum { per_sample_weights: Some(&[1.0; 3]), ..good });
    for sum in bad {
        let tables = [TableGradients { table: TABLE, ids: &used.ids, gradients: Gradients::Samples(sum) }];
        let request = PushRequest { token: token(0, 1), step: 1, lr_factor: 1.0, tables: &tables };
        let refused = fixture.0.push(&request);
        assert!(matches!(refused, Err(TablesError::BadShape { .. })), "{sum:?}: {refused:?}");
    }
    assert_eq!(fixture.read(TABLE, &[7, 8, 9]), vec![vec![0.0; DIM]; 3]);
    assert_eq!(used.push(&fixture, 1, good).rows_applied, 3);
}
