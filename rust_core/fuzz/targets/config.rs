//! `embedding_config.yml` and `global_config.yml`. The same text is parsed as both.

use std::collections::HashSet;
use std::fmt::Debug;

use persia_store::{Store, StoreOptions};
use persia_types::config::{ConfigErrors, EmbeddingConfig, GlobalConfig, Parsed};
use persia_types::limits::MAX_DIM;
use persia_types::tables::Run;
use persia_types::{Initializer, Optimizer, Schema};

use super::memory;

/// The memory limit. It does not depend on the length of the text, because aliases repeat nodes and only the number
/// of nodes is bounded.
const MOST_BYTES: usize = 512 << 20;

/// Check that errors have a position, and that Windows line endings change nothing. A store must accept every
/// schema that the parser accepts, and the schema must be unchanged after it is sent to servers.
pub fn check(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let embedding = parsed(text, EmbeddingConfig::parse);
    let global = parsed(text, GlobalConfig::parse);
    if let Some(config) = &embedding {
        check_schema(&config.schema);
    }
    embedding.is_some() || global.is_some()
}

fn parsed<T: PartialEq + Debug>(
    text: &str,
    parse: impl Fn(&str, &str) -> Result<Parsed<T>, ConfigErrors>,
) -> Option<T> {
    let found = memory::within(MOST_BYTES, || parse(text, "file.yml"));
    if !text.contains('\r') {
        let other = parse(&text.replace('\n', "\r\n"), "file.yml");
        let configs = [&found, &other].map(|found| found.as_ref().ok().map(|parsed| &parsed.config));
        assert_eq!(configs[0], configs[1], "with other line endings");
    }
    match found {
        Ok(parsed) => Some(parsed.config),
        Err(errors) => {
            let lines = text.matches(['\n', '\r']).count() + 2;
            assert!(errors.to_string().lines().count() > errors.errors.len());
            for error in &errors.errors {
                assert!((1..=lines).contains(&error.line) && error.column >= 1, "{error}");
                assert!(!error.message.is_empty() && !error.message.contains('\n'), "{error:?}");
            }
            assert!(!errors.errors.is_empty());
            None
        }
    }
}

fn check_schema(schema: &Schema) {
    assert!(!schema.slots.is_empty());
    assert!(schema.slots.iter().all(|slot| slot.table < schema.tables.len()));
    assert!(schema.tables.iter().all(|table| (1..=MAX_DIM).contains(&table.dim)));
    let names: HashSet<&str> = schema.slots.iter().map(|slot| &*slot.name).collect();
    assert_eq!(names.len(), schema.slots.len());
    let sent = serde_json::to_string(schema).expect("a schema is JSON");
    assert_eq!(serde_json::from_str::<Schema>(&sent).expect("the JSON is a schema"), *schema);
    let store = Store::new(schema.clone(), StoreOptions { capacity: 1000, ..StoreOptions::default() });
    store
        .expect("the store accepts it")
        .check_begin(&run(schema.clone()))
        .expect("the store accepts every table's settings");
}

fn run(schema: Schema) -> Run {
    Run {
        job: "job".into(),
        generation: 1,
        schema,
        seed: 7,
        optimizer: Some(Optimizer::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.0 }),
        initializer: Initializer::Zero,
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: true,
        continues: 0,
        world_size: 1,
        reproducible: false,
    }
}

/// Inputs that the target accepts.
pub fn seeds() -> Vec<Vec<u8>> {
    let texts = [
        "slots_config:\n  age: {dim: 8}\n",
        "feature_index_prefix_bit: 8\nslots_config:\n  age: &small\n    dim: 8\n    pooling: mean\n    dtype: f16\n  \
         job: *small\n  'city':\n    dim: 0x10\n    sqrt_scaling: true\nfeature_groups:\n  g: [age, job]\n",
        "slots_config:\n  clicks:\n    dim: 4\n    embedding_summation: false\n    sample_fixed_size: 20\n    \
         index_prefix: 3\n  user:\n    dim: 1_6\n    hash_stack_config:\n      hash_stack_rounds: 2\n      \
         embedding_size: 1e3\n",
        "slots_config:\n  age:\n    dim: 8\n    optimizer: {name: adam, betas: [0.5, 0], lr: 1e-3}\n    init: {name: normal, std: 0.1}\n    \
         admission: {min_count: 2, probability: .5}\n    ttl: 100\n    dtype: bf16\n    rounding: stochastic\n",
        "common_config:\n  job_type: Train\n  metrics_config: {enable_metrics: true, job_name: a-job, \
         push_interval_sec: 10}\n  checkpointing_config: {num_workers: 4}\n  infer_config:\n    servers: [a, b]\n    \
         embedding_checkpoint: x\nembedding_worker_config:\n  wire_dtype: bf16\n  forward_buffer_size: 1000\n\
         embedding_parameter_server_config:\n  capacity: 1_000_000\n  durability: log\n  log_sync: always\n  \
         num_hashmap_internal_shards: 1\n",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}
