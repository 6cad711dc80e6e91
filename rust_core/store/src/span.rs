//! How a request is cut into work: neighbouring shards are locked together, so that even a request of few ids per
//! shard has many cache misses in flight at once.

use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};
use persia_types::ShardedIds;

use crate::shard::Shard;

/// Ids whose cache misses are in flight together, and the fewest for which shards are locked, while there are
/// any. Buckets, metadata and rows of that many ids stay in a core's own caches from prefetch to use.
pub(crate) const BLOCK: usize = 256;

/// Ids of one table in one locked shard, at most [`BLOCK`].
pub(crate) struct Piece {
    /// Index into the locked shards.
    pub(crate) shard: usize,
    /// Index into the request's tables.
    pub(crate) part: usize,
    /// Index into the schema's tables.
    pub(crate) table: usize,
    /// Positions of the ids in their part of the request.
    pub(crate) range: Range<usize>,
}

/// Call `work` with runs of neighbouring shards, locked, and the pieces of `parts` that fall into them, until
/// every id was covered once. `parts` are `(table, ids)`.
///
/// Locks are taken in ascending order by every caller, so two requests cannot wait for each other; a shard
/// without ids is not locked.
pub(crate) fn for_each_span<E>(
    shards: &[Mutex<Shard>],
    parts: &[(usize, &ShardedIds)],
    mut work: impl FnMut(&mut [MutexGuard<'_, Shard>], &[Piece]) -> Result<(), E>,
) -> Result<(), E> {
    let mut locked: Vec<MutexGuard<'_, Shard>> = Vec::new();
    let mut pieces = Vec::new();
    let mut ids = 0;
    for (number, shard) in shards.iter().enumerate() {
        let before = pieces.len();
        for (part, (table, part_ids)) in parts.iter().enumerate() {
            let range = part_ids.range(number);
            ids += range.len();
            let cuts = range.clone().step_by(BLOCK);
            pieces.extend(cuts.map(|start| {
                let range = start..range.end.min(start + BLOCK);
                Piece { shard: locked.len(), part, table: *table, range }
            }));
        }
        if pieces.len() > before {
            locked.push(shard.lock());
        }
        if ids >= BLOCK || (number + 1 == shards.len() && ids > 0) {
            work(&mut locked, &pieces)?;
            locked.clear();
            pieces.clear();
            ids = 0;
        }
    }
    Ok(())
}

/// Cut pieces into runs of at most [`BLOCK`] ids.
pub(crate) fn blocks(pieces: &[Piece]) -> impl Iterator<Item = &[Piece]> {
    let mut rest = pieces;
    std::iter::from_fn(move || {
        let mut ids = 0;
        let fits = |piece: &&Piece| {
            ids += piece.range.len();
            ids <= BLOCK
        };
        let (block, after) = rest.split_at(rest.iter().take_while(fits).count());
        rest = after;
        (!block.is_empty()).then_some(block)
    })
}

#[cfg(test)]
mod tests {
    use persia_types::VIRTUAL_SHARDS;

    use super::*;

    fn check(parts: &[Vec<u64>]) {
        let shards: Vec<Mutex<Shard>> = (0..VIRTUAL_SHARDS).map(|_| Mutex::new(Shard::new(&[], 1))).collect();
        let grouped: Vec<ShardedIds> = parts.iter().map(|ids| ShardedIds::group(ids).unwrap()).collect();
        let parts: Vec<(usize, &ShardedIds)> =
            grouped.iter().enumerate().map(|(i, ids)| (10 + i, ids)).collect();
        let mut covered: Vec<Vec<u32>> = grouped.iter().map(|ids| vec![0; ids.len()]).collect();
        for_each_span(&shards, &parts, |locked, pieces| {
            let mut in_blocks = 0;
            for block in blocks(pieces) {
                assert!(block.iter().map(|piece| piece.range.len()).sum::<usize>() <= BLOCK);
                in_blocks += block.len();
            }
            assert_eq!(in_blocks, pieces.len());
            for piece in pieces {
                assert!(piece.shard < locked.len() && piece.table == 10 + piece.part);
                piece.range.clone().for_each(|at| covered[piece.part][at] += 1);
            }
            Ok::<(), ()>(())
        })
        .unwrap();
        assert!(covered.iter().flatten().all(|times| *times == 1));
        assert!(shards.iter().all(|shard| shard.try_lock().is_some()));
    }

    #[test]
    fn every_id_is_covered_once() {
        check(&[]);
        check(&[vec![]]);
        check(&[vec![7], vec![], (0..3_000).collect()]);
        check(&[(0..200_000).collect(), vec![1; 5_000]]);
    }
}
