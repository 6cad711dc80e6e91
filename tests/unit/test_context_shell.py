"""``persia debug shell``: the copy of a folder that a container works on, and how the container is started."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import Verb
from terminal import Terminal
from waiting import wait_until

from persia.doctor import context, notebook
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
import os, sys
words = sys.argv[1:]
with open("{folder}/calls", "a") as file:
    print(os.environ.get("CUR_DIR", ""), *words, file=file)
if words[:3] == ["compose", "config", "--format"]:
    print(open("{folder}/config.json").read())
if words[:2] == ["compose", "run"]:
    command = words[words.index("trainer") + 1 :]
    os.chdir(os.environ["CUR_DIR"])
    os.execvp(command[0], command)
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
    assert "134.0 MiB, more than the 128.0 MiB allowed" in errors
    listed = [line.split()[-1] for line in errors.splitlines() if line.startswith("  ")]
    assert listed == ["data", "one.bin", "two.bin", "three.bin", "four.bin"]
    assert f"list what is not needed in {workspace}/.persiaignore" in errors and "DATA_DIR" in errors
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


@pytest.mark.row("S1-09")
def test_what_cannot_be_copied_is_named(workspace: Path, docker: Path, verb: Verb, tmp_path: Path) -> None:
    """Without the message, a link out of the folder or a socket would silently be missing in the container."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "big.parquet").write_text("rows")
    (workspace / "rows").symlink_to(tmp_path / "rows")
    (workspace / "big.parquet").symlink_to("../rows/big.parquet")
    (workspace / "absolute.py").symlink_to(workspace / "train.py")
    (workspace / "gone").symlink_to("nowhere")
    (workspace / "same.py").symlink_to("train.py")
    (workspace / "same").symlink_to("data")
    (workspace / "config").symlink_to(".git/HEAD")
    os.mkfifo(workspace / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(workspace / "socket"))
        found = context.read(workspace)
    assert {Path("same.py"), Path("same"), Path("train.py"), Path("data/rows.csv")} == {*found.files}
    assert sorted(found.skipped) == [
        f"absolute.py: a link to {workspace}/train.py, which is not in the container",
        "big.parquet: a link to ../rows/big.parquet, which is not in the container",
        "config: a link to .git/HEAD, which is not in the container",
        "gone: a link to nowhere, which does not exist",
        "pipe: a named pipe, not a file",
        f"rows: a link to {tmp_path}/rows, which is not in the container",
        "socket: a socket, not a file",
    ]
    run = ("debug", "shell", "--context", str(workspace))
    _, errors = verb(*run, "--", "sh", "-c", "cat same.py same/rows.csv > copied; test ! -e pipe")
    assert f"warning: left out of the copy of {workspace}:" in errors and "\n  and 2 more\n" in errors
    assert "mount it with DATA_DIR" in errors
    (workspace / ".persiaignore").write_text("/rows\n*.parquet\nabsolute.py\ngone\nconfig\npipe\nsocket\n")
    assert "warning" not in verb(*run, "--", "true")[1], "what the file names is not missed"


NOTEBOOK = """#!{python}
import http.server, os, sys
if sys.argv[1] == "-c":
    sys.exit()
token = os.environ["JUPYTER_TOKEN"]
open({folder!r} + "/token", "w").write(token)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_own = self.headers["Authorization"] == "token " + token
        if self.path == "/api/status" and is_own and not os.path.exists({folder!r} + "/answers"):
            open({folder!r} + "/asked", "w")
            is_own = False
        self.send_response(200 if is_own or self.path == "/stop" else 403)
        self.end_headers()
        if self.path == "/stop":
            os._exit(0)

    def log_message(self, *arguments):
        pass


http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
"""In place of jupyterlab: it answers /api/status with 403 until the file ``answers`` exists."""


def stopped(port: int) -> bool:
    """Ask the notebook to end, and return whether it got the request. It may end without a response."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/stop", timeout=10)
    except http.client.RemoteDisconnected:
        return True
    except OSError:  # the notebook does not listen yet
        return False
    return True


@pytest.fixture
def notebook_port(docker: Path) -> int:
    """Return the port of a notebook of the image."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    (docker / "python").write_text(NOTEBOOK.format(python=sys.executable, folder=str(docker), port=port))
    (docker / "python").chmod(0o755)
    return port


@pytest.mark.row("S1-07")
def test_a_notebook_prints_its_address_when_it_answers(
    workspace: Path, docker: Path, notebook_port: int, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that accepts connections is no proof, because Docker's proxy accepts them before the server listens."""
    opened: list[str] = []
    was_ready: list[bool] = []

    def browse(url: str) -> None:
        opened.append(url)
        was_ready.append((docker / "answers").exists())
        wait_until("the end", lambda: stopped(notebook_port), 30)

    def answer() -> None:
        wait_until("a request", lambda: (docker / "asked").exists() or opened, 60)
        (docker / "answers").touch()

    monkeypatch.setattr("webbrowser.open", browse)
    waiting = threading.Thread(target=answer)
    waiting.start()
    out, _ = verb("debug", "notebook", "--context", str(workspace), "--port", str(notebook_port))
    waiting.join()
    assert was_ready == [True], "it is not called ready before it answers"
    assert opened[0].startswith(f"http://127.0.0.1:{notebook_port}/lab?token=")
    assert f"notebook: {opened[0]}" in out
    call = (docker / "calls").read_text().splitlines()[-1]
    assert f"--publish 127.0.0.1:{notebook_port}:8888" in call and "--env JUPYTER_TOKEN " in call
    token = opened[0].partition("token=")[2]
    assert token not in call and (docker / "token").read_text() == token  # other users can read a command line


@pytest.mark.row("S1-07")
def test_a_notebook_that_does_not_answer_is_not_called_ready(
    workspace: Path, docker: Path, notebook_port: int, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persia.doctor.notebook.READY_S", 2.0)
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail(f"{url} is opened"))
    waiting = notebook._wait

    def wait(*arguments: Any) -> None:
        _, port, token, _ = arguments
        wait_until("the notebook to listen", lambda: "403" in notebook._no_answer(port, token), 60)
        waiting(*arguments)
        wait_until("the end", lambda: stopped(notebook_port), 30)

    monkeypatch.setattr("persia.doctor.notebook._wait", wait)
    out, errors = verb("debug", "notebook", "--context", str(workspace), "--port", str(notebook_port))
    assert "notebook:" not in out
    assert f"the notebook does not respond at 127.0.0.1:{notebook_port} after 2 s: HTTP Error 403" in errors
    with socket.create_server(("127.0.0.1", notebook_port)):
        _, errors = verb("debug", "notebook", "--context", str(workspace), "--port", str(notebook_port), code=2)
        assert f"--port {notebook_port}: port {notebook_port} is in use by pid {os.getpid()}" in errors


@pytest.mark.row("S1-07")
def test_a_shell_has_the_terminal(workspace: Path, docker: Path) -> None:
    """On a terminal, docker gets no ``--no-TTY``, and the shell has the terminal as its standard streams."""
    shell = Terminal(
        ["-m", "persia", "debug", "shell", "--context", str(workspace)], env={**os.environ, "PS1": "$ "}, cwd=workspace
    )
    shell.expect(r"changes in it are lost")
    shell.type("tty; test -t 0 && test -t 1 && echo it is a $((1 + 1))-way terminal\n")
    shell.expect(r"/dev/pts/\d+\s")
    shell.expect(r"it is a 2-way terminal")
    shell.type("exit 5\n")
    assert shell.wait() == 5
    call = (docker / "calls").read_text().splitlines()[-1]
    assert " --no-TTY " not in call and call.endswith(" trainer bash")


def test_a_shell_that_is_stopped_leaves_no_copy(workspace: Path, docker: Path) -> None:
    words = [sys.executable, "-m", "persia", "debug", "shell", "--context", str(workspace), "--"]
    words += ["sh", "-c", "pwd; exec sleep 600"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        copy = Path(process.stdout.readline().strip())
        assert copy.is_dir()
        process.terminate()
        assert process.wait(60) == 75 and not copy.parent.exists()
        assert process.stdout.read() == "", "the command has ended: no process has the pipe"


def test_a_stop_before_the_container_runs_leaves_no_copy(workspace: Path, docker: Path, tmp_path: Path) -> None:
    """The fake docker stops its parent when it is asked for its version, after the parent has made the copy."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (docker / "docker").write_text(f'#!/bin/sh\nls "$TMPDIR" > {docker}/there\nkill -TERM $PPID\nexec sleep 600\n')
    words = [sys.executable, "-m", "persia", "debug", "shell", "--context", str(workspace), "--", "true"]
    done = subprocess.run(words, env={**os.environ, "TMPDIR": str(temporary)}, check=False, timeout=120)
    assert done.returncode == 75
    assert (docker / "there").read_text().startswith("persia-context-") and not [*temporary.iterdir()]


def test_without_an_image_the_next_step_is_told(workspace: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(workspace))
    _, errors = verb("debug", "shell", "--context", str(workspace), code=3)
    assert "docker is not on PATH" in errors and "next:  install Docker with its compose plugin" in errors
