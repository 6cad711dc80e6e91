"""``persia debug shell``: the copy of a folder that a container works on, and how the container is started."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from conftest import Verb

from persia.doctor import context
from persia.errors import UsageError


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "data" / "rows.csv").write_text("a,b\n")
    for name in ("__pycache__/x.pyc", ".git/HEAD", ".venv/bin/python"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x")
    return folder


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker that runs the command of ``run`` in the folder that would be /workspace, and records its calls."""
    folder = tmp_path / "docker"
    folder.mkdir()
    variables = {"PERSIA_EMBEDDING_CONFIG": "mine.yml", "PERSIA_GLOBAL_CONFIG": "/workspace/config/global_config.yml"}
    config = {"services": {"trainer": {"image": "persia/runtime:dev", "environment": variables}}}
    (folder / "config.json").write_text(json.dumps(config))
    program = folder / "docker"
    program.write_text(
        f"""#!/usr/bin/env python3
import os, subprocess, sys
words = sys.argv[1:]
with open("{folder}/calls", "a") as file:
    print(os.environ.get("CUR_DIR", ""), *words, file=file)
if words[:3] == ["compose", "config", "--format"]:
    print(open("{folder}/config.json").read())
if words[:2] == ["compose", "run"]:
    sys.exit(subprocess.run(words[words.index("trainer") + 1 :], cwd=os.environ["CUR_DIR"]).returncode)
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_what_is_left_out(workspace: Path) -> None:
    assert context.read(workspace).files == [Path("train.py"), Path("data/rows.csv")]
    (workspace / ".persiaignore").write_text("*.csv\n!keep.csv\n")
    (workspace / "keep.csv").write_text("k")
    assert context.read(workspace).files == [Path(".persiaignore"), Path("keep.csv"), Path("train.py")]


def test_a_missing_package_is_named(workspace: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pathspec", None)
    _, errors = verb("debug", "shell", "--context", str(workspace), code=2)
    assert "the package pathspec" in errors and "next:  pip install pathspec" in errors


@pytest.mark.row("S1-09")
def test_a_context_that_is_too_large_lists_its_largest_entries(workspace: Path, verb: Verb) -> None:
    sizes = {"data/big.bin": 100, "one.bin": 20, "two.bin": 5, "three.bin": 4, "four.bin": 3, "five.bin": 2}
    for name, mebibytes in sizes.items():
        with (workspace / name).open("wb") as file:
            file.truncate(mebibytes << 20)  # sparse: it takes no space
    _, errors = verb("debug", "shell", "--context", str(workspace), code=2)
    assert "134.0 MiB, more than 128.0 MiB" in errors
    listed = [line.split()[-1] for line in errors.splitlines() if line.startswith("  ")]
    assert listed == ["data", "one.bin", "two.bin", "three.bin", "four.bin"]
    assert f"name what is not needed in {workspace}/.persiaignore" in errors and "DATA_DIR" in errors
    (workspace / ".persiaignore").write_text("data/\n")
    assert context.read(workspace).bytes < context.LIMIT
    with pytest.raises(UsageError, match="no such folder"):
        context.read(workspace / "gone")


@pytest.mark.row("S1-06", "S1-08")
def test_a_command_works_on_a_copy(workspace: Path, docker: Path, verb: Verb) -> None:
    run = ("debug", "shell", "--context", str(workspace))
    before = (workspace / "train.py").read_text()
    write = "echo changed > train.py; ls -A; pwd; exit 7"
    _, errors = verb(*run, "--", "sh", "-c", write, code=7)
    assert "/workspace is a copy: changes in it are lost at the end" in errors
    assert (workspace / "train.py").read_text() == before
    call = (docker / "calls").read_text().splitlines()[-1]
    copy = Path(call.split()[0])
    assert " compose run --rm --no-deps --no-TTY --workdir /workspace --env PERSIA_NATS_URL=" in call
    assert " --env PERSIA_GLOBAL_CONFIG= trainer sh" in call and "PERSIA_EMBEDDING_CONFIG" not in call
    assert copy != workspace and not copy.exists(), "the copy is removed"
    _, errors = verb(*run, "--mount", "--", "sh", "-c", write, code=7)
    assert f"/workspace is {workspace} itself" in errors
    assert (workspace / "train.py").read_text() == "changed\n"
    verb(*run, "--stack", "--", "true")
    assert "PERSIA_NATS_URL" not in (docker / "calls").read_text().splitlines()[-1]


@pytest.mark.row("S1-07")
def test_a_notebook_prints_its_address_when_it_listens(
    workspace: Path, docker: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.listen()
        _, errors = verb("debug", "notebook", "--context", str(workspace), "--port", str(port), code=2)
        assert f"--port {port}: port {port} in use by pid {os.getpid()}" in errors
    opened: list[str] = []
    # In place of the image's jupyterlab: a server that ends after two connections.
    (docker / "python").write_text(
        f"#!{sys.executable}\nimport os, socket, sys\nif sys.argv[1] == '-c':\n    sys.exit()\n"
        f"open({str(docker / 'token')!r}, 'w').write(os.environ['JUPYTER_TOKEN'])\n"
        f"server = socket.create_server(('127.0.0.1', {port}))\nserver.accept()\nserver.accept()\n"
    )
    (docker / "python").chmod(0o755)

    def browse(url: str) -> None:
        opened.append(url)
        socket.create_connection(("127.0.0.1", port)).close()

    monkeypatch.setattr("webbrowser.open", browse)
    out, _ = verb("debug", "notebook", "--context", str(workspace), "--port", str(port))
    assert opened and opened[0].startswith(f"http://127.0.0.1:{port}/lab?token=")
    assert f"notebook: {opened[0]}" in out
    call = (docker / "calls").read_text().splitlines()[-1]
    assert f"--publish 127.0.0.1:{port}:8888" in call and "--env JUPYTER_TOKEN " in call
    token = opened[0].partition("token=")[2]
    assert token not in call and (docker / "token").read_text() == token  # other users can read a command line


def test_without_an_image_the_next_step_is_told(workspace: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(workspace))
    _, errors = verb("debug", "shell", "--context", str(workspace), code=3)
    assert "docker is not on PATH" in errors and "docker compose build" in errors
