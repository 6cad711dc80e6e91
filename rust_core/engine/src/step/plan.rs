//! Which slot and table each feature of a batch belongs to; slots that share a table become one request.

use persia_types::id::ShardedIds;
use persia_types::limits::{MAX_IDS_PER_REQUEST, MAX_OCCURRENCES};
use persia_types::schema::{Schema, Slot};

use crate::batch::Batch;
use crate::batch::dedup;
use crate::batch::expand::{Expanded, expand};
use crate::batch::feature::IdFeature;
use crate::error::Error;

/// How one batch is looked up and pushed under one schema.
#[derive(Debug)]
pub struct Plan {
    /// Slot of each feature, in the batch's order.
    slots: Vec<usize>,
    /// Per feature what its slot makes of it; `None` where it serves as it is.
    expanded: Vec<Option<Expanded>>,
    /// Tables the batch needs, in the schema's order.
    tables: Vec<TablePlan>,
}

/// One table's part of a request.
#[derive(Debug)]
pub(crate) struct TablePlan {
    /// Index into the schema's tables.
    pub(crate) table: usize,
    /// The features that share it, in the order of their slots.
    pub(crate) members: Vec<Member>,
    /// Their ids merged; `None` where the one feature's own ids serve.
    merged: Option<ShardedIds>,
}

/// A feature's place in its table's request.
#[derive(Debug)]
pub(crate) struct Member {
    /// Index into the batch's id features.
    pub(crate) feature: usize,
    /// From the feature's unique ids to the table's; `None` where they are the same.
    pub(crate) map: Option<Vec<u32>>,
}

impl Plan {
    /// Match features with slots and merge what shares a table.
    ///
    /// # Errors
    /// [`Error::FeatureMismatch`] with every unknown and missing name, [`Error::TooLarge`] for too many ids,
    /// [`Error::BadFeature`] for per-sample weights where nothing is summed.
    pub fn new(batch: &Batch, schema: &Schema) -> Result<Self, Error> {
        let slots = match_slots(batch.id_features(), schema)?;
        let pairs = batch.id_features().iter().zip(&slots);
        let expanded =
            pairs.map(|(feature, slot)| expand(feature, &schema.slots[*slot])).collect::<Result<_, _>>()?;
        let all: Vec<usize> = (0..slots.len()).collect();
        let mut plan = Self { slots, expanded, tables: Vec::new() };
        plan.tables = plan.tables_of(batch, schema, &all)?;
        Ok(plan)
    }

    /// Slot (index into the schema's) of each feature, in the batch's order.
    pub fn slots(&self) -> &[usize] {
        &self.slots
    }

    /// A feature of the batch as its slot wants it looked up.
    pub(crate) fn feature<'a>(&'a self, batch: &'a Batch, index: usize) -> &'a IdFeature {
        self.expanded[index].as_ref().map_or(&batch.id_features()[index], |expanded| &expanded.feature)
    }

    /// How many ids of a feature were left out, because their samples have more than a raw feature has places.
    pub(crate) fn truncated(&self, feature: usize) -> usize {
        self.expanded[feature].as_ref().map_or(0, |expanded| expanded.truncated)
    }

    pub(crate) fn tables(&self) -> &[TablePlan] {
        &self.tables
    }

    /// The tables of some of the features: those that got a gradient.
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
            return Ok(TablePlan { table, members, merged: None });
        }
        let lists: Vec<&ShardedIds> =
            features.iter().map(|feature| self.feature(batch, *feature).unique()).collect();
        let size = lists.iter().map(|list| list.len()).sum();
        if size > MAX_OCCURRENCES {
            let what = format!("unique ids of the slots that share table {table}");
            return Err(Error::TooLarge { what, size, limit: MAX_OCCURRENCES });
        }
        let (merged, maps) = dedup::with(|deduplicator| deduplicator.merge(&lists));
        let members =
            features.iter().zip(maps).map(|(&feature, map)| Member { feature, map: Some(map) }).collect();
        Ok(TablePlan { table, members, merged: Some(merged) })
    }
}

impl TablePlan {
    /// Unique ids to look up or push.
    pub(crate) fn ids<'a>(&'a self, plan: &'a Plan, batch: &'a Batch) -> &'a ShardedIds {
        self.merged.as_ref().unwrap_or_else(|| plan.feature(batch, self.members[0].feature).unique())
    }
}

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
    let missing: Vec<String> = schema
        .slots
        .iter()
        .enumerate()
        .filter(|(index, _)| !slots.contains(&Some(*index)))
        .map(|(_, slot)| name(slot))
        .collect();
    if unknown.is_empty() && missing.is_empty() {
        return Ok(slots.into_iter().flatten().collect());
    }
    Err(Error::FeatureMismatch { unknown, missing, known: schema.slots.iter().map(name).collect() })
}

#[cfg(test)]
mod tests {
    use persia_types::schema::Table;

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

    #[test]
    fn unknown_and_missing_features_are_named_at_once() {
        let batch = batch(&[("x", &[1]), ("b", &[1]), ("y", &[1])]);
        let error = Plan::new(&batch, &schema()).unwrap_err();
        let Error::FeatureMismatch { unknown, missing, known } = &error else { panic!("{error}") };
        assert_eq!(unknown, &["x", "y"]);
        assert_eq!(missing, &["a", "c"]);
        assert_eq!(known, &["a", "b", "c"]);
        for name in ["x", "y", "a", "c"] {
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn slots_of_one_table_share_a_request_whatever_the_batch_order() {
        let (a, b, c) = (&[1u64, 2, 3][..], &[9u64, 9, 9][..], &[3u64, 4, 1][..]);
        let first = batch(&[("a", a), ("b", b), ("c", c)]);
        let second = batch(&[("c", c), ("b", b), ("a", a)]);
        let ids = |batch: &Batch| -> Vec<(usize, ShardedIds)> {
            let plan = Plan::new(batch, &schema()).unwrap();
            plan.tables().iter().map(|table| (table.table, table.ids(&plan, batch).clone())).collect()
        };
        assert_eq!(ids(&first), ids(&second));
        let plan = Plan::new(&second, &schema()).unwrap();
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
}
