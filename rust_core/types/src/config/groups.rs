//! Reads feature groups: the slots that share a table.

use std::collections::HashMap;

use super::reader::{Reader, join, nearest};
use super::settings::first_difference;
use super::tree::{Key, Node, Place, Value};
use crate::schema::{HashStack, Pooling, Schema, Slot, Table, TableSettings};

const PATH: &str = "feature_groups";

/// A slot from the file, before a table is assigned to it.
#[derive(Debug)]
pub(super) struct SlotEntry<'a> {
    pub(super) name: &'a str,
    /// None if it is missing from the file or wrong; that error has been recorded.
    pub(super) dim: Option<usize>,
    pub(super) pooling: Pooling,
    pub(super) sqrt_scaling: bool,
    /// None if one of them is wrong; that error has been recorded.
    pub(super) settings: Option<TableSettings>,
    pub(super) sample_fixed_size: Option<u32>,
    pub(super) hash_stack: Option<HashStack>,
}

/// Reads `feature_groups` and assigns the slots, which have been read before.
#[derive(Debug)]
pub(super) struct GroupReader<'a> {
    reader: &'a mut Reader,
    slots: &'a [SlotEntry<'a>],
    by_name: HashMap<&'a str, usize>,
    /// The group of each slot, as an index into `names`.
    group_of: Vec<Option<usize>>,
    names: Vec<(String, Place)>,
}

impl<'a> GroupReader<'a> {
    pub(super) fn new(reader: &'a mut Reader, slots: &'a [SlotEntry<'a>]) -> Self {
        let by_name = slots.iter().enumerate().map(|(index, slot)| (slot.name, index)).collect();
        Self { reader, slots, by_name, group_of: vec![None; slots.len()], names: Vec::new() }
    }

    /// Read every group of the section.
    pub(super) fn read(&mut self, node: &Node) {
        let section = self.reader.mapping(node, PATH);
        for (key, members) in section.entries() {
            self.read_group(key, members);
        }
    }

    fn read_group(&mut self, key: &Key, node: &Node) {
        let path = join(PATH, &key.text);
        self.reader.check_name(&key.text, key.place, &path);
        let group = self.names.len();
        self.names.push((key.text.clone(), key.place));
        let members = match &node.value {
            Value::Sequence(members) if !members.is_empty() => members,
            _ => {
                let message = format!("found {}, allowed: a list of one slot or more", empty_or(node));
                return self.reader.error(node.place, &path, message);
            }
        };
        let mut first: Option<usize> = None;
        for member in members {
            let Some(slot) = self.member(member, &path, group) else { continue };
            let one = *first.get_or_insert(slot);
            self.check_dim(one, slot, member.place, &path);
            self.check_settings(one, slot, member.place, &path);
            self.check_hash_stack(one, slot, member.place, &path);
        }
    }

    /// Assign the slot that `node` names to `group`. Returns the slot. If it does not exist, records an error and
    /// returns None.
    fn member(&mut self, node: &Node, path: &str, group: usize) -> Option<usize> {
        let Value::Scalar { text, .. } = &node.value else {
            let message = format!("found {}, allowed: names of slots", node.found());
            self.reader.error(node.place, path, message);
            return None;
        };
        let Some(&slot) = self.by_name.get(text.as_str()) else {
            let mut message = format!("found {}, which is not a slot of slots_config", node.found());
            if let Some(near) = nearest(text, self.slots.iter().map(|slot| slot.name)) {
                message += &format!(", did you mean `{near}`?");
            }
            self.reader.error(node.place, path, message);
            return None;
        };
        match self.group_of[slot].replace(group) {
            None => {}
            Some(before) if before == group => {
                self.reader.error(node.place, path, format!("names the slot `{text}` twice: remove one"));
            }
            Some(before) => {
                let message = format!(
                    "the slot `{text}` is in the group `{}` already; a slot has one table: remove the slot from one of the two groups",
                    self.names[before].0
                );
                self.reader.error(node.place, path, message);
            }
        }
        Some(slot)
    }

    fn check_dim(&mut self, one: usize, other: usize, place: Place, path: &str) {
        let (one, other) = (&self.slots[one], &self.slots[other]);
        if let (Some(expected), Some(found)) = (one.dim, other.dim)
            && expected != found
        {
            let message = format!(
                "the slot `{}` has dim {found} and `{}` has dim {expected}; slots of one group share a table: \
                 make the dims equal",
                other.name, one.name
            );
            self.reader.error(place, path, message);
        }
    }

    fn check_settings(&mut self, one: usize, other: usize, place: Place, path: &str) {
        let (one, other) = (&self.slots[one], &self.slots[other]);
        if let (Some(expected), Some(found)) = (&one.settings, &other.settings)
            && let Some((key, expected, found)) = first_difference(expected, found)
        {
            let message = format!(
                "the slot `{}` has {key} {found} and `{}` has {key} {expected}; slots of one group share a table: \
                 set both to the same value",
                other.name, one.name
            );
            self.reader.error(place, path, message);
        }
    }

    /// Check that two slots of a group have the same hash stack, or both have none. Buckets are numbered from 0, so
    /// they would share rows with the buckets of another stack, and with plain ids.
    fn check_hash_stack(&mut self, one: usize, other: usize, place: Place, path: &str) {
        let (one, other) = (&self.slots[one], &self.slots[other]);
        if one.hash_stack != other.hash_stack {
            let message = format!(
                "the slots `{}` and `{}` have different values of hash_stack_config; slots of one group share rows: \
                 set both to the same value, or take one slot out of the group",
                other.name, one.name
            );
            self.reader.error(place, path, message);
        }
    }

    /// Build the schema. Tables are in the order of their first slots. `bits` is the number of prefix bits, and
    /// `given` is its position in the file; None if `bits` is the default.
    pub(super) fn finish(mut self, bits: u64, given: Option<Place>, root: Place) -> Schema {
        self.check_names();
        let mut schema = Schema::default();
        let mut table_of_group = vec![None; self.names.len()];
        for (slot, group) in self.slots.iter().zip(&self.group_of) {
            let next = schema.tables.len();
            let table = match group {
                Some(group) => *table_of_group[*group].get_or_insert(next),
                None => next,
            };
            if table == next {
                let name = group.map_or(slot.name, |group| self.names[group].0.as_str());
                schema.tables.push(Table {
                    settings: slot.settings.unwrap_or_default(),
                    ..Table::new(name, slot.dim.unwrap_or_default())
                });
            }
            schema.slots.push(Slot {
                name: slot.name.into(),
                table,
                pooling: slot.pooling,
                sqrt_scaling: slot.sqrt_scaling,
                sample_fixed_size: slot.sample_fixed_size,
                hash_stack: slot.hash_stack,
            });
        }
        self.check_prefix(bits, given, root, schema.tables.len());
        schema
    }

    /// Check the names of groups. A group may have the name of one of its slots, but not the name of a slot
    /// outside all groups.
    fn check_names(&mut self) {
        for (name, place) in &self.names {
            if let Some(&slot) = self.by_name.get(name.as_str())
                && self.group_of[slot].is_none()
            {
                let message = format!(
                    "the slot `{name}`, which is in no group, has a table of this name too: rename the group, \
                     or put the slot into the group"
                );
                self.reader.error(*place, &join(PATH, name), message);
            }
        }
    }

    /// Check the number of tables. PersiaML numbers tables from 1 in the prefix bits, and silently wraps
    /// around if there are more tables than numbers.
    fn check_prefix(&mut self, bits: u64, given: Option<Place>, root: Place, tables: usize) {
        let most = (1u64 << bits) - 1;
        if bits == 0 || tables as u64 <= most {
            return;
        }
        let alone = self.group_of.iter().filter(|group| group.is_none()).count();
        let needed = usize::BITS - tables.leading_zeros();
        let found = if given.is_some() { "found" } else { "missing, the default is" };
        let message = format!(
            "{found} {bits}, but {tables} tables need more prefix bits (groups: {}, slots without a group: {alone}); \
             allowed: {needed} or more, or 0 for no prefix",
            tables - alone
        );
        self.reader.error(given.unwrap_or(root), "feature_index_prefix_bit", message);
    }
}

fn empty_or(node: &Node) -> String {
    match &node.value {
        Value::Sequence(_) => "an empty list".into(),
        _ => node.found(),
    }
}
