"""Mistakes in ``persia.yml``: each with its place, the value that was found and what is allowed."""

from pathlib import Path

import pytest
from config_files import GOOD, KEYS, mistakes

import persia
from persia.errors import ConfigError


@pytest.mark.parametrize(
    ("added", "message"),
    [
        # keys
        ("trian: {}", "8:1: trian: unknown key, did you mean `train`?; allowed: " + KEYS),
        ("zzz: 1", "8:1: zzz: unknown key; allowed: " + KEYS),
        ("serving: {}", "8:1: serving: not in this version yet: remove the block"),
        ("run: {}\nrun: {}", "9:1: run: appears twice, first on line 8: remove one"),
        ("run: {dir: a, dir: b}", "8:15: run.dir: appears twice, first on line 8: remove one"),
        ("run: {}\nrun: {}\nrun: {}", "9:1: run: appears 3 times, on lines 8, 9, 10: keep one"),
        ("run: {dir: a, dir: b, dir: c, dir: d}", "8:15: run.dir: appears 4 times, on line 8: keep one"),
        (
            "run: {nam: x}",
            "8:7: run.nam: unknown key, did you mean `name`?; allowed: dir, name, log_every, tensorboard",
        ),
        ("run:\n  <<: {}", "9:3: run.<<: merge keys are not supported; an alias (`*name`) repeats a whole value"),
        ("train: {accumulate: 0}", "8:21: train.accumulate: found `0`, allowed: a whole number of at least 1"),
        ("precision: fp8", "8:12: precision: found `fp8`, allowed: fp32, bf16, fp16"),
        ("parallel: zero3", "8:11: parallel: found `zero3`, allowed: ddp, fsdp"),
        ("train: {nonfinite: ignore}", "8:20: train.nonfinite: found `ignore`, allowed: raise, skip"),
        (
            "train: {baseline: lightgbm}",
            "8:9: train.baseline: not a key, but an option of the command: persia train FILE --baseline lightgbm",
        ),
        # types
        ("run: 3", "8:6: run: found `3`, allowed: a mapping (`key: value` lines)"),
        ("run: [a]", "8:6: run: found a list, allowed: a mapping (`key: value` lines)"),
        ("run: {tensorboard: yes}", "8:20: run.tensorboard: found `yes`, allowed: true, false"),
        ("run: {tensorboard: 'true'}", '8:20: run.tensorboard: found "true", allowed: true, false'),
        ("run: {log_every: ten}", "8:18: run.log_every: found `ten`, allowed: a whole number of at least 1"),
        ("run: {log_every: 0}", "8:18: run.log_every: found `0`, allowed: a whole number of at least 1"),
        ("run: {log_every: 1.5}", "8:18: run.log_every: found `1.5`, allowed: a whole number of at least 1"),
        ("run: {log_every: 010}", "8:18: run.log_every: found `010`, allowed: a whole number of at least 1"),
        ("run: {log_every: '5'}", '8:18: run.log_every: found "5", allowed: a whole number of at least 1'),
        ("run: {log_every: }", "8:18: run.log_every: found nothing, allowed: a whole number of at least 1"),
        ("run: {dir: {}}", "8:12: run.dir: found a mapping, allowed: a string"),
        ("run: {dir: ''}", '8:12: run.dir: found "", allowed: a string'),
        ("run: {dir: [a, b]}", "8:12: run.dir: found a list, allowed: a string"),
        ("train: {staleness: 65}", "8:20: train.staleness: found `65`, allowed: a whole number from 1 to 64"),
        ("train: {clip_norm: 0}", "8:20: train.clip_norm: found `0`, allowed: a number above 0"),
        ("train: {clip_norm: .inf}", "8:20: train.clip_norm: found `.inf`, allowed: a number above 0"),
        (
            "train: {lr_schedule: cosin}",
            "8:22: train.lr_schedule: found `cosin`, allowed: constant, linear, cosine; did you mean `cosine`?",
        ),
        (
            "train: {metrics: [auc, gac, log_loss]}",
            "8:24: train.metrics[1]: found `gac`, allowed: auc, log_loss, ne, calibration, gauc; did you mean `gauc`?",
        ),
        ("train: {metrics: [auc, auc]}", "8:18: train.metrics: `auc` appears more than once: list it once"),
        # optimizers
        (
            "train: {dense_optimizer: {name: adm}}",
            "8:33: train.dense_optimizer.name: found `adm`, allowed: adam, adamw, adagrad, sgd; did you mean `adam`?",
        ),
        (
            "train: {dense_optimizer: {lrr: 1}}",
            "8:27: train.dense_optimizer.lrr: unknown key, did you mean `lr`?; "
            "allowed: name, lr, betas, eps, weight_decay, amsgrad",
        ),
        (
            "train: {dense_optimizer: {betas: [0.9, 1]}}",
            "8:40: train.dense_optimizer.betas[1]: found `1`, allowed: a number of at least 0 and below 1",
        ),
        (
            "train: {dense_optimizer: {betas: [0.9]}}",
            "8:34: train.dense_optimizer.betas: found a list, allowed: a list of 2 numbers of at least 0 and below 1; "
            "this list has 1",
        ),
        (
            "train: {embedding_optimizer: {name: sgd}}",
            "8:30: train.embedding_optimizer.lr: missing, allowed: a number of at least 0",
        ),
        (
            "train: {embedding_optimizer: {name: adagrad, eps: 0}}",
            "8:51: train.embedding_optimizer.eps: found `0`, allowed: a number above 0 and at most 1e+30",
        ),
        (
            "train: {embedding_optimizer: {name: adamw}}",
            "8:37: train.embedding_optimizer.name: found `adamw`, allowed: adagrad, adam, sgd; did you mean `adam`?",
        ),
        (
            "train: {dense_optimizer: {name: sgd, nesterov: true}}",
            "8:48: train.dense_optimizer.nesterov: needs `momentum` above 0, and `dampening: 0`",
        ),
        # the model
        (
            "model: {name: dcn}",
            "8:15: model.name: found `dcn`, allowed: autoint, dcnv2, dlrm, tiny; did you mean `dcnv2`?",
        ),
        (
            "model: {cross_layer: 2}",
            "8:9: model.cross_layer: unknown key, did you mean `cross_layers`?; "
            "allowed: name, class, cross_layers, deep_mlp, low_rank, dropout, activation_checkpointing",
        ),
        ("model: {deep_mlp: 3}", "8:19: model.deep_mlp: found `3`, allowed: a list of whole numbers"),
        ("model: {deep_mlp: [3, x]}", "8:23: model.deep_mlp[1]: found `x`, allowed: a whole number"),
        (
            "model: {num_dense: 3}",
            "8:9: model.num_dense: found, but its value follows from `features` and `labels`: remove it",
        ),
        ("model: {class: a.b}", "8:16: model.class: found `a.b`, allowed: `module:Class`, such as `my_model:MyModel`"),
        # blocks together
        (
            "train: {early_stop: {metric: gauc}}",
            "8:30: train.early_stop.metric: `gauc` needs `train.gauc_group`, the column of the groups, such as the "
            "user",
        ),
        (
            "train: {metrics: [gauc]}",
            "8:18: train.metrics: `gauc` needs `train.gauc_group`, the column of the groups, such as the user",
        ),
        (
            "train: {gauc_group: user}",
            "8:21: train.gauc_group: found, but `train.metrics` has no `gauc`: add `gauc`, or remove this key",
        ),
        (
            "train: {weight: clicked}",
            "8:17: train.weight: reads `clicked`, the column of `labels.clicked`, which is unknown at prediction; "
            "choose another column, or remove this key",
        ),
        (
            "run: {name: a/b}",
            "8:13: run.name: found `a/b`, allowed: up to 80 letters, digits, `.`, `_` and `-`, the first a letter or a "
            "digit; not LATEST",
        ),
        (
            "run: {dir: s3://a/b}",
            "8:12: run.dir: found `s3://a/b`, allowed: a folder; checkpoint.dir may be a URL such as "
            "s3://bucket/prefix",
        ),
        (
            "checkpoint: {dir: s4://a/b}",
            "8:19: checkpoint.dir: found `s4://a/b`, allowed: a folder, or a URL such as s3://bucket/prefix",
        ),
        (
            "checkpoint: {upload_to: saves}",
            "8:25: checkpoint.upload_to: found `saves`, allowed: a URL such as s3://bucket/prefix",
        ),
    ],
)
def test_each_mistake_has_its_place(persia_yml: Path, added: str, message: str) -> None:
    found = mistakes(persia_yml, GOOD + added)
    assert found == [message]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{}", "1:7: data.train: missing, allowed: a list of strings, or a string"),
        ("{train: [a, {}]}", "1:19: data.train[1]: found a mapping, allowed: a string"),
        ("{train: a, workers: 0}", "1:27: data.workers: found `0`, allowed: a whole number from 1 to 256"),
        ("{train: a, split: {fractions: [0.5, 0.2, 0.2]}}", "1:37: data.split.fractions: the sum is 0.9, allowed: 1"),
        (
            "{train: a, split: {fractions: [0, 0.5, 0.5]}}",
            "1:37: data.split.fractions: the share of train is 0; allowed: above 0",
        ),
        (
            "{train: a, split: {fractions: [0.5, 1.5, 0]}}",
            "1:43: data.split.fractions[1]: found `1.5`, allowed: a number from 0 to 1",
        ),
        (
            "{train: [a, ~no-such-user/b]}",
            "1:19: data.train: found `~no-such-user/b`, but `~no-such-user` has no known home folder: write "
            "an absolute path",
        ),
        (
            "{train: a, split: {column: t}}",
            "1:34: data.split.column: found together with `by: hash`; allowed only with `by: time`",
        ),
        (
            "{train: a, split: {by: time, column: t, test: 5, group: u}}",
            "1:63: data.split.group: found together with `by: time`; allowed only with `by: hash`",
        ),
        (
            "{train: a, split: {by: time, test: 2024-05-01}}",
            "1:25: data.split.column: missing, allowed: the column that holds the time",
        ),
        (
            "{train: a, split: {by: time, column: t}}",
            "1:25: data.split.valid: missing, allowed: the start of valid, such as `valid: 2024-05-01`",
        ),
        (
            "{train: a, split: {by: time, column: t, valid: 2024-06-01, test: 2024-05-01}}",
            "1:72: data.split.test: found '2024-05-01', which is before valid ('2024-06-01')",
        ),
        (
            "{train: a, split: {by: time, column: t, valid: 3, test: 2024-05-01}}",
            "1:63: data.split.test: found '2024-05-01', but data.split.valid is 3: expected two strings or two numbers",
        ),
        (
            "{train: a, split: {by: file}}",
            "1:30: data.split.by: found `file`, but neither data.valid nor data.test; set one of them",
        ),
        (
            "{train: a, valid: b, test: c, split: {group: u}}",
            "1:44: data.split: found together with data.valid and data.test, so no rows are divided: remove this key",
        ),
        (
            "{train: a, format: parquet, header: [user]}",
            "1:43: data.header: found together with `format: parquet`, whose files have names and types of columns: "
            "remove this key",
        ),
        (
            "{train: a, header: [user, price, user, clicked]}",
            "1:26: data.header: `user` appears more than once; column names must differ",
        ),
        (
            "{train: a, header: [usr, price, clicked]}",
            "4:3: features.user: no column `user` in `data.header`, did you mean `usr`?",
        ),
        (
            "{train: a, columns: {price: float}}",
            "1:35: data.columns.price: found `float`, allowed: int64, float64, string, bool, timestamp, date; "
            "did you mean `float64`?",
        ),
        (
            "{train: a, columns: {price: float64, user: string, price: int64}}",
            "1:58: data.columns.price: appears twice, first on line 1: remove one",
        ),
        (
            "{train: a, columns: {price: float64, <<: {user: string}}}",
            "1:44: data.columns.<<: merge keys are not supported; an alias (`*name`) repeats a whole value",
        ),
        (
            "{train: a, format: parquett}",
            "1:26: data.format: found `parquett`, allowed: parquet, csv, tsv, ipc; did you mean `parquet`?",
        ),
        (
            "{train: a, preset: criteo, format: csv}",
            "1:42: data.format: found together with `preset: criteo`, which determines the format: remove this key",
        ),
    ],
)
def test_each_mistake_of_data_has_its_place(persia_yml: Path, data: str, message: str) -> None:
    found = mistakes(persia_yml, GOOD.replace("data:\n  train: clicks.parquet", f"data: {data}\n"))
    assert message in found


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            "{user: {type: idd, dim: 16}}",
            "3:25: features.user.type: found `idd`, allowed: id, bag, sequence, bucket, "
            "cross, dense, date; did you mean `id`?",
        ),
        (
            "{user: {type: id, dim: 16, column: clicked}}",
            "3:46: features.user.column: reads `clicked`, the column of "
            "`labels.clicked`, which is unknown at prediction; choose another column, or remove this key",
        ),
        (
            "{clicked: {type: id, dim: 16}}",
            "3:12: features.clicked: reads `clicked`, the column of `labels.clicked`, "
            "which is unknown at prediction; choose another column, or remove this key",
        ),
        (
            "{user: {type: bag, dim: 16, weights: clicked}}",
            "3:48: features.user.weights: reads `clicked`, the column of "
            "`labels.clicked`, which is unknown at prediction; choose another column, or remove this key",
        ),
        ("{}", "3:11: features: found nothing: name at least one feature, such as `user: {type: id, dim: 16}`"),
        ("", "3:9: features: found nothing: name at least one feature, such as `user: {type: id, dim: 16}`"),
    ],
)
def test_mistakes_of_features_are_in_the_same_error(persia_yml: Path, features: str, message: str) -> None:
    text = f"data: {{train: a}}\n\nfeatures: {features}\nlabels: {{clicked: {{}}}}\ntrain: {{seed: x}}\n"
    found = mistakes(persia_yml, text)
    assert found == [message, "5:15: train.seed: found `x`, allowed: a whole number from 0 to 9223372036854775807"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1:1: the file is empty"),
        ("# nothing but a comment\n", "1:1: the file is empty"),
        ("- a\n", "1:1: found a list, allowed: a mapping (`key: value` lines)"),
        ("just a text\n", "1:1: found `just a text`, allowed: a mapping (`key: value` lines)"),
        (
            "data: {train: a\nrun: {}\n",
            "2:4: not valid YAML: while parsing a flow mapping, did not find expected ',' or '}'",
        ),
        (
            "data:\n\ttrain: a\n",
            "2:1: not valid YAML: while scanning for the next token, found character that cannot start any token",
        ),
        (
            "a: 1\n---\nb: 2\n",
            "2:1: a second document begins here, but a file may have only one: remove the `---` or `...` before it",
        ),
        (
            "data: !!python/object:os.system {}\n",
            "1:7: the tag `tag:yaml.org,2002:python/object:os.system` is not supported: remove it",
        ),
        ("data: *absent\n", "1:7: the alias `*absent` has no anchor `&absent` before it"),
        ("{[a]: 1}\n", "1:2: a key must be a string, found a list"),
        ("a: " + "[" * 40 + "]" * 40, "1:35: nested deeper than 32 levels"),
        (
            "run:\n  name: a\u2028b\n",
            '2:10: the character U+2028 ends a line for some parsers only: remove it, or write "\\u2028"',
        ),
        ("a: \x00\n", "1:1: not valid YAML: control characters are not allowed"),
    ],
)
def test_what_is_no_mapping_is_one_mistake(persia_yml: Path, text: str, message: str) -> None:
    assert mistakes(persia_yml, text) == [message]


def test_an_alias_bomb_is_refused_and_an_honest_alias_is_read(persia_yml: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    found = mistakes(persia_yml, "\n".join(levels))
    assert found == ["5:5: more than 500000 keys and values up to here"]
    persia_yml.write_text(GOOD.replace("type: id", "type: id, init: &new {name: zero}") + "  item: {equals: 1}\n")
    assert persia.load_config(persia_yml).features["user"]["init"] == {"name": "zero"}


@pytest.mark.row("S1-18")
def test_all_mistakes_are_in_one_error_in_the_order_of_the_file(persia_yml: Path) -> None:
    text = """dat: {train: a}
features:
  user: {type: id}
labels:
train: {seed: a, threads: 0}
budget: 3
"""
    found = mistakes(persia_yml, text)
    assert [line.split(": ")[0] + " " + line.split(": ")[1] for line in found] == [
        "1:1 dat",
        "3:9 features.user.dim",
        "4:7 labels",
        "5:15 train.seed",
        "5:27 train.threads",
        "6:9 budget",
    ]
    assert found[3].endswith("train.seed: found `a`, allowed: a whole number from 0 to 9223372036854775807")


def test_a_missing_block_is_named_once(persia_yml: Path) -> None:
    assert mistakes(persia_yml, "labels: {clicked: {}}\nfeatures: {user: {type: id, dim: 4}}\n") == [
        "1:1: data: missing, allowed: at least `data: {train: FILE}`"
    ]
    found = mistakes(persia_yml, "data: {train: a}\nlabels: {clicked: {}}\nfeature: {user: {type: id, dim: 4}}\n")
    assert found == [f"3:1: feature: unknown key, did you mean `features`?; allowed: {KEYS}"]
    found = mistakes(persia_yml, GOOD.replace("  train:", "  trian:"))
    assert [line.partition(";")[0] for line in found] == ["2:3: data.trian: unknown key, did you mean `train`?"]
    found = mistakes(persia_yml, "data: {train: a}\nlabels: {clicked: {}}\n")
    assert found == ["1:1: features: missing: name at least one feature, such as `user: {type: id, dim: 16}`"]


def test_a_file_that_cannot_be_read_names_the_next_step(persia_yml: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yml") as caught:
        persia.load_config("absent.yml")
    assert caught.value.hint == "correct the path, or create a file from your data: persia data inspect FILE"
    Path("binary.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yml"):
        persia.load_config("binary.yml")
