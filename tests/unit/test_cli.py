"""The ``persia`` command, as a process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import Batches, Configure
from test_training import SLOTS, make, train

import persia
from persia.cli.main import app
from persia.data import DataLoader


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "persia", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.stack
def test_version_says_what_is_loaded() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert f"persia {persia.__version__}" in done.stdout
    assert "persia_core" in done.stdout and "profile" in done.stdout


@pytest.mark.stack
def test_a_good_configuration(configure: Configure) -> None:
    configure(SLOTS)
    done = run("config", "check")
    assert done.returncode == 0, done.stderr
    assert "2 slots in 2 tables" in done.stdout
    assert "capacity 1,000,000 rows" in done.stdout


def test_settings_of_tables_are_shown(configure: Configure) -> None:
    configure("a: {dim: 4, dtype: f16, ttl: 100}\nb: {dim: 4}")
    done = run("config", "check")
    assert done.returncode == 0, done.stderr
    assert "  a: dtype f16, ttl 100" in done.stdout
    assert "  b:" not in done.stdout


@pytest.mark.stack
@pytest.mark.parametrize("option", [["--global"], []], ids=["option", "second argument"])
def test_every_mistake_is_listed_at_once(tmp_path: Path, option: list[str]) -> None:
    embedding = tmp_path / "embedding_config.yml"
    embedding.write_text(
        "slots_config:\n  a: {dim: 0}\n  b: {dimm: 4}\n  c: {dim: 4, pooling: max}\nfeature_group: {}\n"
    )
    general = tmp_path / "global_config.yml"
    general.write_text("embedding_parameter_server_config:\n  capacity: -1\n")
    done = run("config", "check", embedding, *option, general)
    assert done.returncode == 2
    for text in ("a.dim", "dimm", "c.pooling", "sum", "mean", "feature_group", "capacity", str(general)):
        assert text in done.stderr, text
    assert "Traceback" not in done.stderr


@pytest.mark.row("S4-25", "S4-26")
def test_checkpoints(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(3)))
        ctx.dump_checkpoint(tmp_path / "runs" / "first")
        ctx.dump_checkpoint(tmp_path / "runs" / "second")
    (tmp_path / "runs" / "second" / "opt.pt").unlink()
    listing = run("ckpt", "list", tmp_path / "runs")
    assert listing.returncode == 0
    assert "first" in listing.stdout and "step 3" in listing.stdout
    assert "BROKEN" in next(line for line in listing.stdout.splitlines() if "second" in line)
    shown = run("ckpt", "show", tmp_path / "runs" / "first")
    assert shown.returncode == 0 and "step 3, " in shown.stdout and "shard-000" not in shown.stdout
    good = run("ckpt", "verify", tmp_path / "runs" / "first")
    assert good.returncode == 0 and good.stdout.startswith("ok: ")
    bad = run("ckpt", "verify", tmp_path / "runs" / "second")
    assert bad.returncode == 4 and "opt.pt" in bad.stderr
    absent = run("ckpt", "show", tmp_path / "nothing")
    assert absent.returncode == 4 and "nothing" in absent.stderr and "next:" in absent.stderr
    (tmp_path / "runs" / "first" / "MANIFEST.json").write_text("{")
    damaged = run("ckpt", "list", tmp_path / "runs" / "first")
    assert damaged.returncode == 0 and "BROKEN" in damaged.stdout and "no checkpoints" not in damaged.stdout
    shutil.copytree(tmp_path / "runs" / "first", tmp_path / "saves" / "step-3")
    (tmp_path / "saves" / "MANIFEST.json").write_text("{")  # a damaged manifest hides no checkpoint of the folder
    both = run("ckpt", "list", tmp_path / "saves").stdout.splitlines()
    assert len(both) == 2 and "step-3" in both[0] and both[1].startswith(f"{tmp_path / 'saves'}  BROKEN")


@pytest.mark.parametrize("arguments", [["config", "check", "absent.yml"], ["ckpt", "nonsense"], ["--no-such-option"]])
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


def test_help_lists_the_verbs_and_imports_little() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "persia", "--help"], capture_output=True, text=True, check=True
    )
    assert all(f"  {verb} " in done.stdout for verb in ("up", "status", "config", "ckpt"))
    assert "persia.cli.main" in done.stderr
    assert not [name for name in ("torch", "numpy", "pydantic", "pyarrow") if name in done.stderr]


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command and group."""
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


HELP = """
import contextlib, io, json, sys
from persia.cli.main import app

for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        app([*words, "--help"], prog_name="persia")
    assert said.getvalue().startswith("Usage: " + " ".join(["persia", *words])), words
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.row("S3-42")
def test_the_help_of_every_command_imports_no_large_package() -> None:
    found = [*commands(typer.main.get_command(app))]
    assert ("profile", "report") in found and ("status",) in found
    done = subprocess.run([sys.executable, "-c", HELP, json.dumps(found)], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert "persia.cli.train" in loaded
    large = ("torch", "numpy", "pyarrow", "rich.table", "grpc", "psutil", "obstore", "lightgbm")
    assert not [name for name in large if name in loaded]


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (["status"], "persia status --nats-url"),
        (["up", "absent.yml"], "correct the path: persia up FILE"),
        (["ckpt", "copy", "one", "other"], "one URL such as s3://"),
        (["config", "check"], "persia config check FILE"),
    ],
)
def test_an_error_names_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], step: str
) -> None:
    for name in ("PERSIA_NATS_URL", "PERSIA_EMBEDDING_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.returncode == 2
    assert step in done.stderr and "Traceback" not in done.stderr
