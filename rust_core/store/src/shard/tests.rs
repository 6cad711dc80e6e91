//! Eviction, expiry and admission by count.

use persia_types::Dtype;
use proptest::prelude::*;

use super::*;

const PLAIN: Layout = Layout { dim: 1, dtype: Dtype::F32, state_len: 0, ttl: None };

fn ids(shard: &Shard, table: usize) -> Vec<u64> {
    let mut ids: Vec<u64> = shard.tables[table].entries().map(|(_, id, _)| id).collect();
    ids.sort_unstable();
    ids
}

fn insert(shard: &mut Shard, table: usize, id: u64, step: u32) -> EvictionCounts {
    shard.insert(table, id, step, |row| row.fill(id as f32)).unwrap().1
}

fn has_count(shard: &Shard, table: usize, id: u64) -> bool {
    shard.would_count(table, id) > 1
}

#[test]
fn rows_leave_by_recency_then_table_then_id() {
    let mut shard = Shard::new(&[PLAIN, PLAIN], 5);
    for (table, id, step) in [(1, 7, 2), (0, 9, 2), (0, 3, 2), (1, 1, 1), (0, 4, 3)] {
        assert_eq!(insert(&mut shard, table, id, step), EvictionCounts::default());
    }
    for (id, left_0, left_1) in [
        (100, &[3, 4, 9, 100][..], &[7][..]),
        (101, &[4, 9, 100, 101], &[7]),
        (102, &[4, 100, 101, 102], &[7]),
    ] {
        assert_eq!(insert(&mut shard, 0, id, 9), EvictionCounts { evicted: 1, expired: 0 });
        assert_eq!((ids(&shard, 0), ids(&shard, 1)), (left_0.to_vec(), left_1.to_vec()));
    }
}

#[test]
fn one_in_sixteen_rows_leaves_and_the_others_are_unchanged() {
    let mut shard = Shard::new(&[Layout { dim: 2, state_len: 1, ..PLAIN }], 160);
    for id in 0..160 {
        insert(&mut shard, 0, id, 1 + id as u32);
    }
    assert_eq!(insert(&mut shard, 0, 1000, 500).evicted, 10);
    let table = &shard.tables[0];
    assert!((0..10).all(|id| table.find::<Portable>(id) == NO_ROW));
    assert!((10..160).chain([1000]).all(|id| table.row(table.find::<Portable>(id)) == [id as f32; 3]));
}

#[test]
fn fitting_the_budget_keeps_the_newest() {
    let mut shard = Shard::new(&[PLAIN], 3);
    for id in 0..10 {
        shard.load(0, id, 1 + id as u32, |row| row.fill(0.0)).unwrap();
    }
    shard.fit_budget();
    assert_eq!(ids(&shard, 0), [7, 8, 9]);
}

/// Ten rows of each table, last used at steps 1 to 10. The rows of the first table never expire.
fn aged() -> Shard {
    let mut shard = Shard::new(&[PLAIN, Layout { ttl: Some(5), ..PLAIN }], 20);
    for id in 0..10 {
        insert(&mut shard, 0, id, 1 + id as u32);
        insert(&mut shard, 1, id, 1 + id as u32);
    }
    shard
}

#[test]
fn a_sweep_removes_expired_rows_and_no_others() {
    let mut shard = aged();
    assert_eq!(shard.sweep(6), 0);
    assert_eq!(shard.sweep(8), 2);
    assert_eq!((ids(&shard, 0).len(), ids(&shard, 1)), (10, (2..10).collect()));
    assert_eq!(shard.sweep(3), 0, "an older step expires nothing");
    assert_eq!(shard.sweep(u32::MAX), 8);
    assert_eq!(shard.rows, 10);
}

#[test]
fn expired_rows_leave_before_rows_that_do_not_expire() {
    // The rows of the first table are equally old, but are kept.
    let mut shard = aged();
    assert_eq!(insert(&mut shard, 0, 100, 9), EvictionCounts { evicted: 0, expired: 3 });
    assert_eq!((ids(&shard, 0).len(), ids(&shard, 1)), (11, (3..10).collect()));
    // No row is expired, so the least recently used one is evicted.
    let mut shard = aged();
    assert_eq!(insert(&mut shard, 0, 100, 6), EvictionCounts { evicted: 1, expired: 0 });
    assert_eq!(ids(&shard, 0)[0], 1);
}

#[test]
fn an_id_is_admitted_at_its_min_count_and_counted_again_once_its_row_left() {
    let mut shard = Shard::new(&[PLAIN, PLAIN], 20);
    assert!(shard.count(0, 7, 1).unwrap() && !has_count(&shard, 0, 7));
    for expected in [false, false, true, true] {
        assert_eq!(shard.count(0, 7, 3).unwrap(), expected);
        assert!(!shard.count(1, 7, 9).unwrap(), "another table's id 7 is another");
    }
    insert(&mut shard, 0, 7, 1);
    assert!(!has_count(&shard, 0, 7) && has_count(&shard, 1, 7));
    shard.remove_expired(0, 7);
    assert!(!shard.count(0, 7, 3).unwrap());
}

/// The maximum number of counted ids in a small shard.
const LIMIT: usize = *COUNTED_IDS_PER_SHARD.start();

#[test]
fn at_the_limit_counts_are_halved_and_those_of_1_forgotten() {
    let mut shard = Shard::new(&[PLAIN, PLAIN], 4);
    for id in 0..LIMIT as u64 {
        for _ in 0..=id % 4 {
            shard.count(id as usize % 2, id, 100).unwrap();
        }
    }
    assert_eq!(shard.tables.iter().map(|table| table.admission_counts.len()).sum::<usize>(), LIMIT);
    shard.count(0, 1 << 40, 100).unwrap();
    for id in 0..LIMIT as u64 {
        let count = shard.tables[id as usize % 2].admission_counts.find::<Portable>(id, hash_id(id));
        let halved = (id as u32 % 4).div_ceil(2);
        assert_eq!(count, if halved == 0 { NO_ROW } else { halved }, "id {id}");
    }
    assert_eq!(shard.tables[0].admission_counts.find::<Portable>(1 << 40, hash_id(1 << 40)), 1);
}

proptest! {
    /// Compares the counts with a plain map, with more ids than a shard counts.
    #[test]
    fn counting_is_as_documented(seed in any::<u64>(), min_count in 1u32..5) {
        let mut shard = Shard::new(&[PLAIN], 1);
        let mut model = std::collections::BTreeMap::<u64, u32>::new();
        let mut random = seed | 1;
        for _ in 0..6 * LIMIT {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            // Half of the pushes contain one of 128 ids, the others one of 4,096 ids.
            let id = if random >> 63 == 1 { random >> 40 & 0x7F } else { random >> 40 & 0xFFF };
            let admitted = shard.count(0, id, min_count).unwrap();
            if min_count > 1 {
                if !model.contains_key(&id) {
                    while model.len() >= LIMIT {
                        model = model.into_iter().map(|(id, n)| (id, n / 2)).filter(|(_, n)| *n > 0).collect();
                    }
                }
                let count = model.entry(id).or_default();
                *count = (*count + 1).min(min_count);
                prop_assert_eq!(admitted, *count == min_count);
            } else {
                prop_assert!(admitted);
            }
        }
        let counts: std::collections::BTreeMap<u64, u32> = shard.tables[0].admission_counts.entries().collect();
        prop_assert_eq!(counts, model);
    }
}
