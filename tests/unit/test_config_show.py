"""Overrides of ``persia.yml``, and the whole configuration as ``persia config show`` prints it."""

import random
from pathlib import Path

import pytest
import yaml
from config_files import GOOD, KEYS, mistakes

import persia
from persia.config.document import Document, open_document
from persia.config.show import show, to_yaml
from persia.trainer.run_folder import resolved

WHOLE = """data:
  train: [a.csv, "s3://bucket/b.csv"]
  columns: {price: float64}
  split: {by: time, column: at, valid: 2024-05-01}
features:
  user: {type: id, dim: 1_6, prefix: 007, init: {name: normal, std: 0.1}}
  "odd: name": {type: bucket, column: "a # b", boundaries: [1, 2.5], dim: 4}
  price: {type: dense, standardise: {mean: 0, std: 2}}
labels:
  clicked: {equals: '1'}
  bought: {equals: 1e0, weight: 0.5}
model: {name: dcnv2, low_rank: 8}
train:
  embedding_optimizer: {name: adam, betas: [0.5, 0.75]}
  early_stop: {}
  metrics: [auc]
run: {name: "2024"}
"""


def test_overrides_change_and_add_keys(persia_yml: Path) -> None:
    persia_yml.write_text(GOOD)
    config = persia.load_config(
        persia_yml,
        [
            "train.seed=7",
            "train.seed = 8",
            "train.dense_optimizer.lr=1e-2",
            "train.early_stop={patience: 5}",
            "data.train=[a, b]",
            "model.cross_layers=2",
            "features.user.dim=8",
            "features.new={type: id, dim: 4, column: other}",
            "labels.clicked.equals='yes'",
            "run.name=",
        ],
    )
    assert config.train.seed == 8
    assert (config.train.dense_optimizer.name, config.train.dense_optimizer.arguments["lr"]) == ("adam", 0.01)
    assert config.train.early_stop is not None and config.train.early_stop.patience == 5
    assert config.data.train == ["a", "b"]
    assert config.model.arguments["cross_layers"] == 2
    assert config.compiled.embedding_config().tables == [("user", 8), ("new", 4)]
    assert config.compiled.columns() == ["user", "price", "other", "clicked"]
    assert 'equals: "yes"' in config.described
    assert config.run.name is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed", ": expected KEY=VALUE, such as train.seed=7"),
        ("=7", ": expected KEY=VALUE, such as train.seed=7"),
        ("train..seed=7", ": expected KEY=VALUE, such as train.seed=7"),
        (
            "run.nam=x",
            ": run.nam: unknown key, did you mean `name`?; allowed: dir, name, log_every, tensorboard",
        ),
        (
            "rum.name=x",
            f": rum: unknown key, did you mean `run`?; allowed: {KEYS}",
        ),
        ("train.seed=x", ": train.seed: found `x`, allowed: a whole number from 0 to 9223372036854775807"),
        ("train.seed=", ": train.seed: found nothing, allowed: a whole number from 0 to 9223372036854775807"),
        (
            "train.metrics=[auc",
            ": train.metrics: not valid YAML: while parsing a flow sequence, did not find expected ',' or ']'",
        ),
        ("train=!!set {}", ": train: the tag `tag:yaml.org,2002:set` is not supported: remove it"),
        ("data.train.x=1", ": data.train: found `clicks.parquet`, which has no key `x`"),
        (
            "features.usr.dim=4",
            ": features.usr: no feature `usr`, did you mean `user`?; a new feature needs all its "
            "keys: --set 'features.usr={…}'",
        ),
        ("labels.x.column=4", ": labels.x: no label `x`; a new label needs all its keys: --set 'labels.x={…}'"),
        ("features.user.dim=-1", ": features.user.dim: found `-1`, allowed: a whole number from 0 to 4096"),
        (
            "features.price.log1q=true",
            ": features.price.log1q: unknown key, did you mean `log1p`?; allowed: type, "
            "column, missing, clip, log1p, standardise, min_max",
        ),
        ("features.new={type: id, dim: x}", ": features.new.dim: found `x`, allowed: a whole number from 0 to 4096"),
        (
            "features.user.column=clicked",
            ": features.user.column: reads `clicked`, the column of `labels.clicked`, which "
            "is unknown at prediction; choose another column, or remove this key",
        ),
    ],
)
def test_a_mistake_of_an_override_names_it(persia_yml: Path, override: str, message: str) -> None:
    assert mistakes(persia_yml, GOOD, override) == [f"--set {override}{message}"]


def test_mistakes_of_the_file_keep_their_places_beside_those_of_overrides(persia_yml: Path) -> None:
    text = GOOD.replace("type: dense", "type: dens") + "train: {seed: x}\n"
    assert mistakes(persia_yml, text, "features.user.dim=x", "train.threads=0") == [
        "5:17: features.price.type: found `dens`, allowed: id, bag, sequence, bucket, cross, dense, date; did you mean "
        "`dense`?",
        "8:15: train.seed: found `x`, allowed: a whole number from 0 to 9223372036854775807",
        "--set train.threads=0: train.threads: found `0`, allowed: a whole number of at least 1",
        "--set features.user.dim=x: features.user.dim: found `x`, allowed: a whole number from 0 to 4096",
    ]


def test_an_override_of_an_alias_changes_one_place(persia_yml: Path) -> None:
    persia_yml.write_text(GOOD.replace("{type: id, dim: 16}", "&id {type: id, dim: 16}\n  item: *id"))
    config = persia.load_config(persia_yml, ["features.item.dim=4"])
    assert config.compiled.embedding_config().tables == [("user", 16), ("item", 4)]


def test_the_name_of_a_feature_may_have_dots(persia_yml: Path) -> None:
    persia_yml.write_text(GOOD.replace("user:", "a.b:"))
    assert persia.load_config(persia_yml, ["features.a.b.dim=4"]).compiled.embedding_config().tables == [("a.b", 4)]


@pytest.mark.parametrize("text", [GOOD, WHOLE], ids=["short", "whole"])
def test_what_is_shown_is_the_same_configuration(persia_yml: Path, text: str) -> None:
    persia_yml.write_text(text)
    overrides = ["train.seed=3", "features.user.dim=8"]
    document = open_document(persia_yml, overrides)
    config = persia.load_config(persia_yml, overrides)
    assert document.config == config != persia.load_config(persia_yml)
    for printed in (show(document), to_yaml(config)):
        Path("shown.yml").write_text(printed)
        again = persia.load_config("shown.yml")
        assert again.described == config.described
        assert again.model_copy(update={"data": config.data}) == config
        assert again.compiled.embedding_config().tables == config.compiled.embedding_config().tables
        assert to_yaml(again) == to_yaml(config)
    Path("shown.yml").write_text(show(document))
    assert persia.load_config("shown.yml") == config


def test_every_value_says_where_it_came_from(persia_yml: Path) -> None:
    persia_yml.write_text(WHOLE)
    lines = show(open_document(persia_yml, ["train.seed=3", "features.user.dim=8"])).splitlines()
    assert all("  # " in line for line in lines if not line.endswith(":"))
    for line in (
        '  train: [a.csv, "s3://bucket/b.csv"]  # persia.yml:2',
        "  valid: null  # default",
        "  batch_size: 4096  # default",
        "    column: at  # persia.yml:4",
        "    dim: 8  # --set",
        "    prefix: 007  # persia.yml:6",
        '  "odd: name":',
        '    column: "a # b"  # persia.yml:7',
        '    equals: "1"  # persia.yml:10',
        "    equals: 1e0  # persia.yml:11",
        "  cross_layers: 3  # default",
        "  low_rank: 8  # persia.yml:12",
        "    betas: [0.5, 0.75]  # persia.yml:14",
        "    patience: 3  # default",
        "  seed: 3  # --set",
        '  name: "2024"  # persia.yml:17',
    ):
        assert line in lines, line


def test_the_whole_text_fits_any_folder_and_any_yaml_parser(persia_yml: Path) -> None:
    persia_yml.write_text(WHOLE)
    config = persia.load_config(persia_yml)
    content = yaml.safe_load(to_yaml(config))
    assert content["data"]["train"] == [str(Path.cwd() / "a.csv"), "s3://bucket/b.csv"]
    assert content["features"]["odd: name"]["column"] == "a # b"
    assert content["run"]["name"] == "2024"
    assert content["labels"]["clicked"]["equals"] == "1"


def test_the_configuration_of_a_run_keeps_features_and_labels_as_they_were_given(persia_yml: Path) -> None:
    text = GOOD.replace("dim: 16", "dim: 16, prefix: 1e6").replace("clicked: {}", "clicked: {equals: '1e6'}")
    persia_yml.write_text(text + "checkpoint: {dir: saves}\n")
    config = persia.load_config(persia_yml)
    Path("run.yml").write_text(resolved(config))
    again = persia.load_config("run.yml")
    assert again.described == config.described
    assert again.checkpoint.dir == str(Path.cwd() / "saves")


PIECES = [
    *(
        "null",
        "~",
        "[]",
        "{}",
        "[a, b]",
        "{a: b}",
        "1e400",
        "-1",
        "0x10",
        "010",
        "'x'",
        '"\\u0000"',
        "*u",
        "&u ",
        "!!int 3",
    ),
    *(
        "|",
        "> ",
        "- ",
        "? ",
        "yes",
        "true",
        ".inf",
        "é",
        "\u2028",
        "\t",
        "%",
        "@",
        "`",
        "<<: {}",
        "class: a:B",
        "name: dlrm",
    ),
    *(
        "type: cross",
        "features: [user, item]",
        "\x07",
        "\ufeff",
        "[" * 40,
        "}",
        "]",
        ": ",
        ", ",
        "#",
        "'",
        '"',
        "~nobody/x",
    ),
]


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_either_valid_or_refused_with_places(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    valid = 0
    for _ in range(150):
        text = rng.choice([GOOD, WHOLE])
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice([*PIECES, ""]) + text[at + rng.choice([0, 0, 1, 5]) :]
        overrides = [f"{rng.choice(['train.seed', 'features.user', 'a.b', 'model', ''])}={rng.choice(PIECES)}"]
        document = Document(text, "f", tmp_path, overrides if rng.random() < 0.3 else [])
        findings = document.findings
        assert findings.has_errors == (document.config is None), text
        for line in findings.errors:
            assert line.startswith(("f:", "--set")), text
        if document.config is not None:
            valid += 1
            assert Document(show(document), "f", tmp_path).config == document.config, text
    assert 0 < valid < 150


def test_the_accumulator_follows_the_batch_size_where_it_is_not_given(persia_yml: Path) -> None:
    persia_yml.write_text(GOOD)
    config = persia.load_config(persia_yml, ["data.batch_size=1024"])
    assert config.train.embedding_optimizer.arguments["initial_accumulator_value"] == 1e-6
    config = persia.load_config(persia_yml, ["data.batch_size=10240"])
    assert config.train.embedding_optimizer.arguments["initial_accumulator_value"] == pytest.approx(1e-8)
    config = persia.load_config(persia_yml, ["train.embedding_optimizer.initial_accumulator_value=0.5"])
    assert config.train.embedding_optimizer.arguments["initial_accumulator_value"] == 0.5
