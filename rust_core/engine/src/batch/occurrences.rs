//! The samples of each unique id, over which gradients are summed.

/// For each unique id, the samples in which it occurs, in batch order, once per occurrence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Occurrences {
    starts: Vec<u32>,
    samples: Vec<u32>,
}

impl Occurrences {
    /// Create occurrences from the lists that [`group`] has filled.
    pub(crate) fn new(starts: Vec<u32>, samples: Vec<u32>) -> Self {
        Self { starts, samples }
    }

    /// The starts of the unique ids' samples, as `unique + 1` offsets into [`Self::samples`].
    pub(crate) fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// The samples, ordered by unique id.
    pub(crate) fn samples(&self) -> &[u32] {
        &self.samples
    }

    /// Return the starts and the samples, so that their memory can be reused.
    pub(crate) fn into_parts(self) -> [Vec<u32>; 2] {
        [self.starts, self.samples]
    }

    /// Create occurrences from the unique id and the sample of each occurrence, in batch order.
    pub(crate) fn group(unique: usize, inverse: &[u32], samples: impl Iterator<Item = u32>) -> Self {
        let mut starts = vec![0u32; unique + 1];
        for &id in inverse {
            starts[id as usize + 1] += 1;
        }
        let mut grouped = vec![0; inverse.len()];
        group(0, inverse, samples, &mut starts[1..], 0, &mut grouped);
        Self { starts, samples: grouped }
    }
}

/// Sort `samples` by unique id into `grouped`, with a counting sort that keeps batch order.
///
/// Before the call, `ends[unique - first]` is the number of samples of an id. After the call, it is the end of its
/// samples. The samples of the first id start at `start`.
pub(crate) fn group(
    first: u32,
    uniques: &[u32],
    samples: impl Iterator<Item = u32>,
    ends: &mut [u32],
    start: u32,
    grouped: &mut [u32],
) {
    let mut next = start;
    for end in &mut *ends {
        next += std::mem::replace(end, next);
    }
    for (unique, sample) in uniques.iter().zip(samples) {
        let cursor = &mut ends[(unique - first) as usize];
        grouped[*cursor as usize] = sample;
        *cursor += 1;
    }
}
