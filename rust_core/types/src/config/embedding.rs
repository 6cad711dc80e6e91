//! `embedding_config.yml`: slots, and the feature groups that share a table.

use serde::Serialize;

use super::Parsed;
use super::error::ConfigErrors;
use super::groups::{GroupReader, SlotEntry};
use super::reader::{Reader, Section, join};
use super::settings::read_settings;
use super::tree::Node;
use crate::limits::{MAX_DIM, MAX_HASH_STACK_ROUNDS, MAX_SAMPLE_FIXED_SIZE, MAX_SLOTS};
use crate::schema::{HashStack, Pooling, Schema};

/// The default number of id bits that PersiaML uses for the feature group.
const DEFAULT_PREFIX_BITS: u64 = 8;
/// The maximum number of prefix bits. At least one bit must be left for the id.
const MAX_PREFIX_BITS: u64 = 63;
/// PersiaML's default.
const DEFAULT_SAMPLE_FIXED_SIZE: u32 = 10;

const ROOT_KEYS: &[&str] = &["feature_index_prefix_bit", "slots_config", "feature_groups"];
const SLOT_KEYS: &[&str] = &[
    "dim",
    "sample_fixed_size",
    "embedding_summation",
    "sqrt_scaling",
    "hash_stack_config",
    "index_prefix",
    "pooling",
    "dtype",
    "rounding",
    "optimizer",
    "init",
    "admission",
    "ttl",
];
const POOLINGS: &[(&str, Pooling)] = &[("sum", Pooling::Sum), ("mean", Pooling::Mean)];

/// A valid `embedding_config.yml`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EmbeddingConfig {
    /// The number of bits that PersiaML uses for the index of a table: that of a group, or of a slot without
    /// a group. Persia keeps all bits of an id, and only checks that the number of tables fits.
    pub feature_index_prefix_bit: u32,
    /// The slots, in the order of the file, and their tables.
    pub schema: Schema,
}

impl EmbeddingConfig {
    /// Read and validate the text of `file`.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn parse(text: &str, file: &str) -> Result<Parsed<Self>, ConfigErrors> {
        Reader::read(text, file, read)
    }
}

fn read(reader: &mut Reader, root: &Node) -> EmbeddingConfig {
    let whole = root.is_mapping();
    let root = reader.section(root, "", ROOT_KEYS);
    let given = root.get("feature_index_prefix_bit");
    let found = reader.integer(&root, "feature_index_prefix_bit", 0..=MAX_PREFIX_BITS);
    // An invalid number has been reported, so the number of tables is not compared with it.
    let bits = found.unwrap_or(if given.is_some() { 0 } else { DEFAULT_PREFIX_BITS });
    let slots = if whole { read_slots(reader, &root) } else { Vec::new() };
    let mut groups = GroupReader::new(reader, &slots);
    if let Some(node) = root.get("feature_groups") {
        groups.read(node);
    }
    let schema = groups.finish(bits, given.map(|node| node.place), root.place);
    EmbeddingConfig { feature_index_prefix_bit: bits as u32, schema }
}

fn read_slots<'a>(reader: &mut Reader, root: &Section<'a>) -> Vec<SlotEntry<'a>> {
    let path = "slots_config";
    let example = "name at least one slot, such as `age: {dim: 8}`";
    let Some(node) = root.get(path) else {
        reader.error(root.place, path, format!("missing: {example}"));
        return Vec::new();
    };
    let section = reader.mapping(node, path);
    let slots: Vec<_> = section.entries().map(|(key, node)| (key, join(path, &key.text), node)).collect();
    if node.is_mapping() && slots.is_empty() {
        reader.error(node.place, path, format!("found no slot: {example}"));
    }
    if slots.len() > MAX_SLOTS {
        reader.error(node.place, path, format!("found {} slots, allowed: at most {MAX_SLOTS}", slots.len()));
    }
    slots
        .into_iter()
        .map(|(key, path, node)| {
            reader.check_name(&key.text, key.place, &path);
            read_slot(reader, &key.text, node, &path)
        })
        .collect()
}

fn read_slot<'a>(reader: &mut Reader, name: &'a str, node: &Node, path: &str) -> SlotEntry<'a> {
    let at = |key: &str| format!("{path}.{key}");
    let section = reader.section(node, path, SLOT_KEYS);
    if node.is_mapping() && section.get("dim").is_none() {
        let message = format!("missing, allowed: a whole number from 1 to {MAX_DIM}");
        reader.error(section.place, &at("dim"), message);
    }
    let dim = reader.integer(&section, &at("dim"), 1..=MAX_DIM as u64).map(|dim| dim as usize);
    let pooling = reader.choice(&section, &at("pooling"), POOLINGS).unwrap_or(Pooling::Sum);
    let sqrt_scaling = reader.boolean(&section, &at("sqrt_scaling")).unwrap_or(false);
    if let (Pooling::Mean, Some(node), true) = (pooling, section.get("sqrt_scaling"), sqrt_scaling) {
        let message = "found `true` together with `pooling: mean`; allowed: false, or `pooling: sum`";
        reader.error(node.place, &at("sqrt_scaling"), message.into());
    }
    let sample_fixed_size = read_sample_fixed_size(reader, &section, path);
    if sample_fixed_size.is_some()
        && pooling == Pooling::Mean
        && let Some(node) = section.get("pooling")
    {
        let message = "found `mean` together with `embedding_summation: false`, which pools nothing: remove one of the two";
        reader.error(node.place, &at("pooling"), message.into());
    }
    let hash_stack = read_hash_stack(reader, &section, path);
    reader.without_effect(&section, path, &[("index_prefix", "ids keep all 64 bits")]);
    let settings = read_settings(reader, &section, path);
    SlotEntry { name, dim, pooling, sqrt_scaling, settings, sample_fixed_size, hash_stack }
}

/// The number of positions of a raw feature; None for a pooled feature. The value is checked in both cases.
fn read_sample_fixed_size(reader: &mut Reader, section: &Section<'_>, path: &str) -> Option<u32> {
    let at = |key: &str| format!("{path}.{key}");
    let size = reader.integer(section, &at("sample_fixed_size"), 1..=MAX_SAMPLE_FIXED_SIZE as u64);
    let summed = reader.boolean(section, &at("embedding_summation")).unwrap_or(true);
    (!summed).then_some(size.map_or(DEFAULT_SAMPLE_FIXED_SIZE, |size| size as u32))
}

fn read_hash_stack(reader: &mut Reader, section: &Section<'_>, path: &str) -> Option<HashStack> {
    let path = format!("{path}.hash_stack_config");
    let keys = &["hash_stack_rounds", "embedding_size"];
    let config = reader.child(section, &path, keys);
    let size_path = format!("{path}.embedding_size");
    let rounds =
        reader.integer(&config, &format!("{path}.hash_stack_rounds"), 0..=MAX_HASH_STACK_ROUNDS as u64);
    let buckets = reader.integer(&config, &size_path, 0..=u64::from(u32::MAX));
    let rounds = rounds.filter(|rounds| *rounds > 0)? as u32;
    match buckets {
        Some(buckets) if buckets > 0 => return Some(HashStack { rounds, buckets: buckets as u32 }),
        None if config.get("embedding_size").is_some() => {} // reported already
        _ => {
            let place = config.get("embedding_size").map_or(config.place, |node| node.place);
            let message = format!(
                "`hash_stack_rounds: {rounds}` needs a number of rows; allowed: a whole number from 1 to {}",
                u32::MAX
            );
            reader.error(place, &size_path, message);
        }
    }
    None
}
