//! The plan of a batch's look-up and push: the slot and table of each feature, and where its rows are pooled.
//!
//! Slots that share a table become one request. All decisions are made in this module, once for both look-up and push.

use std::sync::Arc;

use persia_kernels::Bags;
use persia_types::id::ShardedIds;
use persia_types::limits::{MAX_IDS_PER_REQUEST, MAX_OCCURRENCES};
use persia_types::schema::{Schema, Slot};
use persia_types::tables::{PerSample, TableIds};

use crate::batch::Batch;
use crate::batch::dedup;
use crate::batch::expand::{Expanded, expand};
use crate::batch::feature::IdFeature;
use crate::buffer::{Buffer, BufferPool};
use crate::error::Error;

/// The look-up and push of one batch under one schema.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The slot of each feature, in the batch's order.
    slots: Vec<usize>,
    /// For each feature, its expansion; None if it is looked up unchanged.
    expanded: Vec<Option<Expanded>>,
    /// For each feature, the divisors of its samples' sums; None means 1.
    divisors: Vec<Option<Buffer>>,
    /// The tables that the batch needs, in schema order.
    tables: Vec<TablePlan>,
}

/// The part of a request that concerns one table.
#[derive(Debug)]
pub(crate) struct TablePlan {
    /// The index into the schema's tables.
    pub(crate) table: usize,
    /// The features that share the table, in the order of their slots.
    pub(crate) members: Vec<Member>,
    /// The merged ids of the members; None if there is only one member.
    merged: Option<ShardedIds>,
    answer: Answer,
}

/// The kind of vectors that a table's look-up returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The rows of unique ids, which the rank pools.
    Rows,
    /// For each sample, the row of its only id. A device takes rows of unique ids instead.
    Gathered,
    /// The vectors of samples, which the [tables](persia_types::Tables::pools) have pooled, as a middleware
    /// does.
    Pooled,
}

/// The position of a feature in the request of its table.
#[derive(Debug)]
pub(crate) struct Member {
    /// The index into the batch's id features.
    pub(crate) feature: usize,
    /// Maps the feature's unique ids to those of the table; None if they are the same.
    pub(crate) map: Option<Vec<u32>>,
}

/// Returns whether the tables pool samples with these bags, for the given dimension and number of ids. See
/// [`persia_types::Tables::pools`].
pub(super) type Pools<'a> = &'a dyn Fn(usize, usize, &Bags<'_>) -> bool;

impl Plan {
    /// Match features with slots, merge features that share a table, and decide where rows are pooled.
    ///
    /// # Errors
    /// [`Error::FeatureMismatch`] with all features that have no slot; [`Error::TooLarge`] for too many ids;
    /// [`Error::BadFeature`] for per-sample weights of a feature that is not summed.
    pub(super) fn new(
        batch: &Batch,
        schema: &Schema,
        buffers: &Arc<BufferPool>,
        pools: Pools<'_>,
    ) -> Result<Self, Error> {
        let slots = match_slots(batch.id_features(), schema)?;
        let pairs = batch.id_features().iter().zip(&slots);
        let expanded =
            pairs.map(|(feature, slot)| expand(feature, &schema.slots[*slot])).collect::<Result<_, _>>()?;
        let all: Vec<usize> = (0..slots.len()).collect();
        let mut plan = Self { slots, expanded, divisors: Vec::new(), tables: Vec::new() };
        plan.divisors = all.iter().map(|feature| plan.divide(batch, schema, buffers, *feature)).collect();
        plan.tables = plan.tables_of(batch, schema, &all)?;
        let answers: Vec<Answer> =
            plan.tables.iter().map(|table| plan.answer(batch, schema, table, pools)).collect();
        plan.tables.iter_mut().zip(answers).for_each(|(table, answer)| table.answer = answer);
        Ok(plan)
    }

    fn divide(
        &self,
        batch: &Batch,
        schema: &Schema,
        buffers: &Arc<BufferPool>,
        feature: usize,
    ) -> Option<Buffer> {
        let divisors = schema.slots[self.slots[feature]].divisors(self.feature(batch, feature).offsets())?;
        Some(buffers.collect(divisors))
    }

    /// Decide what a table's look-up returns. A raw feature needs rows, because its samples are positions of the
    /// original samples and it has a mask.
    fn answer(&self, batch: &Batch, schema: &Schema, table: &TablePlan, pools: Pools<'_>) -> Answer {
        let [Member { feature: index, map: None }] = table.members[..] else { return Answer::Rows };
        if schema.slots[self.slots[index]].sample_fixed_size.is_some() {
            return Answer::Rows;
        }
        let feature = self.feature(batch, index);
        if feature.offsets().is_none() && feature.per_sample_weights().is_none() {
            return Answer::Gathered;
        }
        let (dim, ids) = (schema.tables[table.table].dim, feature.unique().len());
        if pools(dim, ids, &self.bags(batch, index)) { Answer::Pooled } else { Answer::Rows }
    }

    /// The slot of each feature, as an index into the schema's slots, in the batch's order.
    pub(crate) fn slots(&self) -> &[usize] {
        &self.slots
    }

    /// A feature of the batch, after its expansion.
    pub(crate) fn feature<'a>(&'a self, batch: &'a Batch, index: usize) -> &'a IdFeature {
        self.expanded[index].as_ref().map_or(&batch.id_features()[index], |expanded| &expanded.feature)
    }

    /// The rows of each sample of a feature, as indices into the feature's unique ids.
    pub(crate) fn bags<'a>(&'a self, batch: &'a Batch, index: usize) -> Bags<'a> {
        let feature = self.feature(batch, index);
        Bags {
            indices: feature.inverse(),
            offsets: feature.offsets(),
            per_sample_weights: feature.per_sample_weights(),
            divisors: self.divisors[index].as_ref().map(AsRef::as_ref),
        }
    }

    /// The factor of each sample's gradient, which is the reciprocal of its divisor; None means 1.
    pub(crate) fn factors(&self, feature: usize, buffers: &Arc<BufferPool>) -> Option<Buffer> {
        let divisors: &[f32] = self.divisors[feature].as_ref()?.as_ref();
        Some(buffers.collect(divisors.iter().map(|divisor| 1.0 / divisor)))
    }

    /// The number of ids of a raw feature that were truncated because their samples have more ids than positions.
    pub(crate) fn truncated(&self, feature: usize) -> usize {
        self.expanded[feature].as_ref().map_or(0, |expanded| expanded.truncated)
    }

    pub(crate) fn tables(&self) -> &[TablePlan] {
        &self.tables
    }

    /// The tables of these features. A look-up of the result always returns rows of unique ids, because this
    /// function does not decide where rows are pooled.
    pub(crate) fn tables_of(
        &self,
        batch: &Batch,
        schema: &Schema,
        features: &[usize],
    ) -> Result<Vec<TablePlan>, Error> {
        let slot = |feature: usize| &schema.slots[self.slots[feature]];
        let mut ordered = features.to_vec();
        ordered.sort_by_key(|feature| (slot(*feature).table, self.slots[*feature]));
        let tables: Vec<TablePlan> = ordered
            .chunk_by(|a, b| slot(*a).table == slot(*b).table)
            .map(|members| self.plan_table(batch, slot(members[0]).table, members))
            .collect::<Result<_, _>>()?;
        let ids: usize = tables.iter().map(|table| table.ids(self, batch).len()).sum();
        if ids > MAX_IDS_PER_REQUEST {
            return Err(Error::TooLarge {
                what: "unique ids of the batch".into(),
                size: ids,
                limit: MAX_IDS_PER_REQUEST,
            });
        }
        Ok(tables)
    }

    fn plan_table(&self, batch: &Batch, table: usize, features: &[usize]) -> Result<TablePlan, Error> {
        if let [feature] = *features {
            let members = vec![Member { feature, map: None }];
            return Ok(TablePlan { table, members, merged: None, answer: Answer::Rows });
        }
        let lists: Vec<&ShardedIds> =
            features.iter().map(|feature| self.feature(batch, *feature).unique()).collect();
        let size = lists.iter().map(|list| list.len()).sum();
        if size > MAX_OCCURRENCES {
            let name = self.feature(batch, features[0]).name();
            let what = format!("unique ids of the slots that share a table with {name:?}");
            return Err(Error::TooLarge { what, size, limit: MAX_OCCURRENCES });
        }
        let (merged, maps) = dedup::with(|deduplicator| deduplicator.merge(&lists));
        let members =
            features.iter().zip(maps).map(|(&feature, map)| Member { feature, map: Some(map) }).collect();
        Ok(TablePlan { table, members, merged: Some(merged), answer: Answer::Rows })
    }
}

impl TablePlan {
    /// The unique ids to look up or push.
    pub(crate) fn ids<'a>(&'a self, plan: &'a Plan, batch: &'a Batch) -> &'a ShardedIds {
        self.merged.as_ref().unwrap_or_else(|| plan.feature(batch, self.members[0].feature).unique())
    }

    /// The request of a look-up for rows or, with `per_sample`, for vectors of samples.
    pub(crate) fn request<'a>(
        &'a self,
        plan: &'a Plan,
        batch: &'a Batch,
        per_sample: Option<PerSample<'a>>,
    ) -> TableIds<'a> {
        TableIds { table: self.table, ids: self.ids(plan, batch), per_sample }
    }

    /// Whether the tables pool the samples. The gradients from a device are then those of samples.
    pub(crate) fn is_pooled(&self) -> bool {
        self.answer == Answer::Pooled
    }

    /// The samples whose vectors the look-up returns; None if it returns rows of unique ids.
    pub(crate) fn per_sample<'a>(&self, plan: &'a Plan, batch: &'a Batch) -> Option<PerSample<'a>> {
        match self.answer {
            Answer::Rows => None,
            Answer::Gathered => Some(PerSample::Gathered(plan.feature(batch, self.members[0].feature).csr())),
            Answer::Pooled => self.pooled(plan, batch),
        }
    }

    /// Like [`Self::per_sample`] for a device, which gathers rows itself: the samples that the tables pool.
    pub(crate) fn pooled<'a>(&self, plan: &'a Plan, batch: &'a Batch) -> Option<PerSample<'a>> {
        self.is_pooled().then(|| PerSample::Pooled(plan.bags(batch, self.members[0].feature)))
    }
}

/// Find the slot of each feature. A batch need not have features for all slots.
fn match_slots(features: &[IdFeature], schema: &Schema) -> Result<Vec<usize>, Error> {
    let slots: Vec<Option<usize>> =
        features.iter().map(|feature| schema.slot(feature.name()).map(|(index, _)| index)).collect();
    let name = |slot: &Slot| slot.name.clone();
    let unknown: Vec<String> = features
        .iter()
        .zip(&slots)
        .filter(|(_, slot)| slot.is_none())
        .map(|(feature, _)| feature.name().to_owned())
        .collect();
    if unknown.is_empty() {
        return Ok(slots.into_iter().flatten().collect());
    }
    let missing: Vec<String> = schema
        .slots
        .iter()
        .enumerate()
        .filter(|(index, _)| !slots.contains(&Some(*index)))
        .map(|(_, slot)| name(slot))
        .collect();
    Err(Error::FeatureMismatch { unknown, missing, known: schema.slots.iter().map(name).collect() })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use persia_types::schema::{Pooling, Table};

    use super::*;
    use crate::batch::BatchParts;

    fn schema() -> Schema {
        let slot = |name: &str, table| Slot { name: name.into(), table, ..Slot::default() };
        Schema {
            slots: vec![slot("a", 0), slot("b", 1), slot("c", 0)],
            tables: vec![Table::new("ac", 2), Table::new("b", 3)],
        }
    }

    fn batch(features: &[(&str, &[u64])]) -> Batch {
        let id_features = features.iter().map(|(name, ids)| IdFeature::single(*name, ids).unwrap()).collect();
        Batch::new(BatchParts { id_features, ..Default::default() }).unwrap()
    }

    fn plan(batch: &Batch) -> Result<Plan, Error> {
        Plan::new(batch, &schema(), &BufferPool::new(0), &|_, _, _| false)
    }

    #[test]
    fn unknown_and_missing_features_are_named_at_once() {
        let batch = batch(&[("x", &[1]), ("b", &[1]), ("y", &[1])]);
        let error = plan(&batch).unwrap_err();
        let Error::FeatureMismatch { unknown, missing, known } = &error else { panic!("{error}") };
        assert_eq!(unknown, &["x", "y"]);
        assert_eq!(missing, &["a", "c"]);
        assert_eq!(known, &["a", "b", "c"]);
        for name in ["x", "y", "a", "c"] {
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn a_batch_may_have_some_of_the_slots() {
        let batch = batch(&[("c", &[7, 7]), ("b", &[1, 2])]);
        let plan = plan(&batch).unwrap();
        assert_eq!(plan.slots(), [2, 1]);
        assert_eq!(plan.tables().iter().map(|table| table.table).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn slots_of_one_table_share_a_request_whatever_the_batch_order() {
        let (a, b, c) = (&[1u64, 2, 3][..], &[9u64, 9, 9][..], &[3u64, 4, 1][..]);
        let first = batch(&[("a", a), ("b", b), ("c", c)]);
        let second = batch(&[("c", c), ("b", b), ("a", a)]);
        let ids = |batch: &Batch| -> Vec<(usize, ShardedIds)> {
            let plan = plan(batch).unwrap();
            plan.tables().iter().map(|table| (table.table, table.ids(&plan, batch).clone())).collect()
        };
        assert_eq!(ids(&first), ids(&second));
        let plan = plan(&second).unwrap();
        assert_eq!(plan.slots(), [2, 1, 0]);
        assert_eq!(plan.tables().len(), 2);
        assert_eq!(plan.tables()[0].ids(&plan, &second).len(), 4);
        for member in &plan.tables()[0].members {
            let own = second.id_features()[member.feature].unique().ids();
            let map = member.map.as_ref().unwrap();
            let mapped: Vec<u64> =
                map.iter().map(|place| plan.tables()[0].ids(&plan, &second).ids()[*place as usize]).collect();
            assert_eq!(own, mapped);
        }
    }

    #[test]
    fn who_pools_is_decided_once_and_divisors_are_carried() {
        let slot = |name: &str, table| Slot { name: name.into(), table, ..Slot::default() };
        let mean = Slot { pooling: Pooling::Mean, ..slot("mean", 0) };
        let raw = Slot { sample_fixed_size: Some(2), ..slot("raw", 2) };
        let tables = ["mean", "one", "raw", "shared"].map(|name| Table::new(name, 4)).into();
        let slots = vec![mean, slot("one", 1), raw, slot("left", 3), slot("right", 3)];
        let schema = Schema { slots, tables };
        let lists = |name: &str| IdFeature::lists(name, &[5, 6, 6], &[0, 2, 3]).unwrap();
        let mut id_features: Vec<IdFeature> = ["mean", "raw", "left", "right"].map(lists).into();
        id_features.insert(1, IdFeature::single("one", &[5, 6]).unwrap());
        let batch = Batch::new(BatchParts { id_features, ..Default::default() }).unwrap();
        let (buffers, asked) = (BufferPool::new(8), RefCell::new(Vec::new()));
        let pools = |dim: usize, ids: usize, bags: &Bags<'_>| {
            asked.borrow_mut().push((dim, ids, bags.divisors.map(<[f32]>::to_vec)));
            true
        };
        let plan = Plan::new(&batch, &schema, &buffers, &pools).unwrap();
        assert_eq!(*asked.borrow(), [(4, 2, Some(vec![2.0, 1.0]))], "only the mean may be pooled elsewhere");
        let answers: Vec<Answer> = plan.tables().iter().map(|table| table.answer).collect();
        assert_eq!(answers, [Answer::Pooled, Answer::Gathered, Answer::Rows, Answer::Rows]);
        assert_eq!(plan.factors(0, &buffers).unwrap().as_ref(), [0.5, 1.0]);
        assert!(plan.factors(1, &buffers).is_none());
        let [mean, one, ..] = plan.tables() else { panic!("four tables") };
        assert!(matches!(mean.pooled(&plan, &batch), Some(PerSample::Pooled(_))));
        assert!(matches!(one.per_sample(&plan, &batch), Some(PerSample::Gathered(_))));
        assert!(one.pooled(&plan, &batch).is_none(), "a device gathers rows itself");
    }
}
