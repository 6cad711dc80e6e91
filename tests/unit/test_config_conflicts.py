"""Conflicting and unusual keys of ``persia.yml``, and the values that a program can query."""

from pathlib import Path

import pytest
from config_files import GOOD, mistakes

import persia
from persia.config import Config, validate_config
from persia.config.operations import DistBlock, FsdpBlock
from persia.config.show import to_yaml


def test_dlrm_needs_equal_dims(persia_yml: Path) -> None:
    text = GOOD + "model: {name: dlrm}\n"
    persia_yml.write_text(text)
    assert persia.load_config(persia_yml).model.arguments == {"dropout": 0.0, "activation_checkpointing": False}
    text = text.replace(
        "labels:",
        "  item: {type: id, dim: 8}\n  day: {type: date, part: day, dim: 0}\n"
        "  both: {type: cross, features: [day, item], dim: 16}\nlabels:",
    )
    assert mistakes(persia_yml, text) == [
        "11:15: model.name: `dlrm` needs one dim for all features, found user 16, item 8, both 16; set the same "
        "dim, or use `name: dcnv2`"
    ]


@pytest.mark.row("S3-30")
def test_keys_that_do_not_fit_together_are_found_at_once(persia_yml: Path) -> None:
    text = GOOD + (
        "model: {name: dlrm, bottom_mlp: [64, 32], top_mlp: [64, 2]}\n"
        "train: {lr_schedule: cosin, gauc_group: user, early_stop: {metric: gauc}}\n"
        "data.split: 3\n"
    )
    found = mistakes(persia_yml, text)
    assert found[:2] == [
        "8:33: model.bottom_mlp: its last size is 32, allowed: 16, the dim of the features",
        "8:52: model.top_mlp: its last size is 2, allowed: 1, the number of labels",
    ]
    assert [line.split(": ")[1] for line in found[2:]] == ["train.lr_schedule", "data.split"]
    persia_yml.write_text(GOOD + "model: {name: dlrm, bottom_mlp: [64, 16], top_mlp: [64, 1]}\n")
    assert persia.load_config(persia_yml).model.arguments["bottom_mlp"] == [64, 16]


def test_rows_at_a_time_that_are_no_fewer_than_a_batch_are_a_warning(
    persia_yml: Path, caplog: pytest.LogCaptureFixture
) -> None:
    persia_yml.write_text(GOOD + "train: {micro_batch: 4096, accumulate: 2}\n")
    assert persia.load_config(persia_yml).step_rows == 8192
    assert "train.micro_batch: found 4096, which has no effect, because data.batch_size is 4096" in caplog.text


def test_the_early_stop_needs_rows_and_a_metric(persia_yml: Path) -> None:
    text = GOOD.replace("clicks.parquet", "a\n  split: {fractions: [0.9, 0, 0.1]}") + "train: {early_stop: {}}\n"
    assert mistakes(persia_yml, text) == [
        "9:21: train.early_stop: there is no validation set to evaluate on: set data.valid, or the valid part of "
        "data.split"
    ]
    persia_yml.write_text(text.replace("  split", "  valid: b\n  split"))
    assert persia.load_config(persia_yml).train.early_stop is not None
    text = GOOD.replace("clicked: {}", "stars: {loss: mse}") + "train: {early_stop: {}}\n"
    assert mistakes(persia_yml, text) == [
        "8:21: train.early_stop.metric: is `auc`, but the first label, `stars`, has `loss: mse`; allowed: loss"
    ]


def test_the_arguments_of_a_class_of_the_users_own_are_checked_without_importing_it(persia_yml: Path) -> None:
    Path("my_model.py").write_text(
        "import does_not_exist\n"
        "class Tower(does_not_exist.Module):\n"
        "    def __init__(self, num_dense, embedding_dims: list[int], width: int, depth: int = 2):\n"
        "        pass\n"
        "class Free:\n"
        "    def __init__(self, **anything):\n"
        "        pass\n"
    )
    persia_yml.write_text(GOOD + "model: {class: 'my_model:Tower', width: 1e2}\n")
    config = persia.load_config(persia_yml)
    assert (config.model.name, config.model.class_, config.model.arguments) == (None, "my_model:Tower", {"width": 100})
    persia_yml.write_text(GOOD + "model: {class: my_model:Free, any: [1, x]}\n")
    assert persia.load_config(persia_yml).model.arguments == {"any": [1, "x"]}
    for model, message in [
        ("class: my_model:Towr", "8:16: model.class: my_model.py has no class `Towr`, did you mean `Tower`?"),
        (
            "class: my_modell:Tower",
            "8:16: model.class: no module `my_modell` in . nor among the installed packages; move it to that "
            "folder, add its folder to PYTHONPATH, or install it: pip install -e FOLDER",
        ),
        ("name: dlrm, class: my_model:Free", "8:15: model.name: found together with `class`; allowed: one of the two"),
        (
            "class: my_model:Free, any: [{a: 1, a: 2}]",
            "8:44: model.any.a: appears twice, first on line 8: remove one",
        ),
        (
            "class: my_model:Free, any: {<<: {a: 1}}",
            "8:37: model.any.<<: merge keys are not supported; an alias (`*name`) repeats a whole value",
        ),
        ("class: my_model:Tower", "8:8: model.width: missing, allowed: a whole number"),
        ("class: my_model:Tower, width: x", "8:39: model.width: found `x`, allowed: a whole number"),
        (
            "class: my_model:Tower, width: 1, dept: 1",
            "8:42: model.dept: unknown key, did you mean `depth`?; allowed: name, class, num_dense, embedding_dims, "
            "width, depth",
        ),
    ]:
        found = mistakes(persia_yml, GOOD + f"model: {{{model}}}\n")
        assert [line.replace(f"{Path.cwd()}/", "").replace(f"{Path.cwd()},", ".") for line in found] == [message]


def test_what_is_unusual_is_a_warning(persia_yml: Path, caplog: pytest.LogCaptureFixture) -> None:
    persia_yml.write_text(
        GOOD.replace("clicks.parquet", "a.csv\n  columns: {prise: float64}")
        + "train: {reproducible: true, staleness: 8}\n"
    )
    config = persia.load_config(persia_yml)
    assert config.train.staleness == 1
    shown = caplog.text
    assert "persia.yml:3:13: data.columns.prise: nothing reads this column, did you mean `price`?" in shown
    assert "train.staleness: found 8, but training is reproducible, so the staleness is 1" in shown


@pytest.mark.row("S3-31")
def test_a_program_can_ask_whether_a_configuration_is_valid(persia_yml: Path) -> None:
    persia_yml.write_text(GOOD)
    config = persia.load_config(persia_yml)
    assert validate_config(config) == (True, [])
    assert validate_config(persia_yml) == (True, [])
    user: dict[str, object] = {"type": "id", "dim": 4}
    content = {"data": {"train": "a"}, "features": {"user": user}, "labels": {"clicked": {}}}
    assert validate_config(content) == (True, [])
    made = Config.model_validate({**content, "train": {"staleness": 2, "gauc_group": "user"}})
    assert validate_config(made) == (
        False,
        [
            "the configuration: train.gauc_group: found, but `train.metrics` has no `gauc`: add `gauc`, or remove this "
            "key"
        ],
    )
    user["dim"] = "four"
    assert validate_config(content) == (
        False,
        ["the configuration: features.user.dim: found `four`, allowed: a whole number from 0 to 4096"],
    )


def test_regions_hold_each_rank_once(persia_yml: Path) -> None:
    text = GOOD + "parallel: ddp\ndist: {regions: {east: [0, 1, 0], west: [1, -2], none: []}}\n"
    assert mistakes(persia_yml, text) == [
        "9:24: dist.regions.east: rank 0 is listed twice; allowed: one region for each rank",
        "9:41: dist.regions.west: rank 1 is in region `east` too; allowed: one region for each rank",
        "9:41: dist.regions.west: found rank -2; ranks are counted from 0",
        "9:56: dist.regions.none: found no ranks; allowed: at least one",
    ]
    sharded = text.replace("[0, 1, 0], west: [1, -2], none: []", "[0, 1]").replace("ddp", "fsdp")
    assert mistakes(persia_yml, sharded) == [
        "9:17: dist.regions: found together with `parallel: fsdp`, which shards the gradients: remove one of them"
    ]
    assert mistakes(persia_yml, GOOD + "dist: {regions: {}}\n") == [
        "8:17: dist.regions: found no regions; allowed: at least one, such as `{east: [0, 1]}`"
    ]


@pytest.mark.row("S4-24")
def test_compression_that_would_not_work_is_refused(persia_yml: Path) -> None:
    text = GOOD + "dist: {compression: {name: powersgd, start_iter: 1}}\n"
    assert mistakes(persia_yml, text) == [
        "8:50: dist.compression.start_iter: found `1`, allowed: a whole number of at least 2"
    ]
    text = GOOD + "dist: {compression: {name: powersgd}, regions: {east: [0], west: [1]}}\n"
    assert mistakes(persia_yml, text) == [
        "8:21: dist.compression: found `powersgd` together with dist.regions; allowed: one of them, or fp16, bf16"
    ]
    text = GOOD + "parallel: fsdp\ndist: {compression: {name: bf16}}\n"
    assert mistakes(persia_yml, text) == [
        "9:21: dist.compression: found together with `parallel: fsdp`, which shards the gradients: remove one of them"
    ]


def test_keys_for_operators_without_an_effect_are_a_warning(persia_yml: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "fsdp: {reshard_after_forward: true}\nmemory: {limit_mb: 5}\ndist: {compression: {name: fp16, rank: 2}}\n"
    persia_yml.write_text(GOOD + text)
    config = persia.load_config(persia_yml)
    for told in (
        "fsdp.reshard_after_forward: has no effect without `parallel: fsdp`",
        "memory.limit_mb: has no effect without `leaks: true`",
        "dist.compression.rank: has no effect without `name: powersgd`",
    ):
        assert told in caplog.text
    caplog.clear()
    persia_yml.write_text(to_yaml(config.with_blocks(fsdp=FsdpBlock(), memory=None, dist=DistBlock())))
    persia.load_config(persia_yml)  # all keys with their defaults
    assert not caplog.text


@pytest.mark.parametrize("days", ["0", ".inf", "40000"])
def test_an_age_of_checkpoints_is_at_most_a_hundred_years(persia_yml: Path, days: str) -> None:
    (found,) = mistakes(persia_yml, GOOD + f"checkpoint: {{keep_days: {days}}}\n")
    assert found.endswith("allowed: a number above 0 and at most 36500")


def test_an_address_of_a_notice_is_one_of_http(persia_yml: Path) -> None:
    assert mistakes(persia_yml, GOOD + "spot: {url: 169.254.169.254/latest}\n") == [
        "8:13: spot.url: found `169.254.169.254/latest`, allowed: a complete http:// or https:// address, without "
        "spaces, such as http://169.254.169.254/path"
    ]
    for wrong in (
        "http://[::1",
        "http://h:port/",
        "http://h:0/",
        "http://h/a b",
        "http://h/\xe9",
        "http://:secret@/?a=secret",
    ):
        (found,) = mistakes(persia_yml, GOOD + f"spot: {{url: '{wrong}'}}\n")
        assert "spot.url: found `http:/" in found and "secret" not in found
    persia_yml.write_text(GOOD + "spot: {url: 'http://169.254.169.254/latest'}\n")
    assert persia.load_config(persia_yml, ["spot=null"]).spot is None
