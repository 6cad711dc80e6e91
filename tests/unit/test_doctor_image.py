"""``persia doctor --image`` and ``--diff-env``: the content of the image, with a docker that answers from files."""

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from conftest import Verb

from persia.doctor import compose, run
from persia.doctor.check import Check
from persia.runtime.exit_codes import ExitCode


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake docker that answers from files of a folder: ``config.json`` and ``run.txt``."""
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "services": {
                    "trainer": {
                        "image": "persia/runtime:dev",
                        "environment": {"LOG_LEVEL": "info", "UNSET": None},
                        "volumes": [
                            {"type": "bind", "source": str(folder), "target": "/workspace"},
                            {"type": "bind", "source": str(folder / "gone"), "target": "/data"},
                        ],
                    }
                }
            }
        )
    )
    (folder / "run.txt").write_text("")
    program = folder / "docker"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
        f'case "$*" in *"--format json"*) cat {folder}/config.json ;; *" run "*) cat {folder}/run.txt ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.row("S1-24", "S1-16")
def test_the_image_is_checked_from_inside(docker: Path, verb: Verb) -> None:
    inner = run.to_json([Check("torch", "ok", "2.8"), Check("gpu", "fail", "no device", "why", "do", ExitCode.CONFIG)])
    (docker / "run.txt").write_text(f"running persia_core.so: packaged\n{inner}\n")
    out, _ = verb("doctor", "--image", code=2)
    assert "ok    image          persia/runtime:dev" in out and "image torch" in out and "no device" in out
    assert (
        "run --rm --no-deps --no-TTY trainer persia doctor --only versions,gpu --json" in (docker / "calls").read_text()
    )
    assert "none in CUR_DIR" in out and f"{docker} as /workspace" in out and "LOG_LEVEL" in out and "UNSET" not in out
    assert f"do not exist: {docker / 'gone'}" in out
    (docker / "startup-hook.sh").write_text("true")
    assert str(docker / "startup-hook.sh") in next(
        check.found for check in compose.in_use(compose.settings()) if check.name == "startup hook"
    )
    (docker / "run.txt").write_text("bash: persia: command not found\n")
    out, _ = verb("doctor", "--image", code=2)
    assert "persia doctor does not run in the image" in out


@pytest.mark.row("S1-11")
def test_packages_that_differ_come_first(docker: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    here = importlib.metadata.version("numpy")
    (docker / "run.txt").write_text(json.dumps({"numpy": here, "torch": "1.0", "only-there": "2"}) + "\n")
    out, _ = verb("doctor", "--diff-env")
    rows = [line.split("│")[1:4] for line in out.splitlines() if line.startswith("│")]
    names = [row[0].strip() for row in rows]
    assert names[0] == "torch" and rows[0][2].strip() == "1.0"
    assert names.index("only-there") < names.index("numpy")
    assert "different, 1 equal" in out


def test_without_docker_the_reason_is_told(verb: Verb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out, _ = verb("doctor", "--image", code=3)
    assert "docker is not on PATH" in out
    _, errors = verb("doctor", "--diff-env", code=3)
    assert "docker is not on PATH" in errors
