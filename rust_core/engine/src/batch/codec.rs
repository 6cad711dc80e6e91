//! The encoding of a batch as bytes: little-endian, with a version and a checksum at the end. Every length is
//! checked.
//!
//! ```text
//! "PBAT" version:u16 flags:u16 batch_size:u32 id_features:u32 dense:u32 labels:u32 meta:u32-prefixed bytes
//! id feature: name  kind:u8  unique:u32  occurrences:u32  ids:[u64]  inverse:[u32]  offsets:[u32] if lists
//!             weights:[f32] if weighted      (kind: 1 lists, plus 2 weighted; version 1 has no weights)
//! tensor:     named:u8  name  dtype:u8  axes:u8  shape:[u64]  elements
//! crc32c:u32 of all bytes before          (name = length:u16, UTF-8)
//! ```

use crate::batch::feature::IdFeature;
use crate::batch::tensor::{Dtype, MAX_AXES, Tensor};
use crate::batch::{Batch, BatchParts, check_counts};
use crate::error::Error;

const MAGIC: &[u8; 4] = b"PBAT";
const VERSION: u16 = 2;
const REQUIRES_GRAD: u16 = 1;
const HAS_META: u16 = 2;
const LISTS: u8 = 1;
const WEIGHTED: u8 = 2;
const CHECKSUM_BYTES: usize = 4;

impl Batch {
    /// Encode the batch as bytes that [`Self::from_bytes`] reads.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the user's metadata is too large for a 32-bit length.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let meta = self.meta().unwrap_or_default();
        let meta_len = u32::try_from(meta.len()).map_err(|_| Error::TooLarge {
            what: "bytes of meta".into(),
            size: meta.len(),
            limit: u32::MAX as usize,
        })?;
        let mut out = Vec::with_capacity(self.encoded_size());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        let flags =
            u16::from(self.requires_grad()) * REQUIRES_GRAD + u16::from(self.meta().is_some()) * HAS_META;
        out.extend_from_slice(&flags.to_le_bytes());
        let counts = [self.batch_size(), self.id_features().len(), self.dense().len(), self.labels().len()];
        put_u32s(&mut out, &counts.map(|count| count as u32));
        put_u32s(&mut out, &[meta_len]);
        out.extend_from_slice(meta);
        for feature in self.id_features() {
            put_feature(&mut out, feature);
        }
        for tensor in self.dense().iter().chain(self.labels()) {
            put_tensor(&mut out, tensor);
        }
        let checksum = crc32c::crc32c(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        Ok(out)
    }

    /// Decode the result of [`Self::to_bytes`]. Allocates no more than a small multiple of `bytes.len()`.
    ///
    /// # Errors
    /// [`Error::BadBytes`] for a wrong checksum, version or length, and for unknown flags or types;
    /// [`Error::BadFeature`], [`Error::BadTensor`]; those of [`Batch::new`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader { bytes: checked_body(bytes)?, at: MAGIC.len() };
        let version = reader.u16()?;
        if !(1..=VERSION).contains(&version) {
            return reader.bad(format!(
                "found format version {version}, but this build reads versions up to {VERSION}; install a newer Persia"
            ));
        }
        let flags = reader.u16()?;
        if flags & !(REQUIRES_GRAD | HAS_META) != 0 {
            return reader.bad(format!("unknown flags {flags:#06x}"));
        }
        let batch_size = reader.u32()? as usize;
        let counts = [reader.u32()?, reader.u32()?, reader.u32()?];
        // Check the number of features before reading them, because a feature of a few bytes takes a thousand bytes
        // in memory.
        check_counts(counts.map(|count| count as usize))?;
        let meta_len = reader.u32()? as usize;
        let meta = reader.take(meta_len)?.to_vec();
        if flags & HAS_META == 0 && !meta.is_empty() {
            return reader.bad("found bytes of meta, but the flag of meta is not set".into());
        }
        // `collect` grows as it reads, so a wrong count cannot cause a large allocation.
        let parts = BatchParts {
            id_features: (0..counts[0]).map(|_| reader.feature(batch_size)).collect::<Result<_, _>>()?,
            dense: (0..counts[1]).map(|_| reader.tensor()).collect::<Result<_, _>>()?,
            labels: (0..counts[2]).map(|_| reader.tensor()).collect::<Result<_, _>>()?,
            batch_size: Some(batch_size),
            requires_grad: flags & REQUIRES_GRAD != 0,
            meta: (flags & HAS_META != 0).then_some(meta),
        };
        if reader.at != reader.bytes.len() {
            let more = reader.bytes.len() - reader.at;
            return reader
                .bad(format!("the number of bytes after the end of the batch is {more}, expected 0"));
        }
        Batch::new(parts)
    }

    /// An estimate of the size of [`Self::to_bytes`], so that memory is reserved only once.
    fn encoded_size(&self) -> usize {
        let features = self.id_features().iter().map(|feature| {
            let offsets = feature.offsets().map_or(0, <[u32]>::len);
            let weights = feature.per_sample_weights().map_or(0, <[f32]>::len);
            let words = feature.inverse().len() + offsets + weights;
            feature.name().len() + 16 + 8 * feature.unique().len() + 4 * words
        });
        let tensors = self.dense().iter().chain(self.labels());
        let tensors =
            tensors.map(|t| t.name().map_or(0, str::len) + 8 + 8 * t.shape().len() + t.bytes().len());
        64 + self.meta().map_or(0, <[u8]>::len) + features.sum::<usize>() + tensors.sum::<usize>()
    }
}

/// Check the magic number and the checksum. Returns the bytes before the checksum.
fn checked_body(bytes: &[u8]) -> Result<&[u8], Error> {
    let bad = |at: usize, what: String| Err(Error::BadBytes { at, what });
    let Some((body, &checksum)) = bytes.split_last_chunk::<CHECKSUM_BYTES>() else {
        return bad(0, format!("it is cut short: found {} of at least {CHECKSUM_BYTES} bytes", bytes.len()));
    };
    if !body.starts_with(MAGIC) {
        return bad(0, "it does not start with PBAT".into());
    }
    let (found, expected) = (crc32c::crc32c(body), u32::from_le_bytes(checksum));
    if found != expected {
        return bad(body.len(), format!("its checksum is {found:08x}, but the sender's is {expected:08x}"));
    }
    Ok(body)
}

fn put_u32s(out: &mut Vec<u8>, values: &[u32]) {
    out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// Append a name. Its length was limited to [`persia_types::limits::MAX_NAME_BYTES`] when the batch was built.
fn put_name(out: &mut Vec<u8>, name: &str) {
    out.extend_from_slice(&(name.len() as u16).to_le_bytes());
    out.extend_from_slice(name.as_bytes());
}

fn put_feature(out: &mut Vec<u8>, feature: &IdFeature) {
    put_name(out, feature.name());
    let lists = u8::from(feature.offsets().is_some()) * LISTS;
    out.push(lists + u8::from(feature.per_sample_weights().is_some()) * WEIGHTED);
    put_u32s(out, &[feature.unique().len() as u32, feature.inverse().len() as u32]);
    out.extend(feature.unique().ids().iter().flat_map(|id| id.to_le_bytes()));
    put_u32s(out, feature.inverse());
    put_u32s(out, feature.offsets().unwrap_or_default());
    out.extend(
        feature.per_sample_weights().unwrap_or_default().iter().flat_map(|weight| weight.to_le_bytes()),
    );
}

fn put_tensor(out: &mut Vec<u8>, tensor: &Tensor) {
    out.push(u8::from(tensor.name().is_some()));
    put_name(out, tensor.name().unwrap_or_default());
    out.push(tensor.dtype() as u8);
    out.push(tensor.shape().len() as u8);
    out.extend(tensor.shape().iter().flat_map(|axis| (*axis as u64).to_le_bytes()));
    out.extend_from_slice(tensor.bytes());
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn bad<T>(&self, what: String) -> Result<T, Error> {
        Err(Error::BadBytes { at: self.at, what })
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Error> {
        let rest = &self.bytes[self.at..];
        if count > rest.len() {
            return self.bad(format!("it ends too early: expected {count} more bytes, found {}", rest.len()));
        }
        self.at += count;
        Ok(&rest[..count])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let bytes = self.take(N)?;
        Ok(std::array::from_fn(|i| bytes[i]))
    }

    fn u8(&mut self) -> Result<u8, Error> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, Error> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        self.array().map(u32::from_le_bytes)
    }

    fn u32s(&mut self, count: usize) -> Result<Vec<u32>, Error> {
        let bytes = self.take(count.saturating_mul(4))?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|chunk| u32::from_le_bytes(*chunk)).collect())
    }

    fn u64s(&mut self, count: usize) -> Result<Vec<u64>, Error> {
        let bytes = self.take(count.saturating_mul(8))?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|chunk| u64::from_le_bytes(*chunk)).collect())
    }

    fn flag(&mut self) -> Result<bool, Error> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => self.bad(format!("found {other} as the flag of a name, expected 0 or 1")),
        }
    }

    fn name(&mut self) -> Result<String, Error> {
        let length = usize::from(self.u16()?);
        match std::str::from_utf8(self.take(length)?) {
            Ok(name) => Ok(name.to_owned()),
            Err(_) => self.bad("found a name that is not UTF-8".into()),
        }
    }

    fn feature(&mut self, batch_size: usize) -> Result<IdFeature, Error> {
        let name = self.name()?;
        let kind = self.u8()?;
        if kind & !(LISTS | WEIGHTED) != 0 {
            return self.bad(format!("unknown kind {kind} of an id feature"));
        }
        let (unique, occurrences) = (self.u32()? as usize, self.u32()? as usize);
        let ids = self.u64s(unique)?;
        let inverse = self.u32s(occurrences)?;
        let offsets = if kind & LISTS != 0 { Some(self.u32s(batch_size + 1)?) } else { None };
        let feature = IdFeature::from_parts(name, &ids, inverse, offsets)?;
        if kind & WEIGHTED == 0 {
            return Ok(feature);
        }
        let weights: Vec<f32> = self.u32s(occurrences)?.into_iter().map(f32::from_bits).collect();
        feature.with_weights(&weights)
    }

    fn tensor(&mut self) -> Result<Tensor, Error> {
        let named = self.flag()?;
        let name = self.name()?;
        if !named && !name.is_empty() {
            return self.bad("found the name of a tensor that is marked as unnamed".into());
        }
        let code = self.u8()?;
        let Some(dtype) = Dtype::from_code(code) else {
            return self.bad(format!("unknown element type {code}"));
        };
        let axes = usize::from(self.u8()?);
        if axes > MAX_AXES {
            return self.bad(format!("the number of axes is {axes}, allowed: at most {MAX_AXES}"));
        }
        let shape: Vec<usize> =
            self.u64s(axes)?.into_iter().map(|axis| usize::try_from(axis).unwrap_or(usize::MAX)).collect();
        let size = shape.iter().fold(dtype.size(), |product, axis| product.saturating_mul(*axis));
        let bytes = self.take(size)?.to_vec();
        Tensor::new(named.then_some(name), dtype, shape, bytes)
    }
}

#[cfg(test)]
mod tests {
    use persia_types::limits::MAX_SLOTS;
    use proptest::prelude::*;

    use super::*;

    fn sample_batch() -> Batch {
        let floats: Vec<u8> =
            [0.5f32, -1.5, 2.0, 0.0, 1.0, 3.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        Batch::new(BatchParts {
            id_features: vec![
                IdFeature::single("single", &[9, 4, 9]).unwrap(),
                IdFeature::lists("lists", &[1, 2, 1, u64::MAX], &[0, 3, 3, 4]).unwrap(),
                IdFeature::lists("weighted", &[8, 3, 8], &[0, 1, 3, 3])
                    .unwrap()
                    .with_weights(&[0.5, -2.0, 3.0])
                    .unwrap(),
            ],
            dense: vec![
                Tensor::new(Some("x".into()), Dtype::F32, vec![3, 2], floats).unwrap(),
                Tensor::new(None, Dtype::I16, vec![3], vec![1, 0, 2, 0, 3, 0]).unwrap(),
            ],
            labels: vec![Tensor::new(None, Dtype::Bool, vec![3, 1], vec![0, 1, 1]).unwrap()],
            batch_size: None,
            requires_grad: true,
            meta: Some(b"meta".to_vec()),
        })
        .unwrap()
    }

    /// Replace the checksum so that a test can reach the parser.
    fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let body = bytes.len() - CHECKSUM_BYTES;
        let checksum = crc32c::crc32c(&bytes[..body]);
        bytes[body..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    #[test]
    fn a_batch_survives_the_round_trip() {
        let batch = sample_batch();
        let bytes = batch.to_bytes().unwrap();
        let read = Batch::from_bytes(&bytes).unwrap();
        assert_eq!(read.to_bytes().unwrap(), bytes);
        assert_eq!(read.meta(), Some(&b"meta"[..]));
        assert!(read.requires_grad());
        for (a, b) in read.id_features().iter().zip(batch.id_features()) {
            assert_eq!(a.unique(), b.unique());
            assert_eq!(a.csr().offsets, b.csr().offsets);
            assert_eq!(a.csr().indices, b.csr().indices);
            assert_eq!(a.per_sample_weights(), b.per_sample_weights());
            assert_eq!(a.csr_weights(), b.csr_weights());
        }
        assert_eq!(read.dense(), batch.dense());
        assert_eq!(read.labels(), batch.labels());
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_refused() {
        let bytes = sample_batch().to_bytes().unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Batch::from_bytes(&damaged).is_err(), "bit {bit}");
        }
        for length in 0..bytes.len() {
            assert!(Batch::from_bytes(&bytes[..length]).is_err(), "length {length}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(Batch::from_bytes(&longer).is_err());
    }

    #[test]
    fn trailing_bytes_and_future_versions_are_refused_despite_a_right_checksum() {
        let bytes = sample_batch().to_bytes().unwrap();
        let mut longer = bytes.clone();
        longer.extend([0; 3]);
        let error = Batch::from_bytes(&resealed(longer)).unwrap_err().to_string();
        assert!(error.contains("the number of bytes after the end of the batch is 3"), "{error}");
        let mut future = bytes;
        future[4] = 3;
        assert!(Batch::from_bytes(&resealed(future)).unwrap_err().to_string().contains("version 3"));
    }

    #[test]
    fn counts_beyond_the_limit_are_refused_before_anything_is_read() {
        let bytes = sample_batch().to_bytes().unwrap();
        for place in [12, 16, 20] {
            let mut many = bytes.clone();
            many[place..place + 4].copy_from_slice(&(MAX_SLOTS as u32 + 1).to_le_bytes());
            let error = Batch::from_bytes(&resealed(many)).unwrap_err();
            assert!(matches!(error, Error::TooLarge { limit: MAX_SLOTS, .. }), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Damaged bytes with a correct checksum are either refused or are another valid batch. Reading them never
        /// panics.
        #[test]
        fn hostile_bytes_never_panic(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cut in any::<prop::sample::Index>(),
            cuts in any::<bool>(),
        ) {
            let mut bytes = sample_batch().to_bytes().unwrap();
            if cuts {
                bytes.truncate(8 + cut.index(bytes.len() - 8));
            }
            for (place, value) in edits {
                let place = 4 + place.index(bytes.len() - 4);
                bytes[place] = value;
            }
            if let Ok(batch) = Batch::from_bytes(&resealed(bytes)) {
                let again = batch.to_bytes().unwrap();
                prop_assert_eq!(Batch::from_bytes(&again).unwrap().to_bytes().unwrap(), again);
            }
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut framed = MAGIC.to_vec();
            framed.extend(bytes);
            framed.extend([0; CHECKSUM_BYTES]);
            prop_assert!(Batch::from_bytes(&resealed(framed)).is_err());
        }
    }
}
