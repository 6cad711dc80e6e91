//! Tests of `global_config.yml`.

use super::said;
use crate::config::{GlobalConfig, InferConfig, LogSync};
use crate::schema::Dtype;

/// All keys that PersiaML documents, at or near their defaults.
const REAL: &str = "
common_config:
  metrics_config:
    enable_metrics: false
    push_interval_sec: 10
    job_name: adult-income
  job_type: Train
  infer_config:
    servers: []
    embedding_checkpoint: ''
  checkpointing_config:
    num_workers: 8
embedding_worker_config:
  forward_buffer_size: 1000
  buffered_data_expired_sec: 1000
embedding_parameter_server_config:
  capacity: 1_000_000
  num_hashmap_internal_shards: 100
  enable_incremental_update: false
  incremental_buffer_size: 1000000
  incremental_dir: /workspace/incremental_dir/
  incremental_channel_capacity: 1000
";

fn parse(text: &str) -> Vec<String> {
    said(GlobalConfig::parse(text, "global_config.yml"))
}

#[test]
fn a_real_file_is_read_with_one_warning_for_each_key_without_effect() {
    let parsed = GlobalConfig::parse(REAL, "global_config.yml").unwrap();
    assert_eq!(
        parsed.config,
        GlobalConfig {
            enable_metrics: false,
            job_name: "adult-income".into(),
            checkpoint_workers: 8,
            capacity: 1_000_000,
            log: None,
            max_copy_bytes: None,
            request_threads: None,
            infer: None,
            wire_dtype: Dtype::F32,
        }
    );
    let paths: Vec<_> = parsed.warnings.iter().map(|warning| warning.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "common_config.metrics_config.push_interval_sec",
            "common_config.job_type",
            "common_config.infer_config.servers",
            "common_config.infer_config.embedding_checkpoint",
            "embedding_worker_config.forward_buffer_size",
            "embedding_worker_config.buffered_data_expired_sec",
            "embedding_parameter_server_config.num_hashmap_internal_shards",
            "embedding_parameter_server_config.incremental_buffer_size",
            "embedding_parameter_server_config.incremental_dir",
            "embedding_parameter_server_config.incremental_channel_capacity",
        ]
    );
    assert!(
        parsed.warnings.iter().all(|warning| warning.message.starts_with("accepted, but has no effect: "))
    );
}

#[test]
fn keys_of_other_versions_and_unknown_keys_are_warnings() {
    let text = "
common_config: {metrics_config: {push_interval_seconds: 10}}
embedding_worker_config: {forward_bufer_size: 1}
embedding_parameter_server_config: {full_amount_manager_buffer_size: 1000}
embedding_server_config: {}
mine: {a: 1}
";
    let parsed = GlobalConfig::parse(text, "f").unwrap();
    assert_eq!(parsed.config, GlobalConfig::default());
    let warnings: Vec<String> = parsed.warnings.iter().map(ToString::to_string).collect();
    let no_push = "accepted, but has no effect: metrics are not pushed: Prometheus scrapes servers \
                   and middlewares";
    assert_eq!(
        warnings,
        [
            format!("line 2, column 57: common_config.metrics_config.push_interval_seconds: {no_push}"),
            "line 3, column 27: embedding_worker_config.forward_bufer_size: unknown key without effect, did you \
             mean `forward_buffer_size`?"
                .into(),
            "line 4, column 70: embedding_parameter_server_config.full_amount_manager_buffer_size: accepted, but \
             has no effect: checkpoints are written without this buffer"
                .into(),
            "line 5, column 1: embedding_server_config: unknown key without effect, did you mean \
             `embedding_worker_config`?"
                .into(),
            "line 6, column 1: mine: unknown key without effect".into(),
        ]
    );
}

#[test]
fn absent_keys_have_their_documented_defaults() {
    let expected = GlobalConfig {
        enable_metrics: true,
        job_name: "persia_default_jobname".into(),
        checkpoint_workers: 4,
        capacity: 1_000_000_000,
        log: None,
        max_copy_bytes: None,
        request_threads: None,
        infer: None,
        wire_dtype: Dtype::F32,
    };
    assert_eq!(GlobalConfig::default(), expected);
    for text in ["{}", "common_config:", "common_config: {metrics_config: , checkpointing_config: {}}"] {
        let parsed = GlobalConfig::parse(text, "f").unwrap();
        assert_eq!((parsed.config, parsed.warnings), (expected.clone(), vec![]), "{text}");
    }
}

#[test]
fn rows_may_travel_as_sixteen_bits() {
    let parsed = GlobalConfig::parse("embedding_worker_config: {wire_dtype: bf16}", "f").unwrap();
    assert_eq!((parsed.config.wire_dtype, parsed.warnings), (Dtype::Bf16, vec![]));
    assert_eq!(
        parse("embedding_worker_config: {wire_dtype: fp16}"),
        ["line 1, column 39: embedding_worker_config.wire_dtype: found `fp16`, allowed: f32, f16, bf16"]
    );
}

#[test]
fn what_is_copied_for_a_checkpoint_may_be_bounded() {
    let text = "embedding_parameter_server_config: {max_copy_bytes: 1_000_000}";
    let parsed = GlobalConfig::parse(text, "f").unwrap();
    assert_eq!((parsed.config.max_copy_bytes, parsed.warnings), (Some(1_000_000), vec![]));
    assert!(parse("embedding_parameter_server_config: {max_copy_bytes: 0}")[0].contains("max_copy_bytes"));
}

#[test]
fn the_threads_of_a_request_may_be_chosen() {
    let text = "embedding_parameter_server_config: {request_threads: 8}";
    let parsed = GlobalConfig::parse(text, "f").unwrap();
    assert_eq!((parsed.config.request_threads, parsed.warnings), (Some(8), vec![]));
    for wrong in ["0", "65", "all"] {
        let text = format!("embedding_parameter_server_config: {{request_threads: {wrong}}}");
        assert!(parse(&text)[0].contains("request_threads: found"), "{wrong}");
    }
}

#[test]
fn a_server_may_keep_a_log() {
    let section = "embedding_parameter_server_config";
    for (text, log) in [
        ("{durability: log}", Some(LogSync::EverySecond)),
        ("{durability: log, log_sync: always}", Some(LogSync::Always)),
        ("{durability: checkpoint}", None),
    ] {
        let parsed = GlobalConfig::parse(&format!("{section}: {text}"), "f").unwrap();
        assert_eq!((parsed.config.log, parsed.warnings), (log, vec![]), "{text}");
    }
    let parsed = GlobalConfig::parse(&format!("{section}: {{log_sync: always}}"), "f").unwrap();
    assert_eq!((parsed.config.log, parsed.warnings.len()), (None, 1));
    assert_eq!(
        parse(&format!("{section}: {{durability: always}}")),
        [format!("line 1, column 49: {section}.durability: found `always`, allowed: checkpoint, log")]
    );
}

#[test]
fn an_infer_job_has_servers_and_a_checkpoint() {
    let infer = "infer_config: {servers: [a:8888, 'b:8888'], embedding_checkpoint: /cache/model/}";
    let parsed = GlobalConfig::parse(&format!("common_config: {{job_type: Infer, {infer}}}"), "f").unwrap();
    let servers = vec!["a:8888".to_owned(), "b:8888".to_owned()];
    let expected = InferConfig { servers, checkpoint: Some("/cache/model/".into()) };
    assert_eq!((parsed.config.infer, parsed.warnings), (Some(expected), vec![]));
    let bare = GlobalConfig::parse("common_config: {job_type: Infer}", "f").unwrap();
    assert_eq!(bare.config.infer, Some(InferConfig::default()));
    // For other jobs, the section has no effect. For an infer job, settings about changes of rows have no effect.
    for job_type in ["Train", "Eval"] {
        let text = format!("common_config: {{job_type: {job_type}, {infer}}}");
        let parsed = GlobalConfig::parse(&text, "f").unwrap();
        let paths: Vec<&str> = parsed.warnings.iter().map(|warning| warning.path.as_str()).collect();
        let of_infer = "common_config.infer_config";
        let unused = [
            "common_config.job_type".to_owned(),
            format!("{of_infer}.servers"),
            format!("{of_infer}.embedding_checkpoint"),
        ];
        assert_eq!((parsed.config.infer, paths), (None, unused.iter().map(String::as_str).collect()));
    }
    let server = "embedding_parameter_server_config: {capacity: 7, durability: log, log_sync: always}";
    let parsed = GlobalConfig::parse(&format!("common_config: {{job_type: Infer}}\n{server}"), "f").unwrap();
    assert_eq!((parsed.config.log, parsed.warnings.len()), (None, 3));
}

#[test]
fn capacity_takes_every_spelling_of_a_number() {
    for text in ["1000000000", "1e9", "1_000_000_000", "1.0e+9"] {
        let parsed =
            GlobalConfig::parse(&format!("embedding_parameter_server_config: {{capacity: {text}}}"), "f");
        assert_eq!(parsed.unwrap().config.capacity, 1_000_000_000, "{text}");
    }
}

#[test]
fn each_mistake_is_named() {
    for (text, expected) in [
        (
            "common_config: {checkpointing_config: {num_workers: 0}}",
            "line 1, column 53: common_config.checkpointing_config.num_workers: found `0`, allowed: a whole number \
             from 1 to 256",
        ),
        (
            "common_config: {job_type: Serve}",
            "line 1, column 27: common_config.job_type: found `Serve`, allowed: Train, Eval, Infer",
        ),
        (
            "common_config: {job_type: Infer, infer_config: {servers: server:8888}}",
            "line 1, column 58: common_config.infer_config.servers: found `server:8888`, allowed: a list of strings",
        ),
        (
            "common_config: {job_type: Infer, infer_config: {servers: [a, ~]}}",
            "line 1, column 62: common_config.infer_config.servers: found nothing in the list, allowed: a string",
        ),
        (
            "common_config: {job_type: Infer, infer_config: {embedding_checkpoint: ''}}",
            "line 1, column 71: common_config.infer_config.embedding_checkpoint: found \"\", allowed: a string",
        ),
        (
            "common_config: {metrics_config: {job_name: }}",
            "line 1, column 42: common_config.metrics_config.job_name: found nothing, allowed: a name",
        ),
        (
            "common_config: {metrics_config: {job_name: [a]}}",
            "line 1, column 44: common_config.metrics_config.job_name: found a list, allowed: a name",
        ),
        (
            "embedding_parameter_server_config: {capacity: lots}",
            "line 1, column 47: embedding_parameter_server_config.capacity: found `lots`, allowed: a whole number \
             from 1 to 1099511627264",
        ),
        (
            "embedding_parameter_server_config: {enable_incremental_update: true}",
            "line 1, column 64: embedding_parameter_server_config.enable_incremental_update: found `true`, allowed: \
             false (not in this version yet: incremental updates)",
        ),
        (
            "embedding_parameter_server_config: {enable_incremental_update: 'false'}",
            "line 1, column 64: embedding_parameter_server_config.enable_incremental_update: found \"false\", \
             allowed: false (not in this version yet: incremental updates)",
        ),
        (
            "common_config: {metrics_config: {enable_metrics: 0}}",
            "line 1, column 50: common_config.metrics_config.enable_metrics: found `0`, allowed: true, false",
        ),
        (
            "embedding_worker_config: 3",
            "line 1, column 26: embedding_worker_config: found `3`, allowed: a mapping (`key: value` lines)",
        ),
    ] {
        assert_eq!(parse(text), [expected], "{text}");
    }
}

#[test]
fn mistakes_of_all_sections_are_reported_at_once() {
    let text = "
common_config:
  job_type: Serve
  metrics_config: {job_name: ''}
  checkpointing_config: {num_workers: 1e9}
embedding_worker_config: []
embedding_parameter_server_config: {capacity: -1, capacity: 1, durability: 3}
metrics_config: {}
";
    let errors = GlobalConfig::parse(text, "global_config.yml").unwrap_err();
    let lines: Vec<usize> = errors.errors.iter().map(|error| error.line).collect();
    assert_eq!(lines, [3, 4, 5, 6, 7, 7, 7], "{errors}");
}
