//! A training batch, as data-compose sends it to ranks.

use persia_engine::{Batch, BatchParts, Dtype, IdFeature, Tensor};

use super::memory;

/// The memory that the hash tables of the deduplication take for any batch.
const FIXED_BYTES: usize = 1 << 20;
/// The memory per input byte. A feature with one id takes a few bytes on the network, but in memory it has
/// the offsets of 256 shards.
const BYTES_PER_BYTE: usize = 64;
const VERSION: [u8; 2] = [2, 0];

/// Check that an accepted batch is encoded as the same bytes, and that its lists of occurrences fit its ids.
pub fn check(data: &[u8]) -> bool {
    let bytes = sealed(data.to_vec());
    let read = || Batch::from_bytes(&bytes);
    let Ok(batch) = memory::within(FIXED_BYTES + BYTES_PER_BYTE * bytes.len(), read) else { return false };
    let again = batch.to_bytes().expect("what was read can be written");
    if bytes[4..6] == VERSION {
        assert_eq!(again, bytes);
    }
    let back = Batch::from_bytes(&again).expect("what was written can be read");
    assert_eq!(back.to_bytes().expect("twice"), again);
    for feature in batch.id_features() {
        let unique = feature.unique().len();
        assert_eq!(feature.samples(), batch.batch_size());
        assert_eq!(feature.csr().indices.len(), feature.inverse().len());
        feature.csr().check(unique, batch.batch_size()).expect("every occurrence is of a sample");
        assert!(feature.inverse().iter().all(|place| (*place as usize) < unique));
    }
    assert!(batch.dense().iter().chain(batch.labels()).all(|tensor| tensor.shape()[0] == batch.batch_size()));
    true
}

/// The bytes with the correct checksum at the end.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some((body, checksum)) = bytes.split_last_chunk_mut::<4>() {
        *checksum = crc32c::crc32c(body).to_le_bytes();
    }
    bytes
}

/// Inputs that the target accepts.
pub fn seeds() -> Vec<Vec<u8>> {
    let tensor = |name: Option<&str>, dtype: Dtype, shape: &[usize]| {
        let bytes = vec![1; shape.iter().product::<usize>() * dtype.size()];
        Tensor::new(name.map(str::to_owned), dtype, shape.to_vec(), bytes).expect("a tensor")
    };
    let batch = |id_features, dense, labels, meta: Option<&[u8]>| {
        let parts = BatchParts {
            id_features,
            dense,
            labels,
            batch_size: None,
            requires_grad: meta.is_some(),
            meta: meta.map(<[u8]>::to_vec),
        };
        Batch::new(parts).and_then(|batch| batch.to_bytes()).expect("a batch")
    };
    let single = || IdFeature::single("age", &[9, 4, 9]).expect("a feature");
    let lists = |name| IdFeature::lists(name, &[1, 2, 1, u64::MAX], &[0, 3, 3, 4]).expect("a feature");
    let weighted = lists("weighted").with_weights(&[0.5, -2.0, 3.0, 1.0]).expect("weights");
    let many: Vec<u64> = (0..40).map(|at| at % 17).collect();
    let every =
        [Dtype::Bool, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64, Dtype::U8, Dtype::F32, Dtype::F64];
    let mut first = batch(vec![single()], vec![], vec![], None);
    first[4] = 1;
    vec![
        sealed(first),
        batch(vec![single()], vec![], vec![tensor(None, Dtype::F32, &[3, 1])], Some(b"")),
        batch(
            vec![lists("clicks"), weighted],
            vec![tensor(Some("x"), Dtype::F32, &[3, 2])],
            vec![],
            Some(b"meta"),
        ),
        batch(vec![single()], every.map(|dtype| tensor(None, dtype, &[3])).to_vec(), vec![], None),
        batch(vec![IdFeature::single("many", &many).expect("a feature")], vec![], vec![], None),
    ]
}
