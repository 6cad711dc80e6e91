"""The slots of a script: those of ``PERSIA_CONFIG``, or of ``embedding_config.yml``, and their differences."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from conftest import TinyModel

from persia.cli.main import main
from persia.ctx import EmbeddingCtx, PreprocessMode, TrainCtx
from persia.embedding import EmbeddingConfig
from persia.embedding.config import Configuration
from persia.embedding.optim import SGD
from persia.errors import ConfigError, UsageError
from persia.features import read_features, to_batch
from persia.features.slots import differences

PERSIA = """data: {train: a}
features:
  user: {type: id, dim: 16}
  author: {type: id, dim: 16, table: user}
  tags: {type: bag, dim: 4, pooling: mean}
  seen: {type: sequence, dim: 8, last: 5, dtype: f16}
  day: {type: date, part: day, dim: 0}
  when: {type: cross, features: [day, user], dim: 2, optimizer: {name: sgd, lr: 0.5}}
  price: {type: dense}
labels: {clicked: {}}
"""
SAME = """slots_config:
  user: {dim: 16, ttl: }
  author: {dim: 16}
  tags: {dim: 4, pooling: mean}
  seen: {dim: 8, embedding_summation: false, sample_fixed_size: 5, dtype: f16}
  when: {dim: 2, optimizer: {lr: 5e-1, name: sgd}}
feature_groups: {people: [user, author]}
"""

Write = Callable[[str, str], Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a file into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs ``persia`` in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["persia", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_equal_slots_have_no_differences() -> None:
    same = SAME.replace(", ttl: ", "")
    assert differences((PERSIA, "p"), (same, "e")) == []


@pytest.mark.parametrize(
    ("here", "there", "found"),
    [
        ("user: {dim: 16}", "user: {dim: 8}", "p:3: features.user: dim is 16, but 8 in e:2"),
        ("pooling: mean", "pooling: sum", "p:5: features.tags: pooling is mean, but sum in e:4"),
        ("pooling: mean", "sqrt_scaling: true", "p:5: features.tags: sqrt_scaling is false, but true in e:4"),
        ("sample_fixed_size: 5", "sample_fixed_size: 6", "p:6: features.seen: sequence is 5, but 6 in e:5"),
        (", sample_fixed_size: 5", "", "p:6: features.seen: sequence is 5, but 10 in e:5"),
        ("embedding_summation: false, ", "", "p:6: features.seen: sequence is 5, but none in e:5"),
        ("dtype: f16", "dtype: bf16", "p:6: features.seen: dtype is f16, but bf16 in e:5"),
        ("5e-1", "1", "p:8: features.when: optimizer is {name: sgd, lr: 0.5}, but {lr: 1, name: sgd} in e:6"),
        (
            "[user, author]",
            "[user]",
            "p:3: features.user: the table is shared with author, but with no other slot in e:2",
        ),
        ("  when:", "  then:", "e:6: slots_config.then: p has no feature `then`"),
        ("  when:", "  then:", "p:8: features.when: e has no slot `when`"),
    ],
)
def test_each_difference_is_named_with_both_places(here: str, there: str, found: str) -> None:
    other = SAME.replace(", ttl: ", "").replace(here, there)
    assert other != SAME
    assert found in differences((PERSIA, "p"), (other, "e"))


def test_slots_come_from_persia_yml(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("persia.yml", PERSIA)
    write("config/embedding_config.yml", "slots_config: {other: {dim: 3}}\n")
    write("config/global_config.yml", "embedding_parameter_server_config: {capacity: 1234}\n")
    assert Configuration.find().embedding.slots == ["other"]
    monkeypatch.setenv("PERSIA_CONFIG", str(path))
    found = Configuration.find()
    assert found.source == "persia.yml"
    assert found.embedding.slots == ["user", "author", "tags", "seen", "when"]
    assert found.embedding.tables == [("user", 16), ("tags", 4), ("seen", 8), ("when", 2)]
    assert found.general.capacity == 1234
    path.write_text(PERSIA + "# another text\n")
    assert Configuration.find().digest != found.digest


def test_both_variables_are_refused_with_both_names(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_CONFIG", str(write("persia.yml", PERSIA)))
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(write("slots.yml", SAME)))
    both = "PERSIA_CONFIG is persia.yml, and PERSIA_EMBEDDING_CONFIG is slots.yml: slots come from one file"
    with pytest.raises(ConfigError, match=f"^{both}"):
        Configuration.find()


def test_a_wrong_persia_yml_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_CONFIG", "absent.yml")
    with pytest.raises(ConfigError, match=r"^PERSIA_CONFIG=absent\.yml: no such file"):
        Configuration.find()
    monkeypatch.setenv("PERSIA_CONFIG", str(write("persia.yml", PERSIA.replace("dim: 4", "dim: x"))))
    with pytest.raises(ConfigError, match=r"features\.tags\.dim: found `x`"):
        Configuration.find()
    monkeypatch.delenv("PERSIA_CONFIG")
    with pytest.raises(
        ConfigError, match=r"set PERSIA_EMBEDDING_CONFIG.* or set PERSIA_CONFIG to the path of a persia"
    ):
        Configuration.find()


def test_a_script_trains_on_the_slots_of_its_features(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        "persia.yml",
        "features:\n  a: {type: id, dim: 4}\n  b: {type: bag, dim: 4}\n"
        "  x: {type: dense}\n  y: {type: dense}\n  z: {type: dense}\nlabels: {clicked: {}}\n",
    )
    monkeypatch.setenv("PERSIA_CONFIG", str(path))
    features = read_features(path)
    columns = {"a": ["p", "q"], "b": [["r", "s"], []], "x": [0.5, 1.0], "y": [0.0, 1.0], "z": [2.0, 1.0]}
    table = pa.table({**columns, "clicked": [1, 0]})
    batch = to_batch(features.fit(table)(table))
    model = TinyModel()
    with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), model=model, mixed_precision=False) as ctx:
        _, embeddings, _ = ctx.prepare_features(batch)
        assert [list(each.shape) for each in embeddings] == [[2, 4], [2, 4]]


def test_slots_in_place_of_the_configuration_of_rows_are_refused(write: Write) -> None:
    features = read_features(write("persia.yml", PERSIA))
    with pytest.raises(UsageError, match=r"found slots, such as features\.embedding_config\(\) returns") as caught:
        EmbeddingCtx(PreprocessMode.EVAL, embedding_config=features.embedding_config())  # type: ignore[arg-type]
    assert "PERSIA_CONFIG=persia.yml" in caught.value.hint
    with pytest.raises(UsageError, match=r"expected persia\.embedding\.EmbeddingConfig, found dict"):
        EmbeddingCtx(PreprocessMode.EVAL, embedding_config={})  # type: ignore[arg-type]
    EmbeddingCtx(PreprocessMode.EVAL, embedding_config=EmbeddingConfig())


def test_features_beside_other_slots_are_a_warning(
    write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write("persia.yml", PERSIA)
    slots = write("config/embedding_config.yml", SAME.replace(", ttl: ", ""))
    read_features(path)
    assert not caplog.text
    slots.write_text(slots.read_text().replace("dim: 8", "dim: 9"))
    read_features(path)
    assert "persia.yml:6: features.seen: dim is 8, but 9 in" in caplog.text
    assert "to use the features, set PERSIA_CONFIG=persia.yml. Differences:\n" in caplog.text
    caplog.clear()
    slots.write_text("not: valid\n")  # the context raises the error
    read_features(path)
    slots.write_text("slots_config: {x: {dim: 1}}\n")
    monkeypatch.setenv("PERSIA_CONFIG", str(path))
    read_features(path)
    assert not caplog.text


def test_files_are_checked_together_whatever_their_names(write: Write, run: Run) -> None:
    write("one.yml", PERSIA)
    write("two.yml", SAME.replace(", ttl: ", ""))
    write("three.yml", "embedding_parameter_server_config: {capacity: 5}\n")
    code, out, err = run("config", "check", "three.yml", "two.yml", "--global", "three.yml", "one.yml", "--no-data")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "ok: three.yml: capacity 5 rows" in lines
    assert "ok: two.yml: 5 slots in 4 tables" in lines
    assert "ok:   seen: dtype f16" in lines
    assert "ok: one.yml: 7 features with 5 slots in 4 tables, 1 label, model dcnv2" in lines


def test_differing_slots_and_the_mistakes_of_all_files_are_one_error(write: Write, run: Run) -> None:
    write("persia.yml", PERSIA)
    write("slots.yml", SAME.replace(", ttl: ", "").replace("dim: 2,", "dim: 3,"))
    write("limits.yml", "common_config: {job_type: Nonsense}\n")
    code, out, err = run("config", "check", "persia.yml", "slots.yml", "limits.yml")
    assert (code, out) == (2, "")
    assert "limits.yml: 1 error" in err
    assert "the slots of persia.yml and slots.yml differ:" in err
    assert "  persia.yml:8: features.when: dim is 2, but 3 in slots.yml:6" in err
    write("other.yml", "services: {}\n")
    code, _, err = run("config", "check", "other.yml")
    assert code == 2
    assert "other.yml: not a known configuration file: persia.yml has data, features" in err


def test_the_command_shows_and_checks_the_file_of_the_folder(write: Write, run: Run) -> None:
    code, _, err = run("config", "show")
    assert code == 2 and "next:  specify its path: persia config show FILE" in err
    write("persia.yml", PERSIA)
    code, out, err = run("config", "show", "--set", "train.seed=3", "--set", "run.name=x")
    assert (code, err) == (0, "")
    assert "  seed: 3  # --set" in out and "    dim: 16  # persia.yml:3" in out
    code, out, err = run("config", "check")
    assert code == 0 and out.startswith("ok: persia.yml: 7 features")
    assert err.startswith("warning: persia.yml: the columns of the data are not checked: ") and "no such file" in err
    code, _, err = run("config", "check", "persia.yml", "--set", "train.seed=x")
    assert code == 2 and "--set train.seed=x: train.seed: found `x`" in err


@pytest.mark.row("S3-04")
def test_keys_of_the_model_change_the_number_of_its_weights(write: Write, run: Run) -> None:
    write("persia.yml", "data: {train: a}\nfeatures: {user: {type: id, dim: 4}}\nlabels: {clicked: {}}\n")
    found = []
    for layers in ("[8]", "[2]"):
        sets = ("--set", f"model.deep_mlp={layers}", "--set", "model.cross_layers=1")
        code, out, err = run("config", "show", "--parameters", *sets)
        assert (code, err) == (0, "")
        found.append(out.splitlines()[-1])
    # cross: 4 * 4 + 4; deep: 4 * 8 + 8; head: 8 + 4 + 1
    assert found == [
        f"# the model has {count} weights, not counting embedding rows" for count in (20 + 40 + 13, 20 + 10 + 7)
    ]
    assert "#" not in run("config", "show")[1].splitlines()[-1].split("  # ")[0]


def test_checking_imports_no_torch(write: Write) -> None:
    write("persia.yml", PERSIA.replace("train: a", "train: a.parquet"))
    texts, lists, numbers = pa.array(["a"]), pa.array([["a"]]), pa.array([1.0])
    columns = {"user": texts, "author": texts, "tags": lists, "seen": lists, "price": numbers, "clicked": numbers}
    pa.parquet.write_table(pa.table({**columns, "day": pa.array([1], pa.date32())}), "a.parquet")
    command = [sys.executable, "-X", "importtime", "-m", "persia", "config", "check", "persia.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the columns of 1 data file fit" in done.stdout
    assert "persia.trainer.parts" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.split()[-1] == "torch"]
