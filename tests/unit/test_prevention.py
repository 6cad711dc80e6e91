"""Mistakes are detected before training: configuration, storage, quick checks before slow ones, locked versions."""

import re
from pathlib import Path

import pytest
from conftest import ROOT, Verb
from trainer_files import write_clicks, write_config

from persia.doctor import ladder


@pytest.mark.row("S3-41")
def test_a_run_checks_its_configuration_and_its_storage_itself(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path, train={"evaluate_every": 0}, run={"log_every": "often"})
    _, errors = verb("train", str(path), code=2)
    assert "train.evaluate_every" in errors and "run.log_every" in errors, "all mistakes together"
    path = write_config(tmp_path, checkpoint={"dir": "/proc/checkpoints"})
    out, errors = verb("train", str(path), code=1)
    assert "Checkpoint storage validation failed: /proc" in errors and "loss" not in out
    assert not [*tmp_path.glob("runs/*")], "no run was begun"


@pytest.mark.row("S3-41")
def test_the_ladder_tries_the_small_before_the_whole(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    titles = [step.title for step in ladder.steps(write_config(tmp_path))]
    assert len(titles) == 10 and titles[0].startswith("the model alone") and titles[-1].startswith("the whole run")
    one, whole = ([at for at, title in enumerate(titles) if title.startswith(start)] for start in ("one", "the whole"))
    assert one[0] < whole[0] and one[-1] < whole[-1], titles


@pytest.mark.clone
@pytest.mark.row("S3-41")
def test_versions_are_locked() -> None:
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    assert len(locks) > 5
    for lock in locks:
        text = lock.read_text().replace("\\\n", " ")
        found = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        wrong = [line for line in found if not re.match(r"\S+==\S+ .*--hash=sha256:", line)]
        assert found and not wrong, f"{lock.name}: {wrong[:3]}"
    assert (ROOT / "rust_core" / "Cargo.lock").is_file()
    commands = ((ROOT / "Makefile").read_text() + (ROOT / "services" / "Dockerfile").read_text()).replace("\\\n", " ")
    builds = re.findall(r"(?:cargo|\(CARGO\)|maturin) (?:build|develop)\b[^\n]*", commands)
    assert len(builds) >= 4 and all("--locked" in each for each in builds), builds
