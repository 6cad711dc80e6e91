"""Errors at the start: one clear line, the right exit code, within seconds."""

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT
from stack import MakeStack, Stack, missing

from persia.launch.binaries import MIDDLEWARE, SERVER
from persia.utils import resolve_binary_execute_path

SECONDS = 20.0
"""A start that fails takes less time than this, even on a busy machine."""
TRAIN = """\
import torch
from conftest import Batches, TinyModel
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD

model = TinyModel()
with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx:
    for batch in DataLoader(Batches(2)):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
print("trained")
"""


@pytest.fixture(autouse=True)
def binaries(no_job: None) -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def start(binary: str, *arguments: object, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a binary that ends on its own."""
    return subprocess.run(
        [resolve_binary_execute_path(binary), *map(str, arguments)],
        env={**os.environ, "LOG_FORMAT": "text", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def train(stack: Stack, script: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run one rank of a script that ends on its own."""
    words = ["-m", "persia.launch.cli", "nn-worker", str(script)]
    part = stack.python("trainer", *words, env={"PERSIA_START_TIMEOUT": "5", **env})
    code = part.wait()
    return subprocess.CompletedProcess(words, code, stderr=part.output)


def one_line(text: str) -> str:
    """Return the last line that is neither a hint nor a place. Check that there is no traceback and no panic."""
    assert "Traceback" not in text and "panicked" not in text, text
    lines = [line for line in text.strip().splitlines() if not line.startswith(("next:", "  at ", "persia-launcher:"))]
    assert lines, "nothing was said"
    return lines[-1]


def test_missing_configuration(tmp_path: Path) -> None:
    done = start(SERVER, "--embedding-config", tmp_path / "no.yml", "--listen", "127.0.0.1:0")
    assert done.returncode == 2, done.stderr
    assert "no.yml" in one_line(done.stderr)


def test_a_middleware_that_is_told_of_no_servers() -> None:
    done = start(MIDDLEWARE, "--listen", "127.0.0.1:0", "--metrics-listen", "off")
    assert done.returncode == 2, done.stderr
    assert "PERSIA_NATS_URL" in one_line(done.stderr)


def test_no_configuration() -> None:
    done = start(SERVER, "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "PERSIA_EMBEDDING_CONFIG" in one_line(done.stderr)


@pytest.mark.row("S0-12")
@pytest.mark.parametrize("binary", [SERVER, MIDDLEWARE])
def test_wrong_replica_index(binary: str, tmp_path: Path) -> None:
    (tmp_path / "slots.yml").write_text("slots_config: {a: {dim: 4}}\n")
    env = {"PERSIA_EMBEDDING_CONFIG": str(tmp_path / "slots.yml"), "REPLICA_INDEX": "2", "REPLICA_SIZE": "2"}
    done = start(binary, "--listen", "127.0.0.1:0", "--metrics-listen", "off", env=env)
    assert done.returncode == 2
    assert "REPLICA_INDEX" in one_line(done.stderr)
    done = start(binary, env={**env, "REPLICA_INDEX": "{{.Task.Slot}}"})
    assert done.returncode == 2
    assert "{{.Task.Slot}}" in one_line(done.stderr)


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_port_taken(flag: str, make_stack: MakeStack) -> None:
    stack = make_stack(nats_only=True, tcp=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = {"--listen": "--metrics-listen", "--metrics-listen": "--listen"}[flag]
        done = start(SERVER, flag, f"127.0.0.1:{port}", other, "127.0.0.1:0", env=stack.job.client_env(stack.nats_url))
    assert done.returncode in {2, 75}, done.stderr
    assert str(port) in one_line(done.stderr)


def test_open_to_all_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "slots.yml").write_text("slots_config: {a: {dim: 4}}\n")
    done = start(SERVER, "--embedding-config", tmp_path / "slots.yml", "--listen", "0.0.0.0:0")
    assert done.returncode == 5, done.stderr
    assert "PERSIA_TOKEN_FILE" in one_line(done.stderr)


def test_trainer_without_nats(make_stack: MakeStack, script: Path) -> None:
    stack = make_stack(start=False)
    stack.nats_url = "nats://127.0.0.1:1"
    done = train(stack, script)
    assert done.returncode == 3, done.stderr
    assert "127.0.0.1:1" in one_line(done.stderr)


def test_trainer_without_servers(make_stack: MakeStack, script: Path) -> None:
    stack = make_stack(nats_only=True)
    done = train(stack, script)
    assert done.returncode == 3, done.stderr
    assert "middleware" in one_line(done.stderr)


def test_trainer_names_the_server_that_is_missing(make_stack: MakeStack, script: Path) -> None:
    stack = make_stack(servers=2, start=False)
    stack.start_nats()
    stack.start_part("server", 0)
    stack.start_part("middleware", 0).says("found ")  # the trainer has only 5 s to detect the missing server
    done = train(stack, script)
    assert done.returncode == 3, done.stderr
    assert "1" in one_line(done.stderr) and "server" in one_line(done.stderr)


@pytest.mark.row("S0-20")
def test_trainer_names_the_rank_that_is_missing(make_stack: MakeStack, script: Path) -> None:
    stack = make_stack()
    done = train(stack, script, REPLICA_SIZE="2", REPLICA_INDEX="1")
    assert done.returncode == 3, done.stderr
    assert "rank 0" in one_line(done.stderr)
    done = train(stack, script, REPLICA_SIZE="2", REPLICA_INDEX="0")
    assert done.returncode == 3, done.stderr
    assert "rank 1" in one_line(done.stderr)


def test_wrong_token(make_stack: MakeStack, script: Path, tmp_path: Path) -> None:
    stack = make_stack()
    other = tmp_path / "other"
    other.write_text("y" * 40)
    done = train(stack, script, PERSIA_TOKEN_FILE=str(other))
    assert done.returncode == 5, done.stderr
    one_line(done.stderr)
    other.write_text("short")
    done = train(stack, script, PERSIA_TOKEN_FILE=str(other))
    assert done.returncode in {2, 5}, done.stderr
    assert str(other) in one_line(done.stderr)


def certificates(folder: Path, name: str) -> dict[str, str]:
    """Create an authority and a certificate for ``persia``. Return the variables that name them."""
    folder.mkdir()
    ca, key, request, cert = (folder / f"{name}.{part}" for part in ("ca.pem", "key", "csr", "pem"))
    ca_key, extension = folder / f"{name}.ca.key", folder / "ext"
    extension.write_text("subjectAltName=DNS:persia\nbasicConstraints=CA:FALSE\n")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    sign = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extension]
    for words in (
        ["req", "-x509", *new, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=test authority"],
        ["req", *new, "-keyout", key, "-out", request, "-subj", "/CN=persia"],
        ["x509", "-req", "-in", request, "-out", cert, *sign],
    ):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
    return {"PERSIA_TLS_CERT": str(cert), "PERSIA_TLS_KEY": str(key), "PERSIA_TLS_CA": str(ca)}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_tls_and_a_wrong_authority(make_stack: MakeStack, script: Path, tmp_path: Path) -> None:
    right, wrong = certificates(tmp_path / "right", "right"), certificates(tmp_path / "wrong", "wrong")
    stack = make_stack(servers=2, tcp=True, env=right)
    done = train(stack, script, PERSIA_START_TIMEOUT="60")
    assert done.returncode == 0, done.stderr
    done = train(stack, script, PERSIA_TLS_CA=wrong["PERSIA_TLS_CA"], PERSIA_RUN_DIR=str(tmp_path / "other"))
    assert done.returncode in {3, 5}, done.stderr
    assert "certificate" in one_line(done.stderr).lower()


def test_another_configuration(make_stack: MakeStack, script: Path, tmp_path: Path) -> None:
    stack = make_stack()
    other = tmp_path / "other.yml"
    other.write_text("slots_config: {a: {dim: 4}, b: {dim: 8}}\n")
    done = train(stack, script, PERSIA_EMBEDDING_CONFIG=str(other))
    assert done.returncode == 2, done.stderr
    assert "8" in one_line(done.stderr) and "4" in one_line(done.stderr)


def test_parts_in_reverse_order(make_stack: MakeStack, script: Path) -> None:
    stack = make_stack(servers=2, middlewares=2, start=False)
    stack.choose_nats()
    trainer = stack.trainer(script)
    for index in range(2):
        stack.start_part("middleware", index)
    for index in range(2):
        stack.start_part("server", index)
    stack.start_nats()
    assert trainer.wait() == 0, trainer.output
    assert "trained" in trainer.output


def test_sigterm_ends_a_server_with_0(make_stack: MakeStack) -> None:
    stack = make_stack()
    assert stack.stop("middleware-0") == 0
    assert stack.stop("server-0") == 0


def test_a_summary_that_cannot_be_written_is_told_on_every_rank(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    ranks = ROOT / "tests" / "integration" / "rank_script.py"
    path = tmp_path / "train.py"
    path.write_text(
        "import os, pathlib, runpy\n"
        "if os.environ['RANK'] == '0':\n    pathlib.Path(os.environ['PERSIA_RUN_DIR']).write_text('a file')\n"
        f"runpy.run_path({str(ranks)!r}, run_name='__main__')\n"
    )
    first = stack.trainer(path, '{"steps": 2}', node=0, nodes=2)
    # The second launcher and its rank read the summary too, perhaps after rank 0 has replaced the folder by a file.
    own = {"PERSIA_RUN_DIR": str(tmp_path / "of-rank-1")}
    second = stack.trainer(path, '{"steps": 2}', node=1, nodes=2, env=own)
    assert first.wait() == 1, first.output
    assert second.wait() == 75, second.output
    first.says("error: cannot write the summary of the run to ")
    second.says("rank 0 is gone: StorageError: cannot write the summary of the run to ")


def test_a_script_that_exits_with_0_in_its_context_has_finished(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    path = tmp_path / "train.py"
    path.write_text(TRAIN.replace('print("trained")', "    raise SystemExit"))
    trainer = stack.trainer(path)
    assert trainer.wait() == 0, trainer.output
    assert '"finished"' in (stack.folder / "run" / "summary.json").read_text()
