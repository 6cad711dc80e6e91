"""TorchServe scores through InferCtx: a handler in PersiaML's style, and PersiaML's own handler and client, unmodified.

``PERSIA_TEST_TORCHSERVE`` is the ``bin`` folder of an environment with torchserve, torch-model-archiver, grpcio-tools,
tqdm, scikit-learn and the requirements of Persia; ``PERSIA_TEST_PERSIAML`` is a clone of PersiaML.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from infer_job import InferJob
from stack import missing
from waiting import wait_until

from persia.ctx import eval_ctx
from persia.launch.local_job import free_ports

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

TORCHSERVE = os.environ.get("PERSIA_TEST_TORCHSERVE", "")
PERSIAML = os.environ.get("PERSIA_TEST_PERSIAML", "")
PAIR = ROOT / "tests" / "persiaml_style"
START, DEADLINE = 120.0, 400.0
GRPC_PORT = 7070
"""The port that PersiaML's client calls, TorchServe's default."""


class TorchServe:
    """A TorchServe with one model."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self.folder = programs, folder
        self.port = free_ports(None, 3)
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PERSIA_")},
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(folder / "proto")]),
            "PYTHONWARNINGS": "ignore",
            "LOG_LOCATION": str(folder / "logs"),
            "METRICS_LOCATION": str(folder / "logs"),
        }

    def run(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Run a command in the environment, and return its output."""
        done = subprocess.run(
            [*map(str, words)],
            env=self.env,
            cwd=cwd or self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, done.stdout + self.logs()
        return done.stdout

    def start(self, name: str, model: Path, handler: Path) -> None:
        """Package the scripted model and the handler, and serve them with one worker."""
        archive = ["--model-name", name, "--version", "1.0", "--serialized-file", str(model), "--handler", str(handler)]
        self.run(self.programs / "torch-model-archiver", *archive, "--export-path", self.folder, "-f")
        kinds = enumerate(("inference", "management", "metrics"))
        lines = [f"{kind}_address=http://127.0.0.1:{self.port + offset}" for offset, kind in kinds]
        (self.folder / "ts.properties").write_text("\n".join([*lines, "default_workers_per_model=1", ""]))
        store = ["--model-store", str(self.folder), "--models", f"{name}.mar", "--ts-config", "ts.properties"]
        words = [str(self.programs / "torchserve"), "--start", "--ncs", "--disable-token-auth", *store]
        with (self.folder / "torchserve.log").open("w") as log:  # the server inherits the file, and keeps it open
            subprocess.run(words, env=self.env, cwd=self.folder, check=True, stdout=log, stderr=log, timeout=START)

        def is_ready() -> bool:
            done = subprocess.run(
                ["curl", "-sf", f"http://127.0.0.1:{self.port + 1}/models/{name}"],
                capture_output=True,
                text=True,
                check=False,
            )
            workers = json.loads(done.stdout)[0]["workers"] if done.returncode == 0 else []
            return bool(workers) and all(worker["status"] == "READY" for worker in workers)

        wait_until("TorchServe's worker", is_ready, START, evidence=self.logs, interval=0.5)

    def stop(self) -> None:
        """Stop TorchServe."""
        words = [str(self.programs / "torchserve"), "--stop"]
        subprocess.run(words, env=self.env, check=False, capture_output=True, timeout=60)

    def logs(self) -> str:
        """Return the log of TorchServe and its workers."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted((self.folder / "logs").glob("*.log")))


@pytest.fixture
def serve(no_job: None, tmp_path: Path) -> Iterator[TorchServe]:
    """Return a TorchServe that is not started. It ends with the test."""
    if not TORCHSERVE or not (Path(TORCHSERVE) / "torchserve").exists():
        pytest.skip("no TorchServe: PERSIA_TEST_TORCHSERVE does not name the programs of an environment with it")
    if absent := [name for name in ("java", "curl") if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(absent)}, which TorchServe or this test needs")
    if reason := missing():
        pytest.skip(reason)
    made = TorchServe(Path(TORCHSERVE), tmp_path)
    yield made
    made.stop()
    sys.stdout.write(made.logs())


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[[Path], InferJob]]:
    """Serve a checkpoint by two servers and two middlewares, which end with the test."""
    made: list[InferJob] = []

    def make(checkpoint: Path) -> InferJob:
        made.append(InferJob(tmp_path, checkpoint, middlewares=2).start())
        return made[-1]

    yield make
    for job in made:
        job.close()
        sys.stdout.write(job.logs())


def test_scores_are_those_of_evaluation(
    serve: TorchServe,
    make_job: Callable[[Path], InferJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripts = Path(shutil.copytree(PAIR, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__", "runs")))
    checkpoint = tmp_path / "checkpoint"
    serve.env |= {"BATCHES": "60", "STOP_AT": "60", "REPRODUCIBLE": "1", "CHECKPOINT": str(checkpoint)}
    serve.run(sys.executable, "train.py", cwd=scripts)
    monkeypatch.syspath_prepend(str(scripts))
    monkeypatch.chdir(scripts)
    people, train = (importlib.import_module(name) for name in ("people", "train"))
    requests = [*people.batches(3, 64, seed=99, requires_grad=False)]
    with eval_ctx(model=train.DNN()) as evaluation, torch.no_grad():
        evaluation.load_checkpoint(checkpoint)
        expected = [evaluation.forward(request)[0].flatten().numpy().copy() for request in requests]
    job = make_job(checkpoint)
    serve.env["EMBEDDING_WORKER_SERVICE"] = ",".join(job.middlewares)
    serve.start("people", checkpoint / "jit_dense.pt", scripts / "serve_handler.py")

    def score(number: int) -> np.ndarray:
        (tmp_path / "batch").write_bytes(requests[number].to_bytes())
        url = f"http://127.0.0.1:{serve.port}/predictions/people"
        return np.array(json.loads(serve.run("curl", "-sSf", url, "-F", "batch=@batch")), np.float32)

    for number, scores in enumerate(expected):
        np.testing.assert_allclose(score(number), scores, rtol=1e-6, atol=1e-7)
    job.kill("middleware-0")
    job.kill("server-1")
    job.start_server(1)  # the look-up waits for this server
    np.testing.assert_allclose(score(0), expected[0], rtol=1e-6, atol=1e-7)


def write_people(path: Path, seed: int, count: int) -> None:
    """Write invented rows in the format of PersiaML's data: slots as in its configuration, five numbers, a label."""
    rng = np.random.default_rng(seed)
    slots = [
        "workclass",
        "education",
        "marital_status",
        "occupation",
        "relationship",
        "race",
        "gender",
        "native_country",
    ]
    ids = rng.integers(0, 12, (count, len(slots)), dtype=np.uint64)
    numbers = rng.standard_normal((count, 5)).astype(np.float32)
    taste = np.random.default_rng(0).normal(size=(len(slots), 12))
    score = sum(taste[slot, ids[:, slot]] for slot in range(len(slots))) + numbers[:, 0]
    target = (score > 0).astype(np.float32)
    np.savez_compressed(
        path, target=target, continuous_data=numbers, categorical_data=ids, categorical_columns=np.array(slots)
    )


def test_the_handler_and_client_of_persiaml_run_unmodified(
    serve: TorchServe, make_job: Callable[[Path], InferJob], tmp_path: Path
) -> None:
    example = Path(PERSIAML) / "examples" / "src" / "adult-income"
    if not PERSIAML or not (example / "serve_handler.py").is_file():
        pytest.skip("no clone of PersiaML: PERSIA_TEST_PERSIAML does not name one")
    if free_ports(GRPC_PORT, 1) != GRPC_PORT:
        pytest.skip(f"port {GRPC_PORT}, which PersiaML's client calls, is in use")
    scripts, checkpoint = Path(shutil.copytree(example, tmp_path / "scripts")), tmp_path / "checkpoint"
    python = serve.programs / "python"
    write_people(scripts / "data" / "train.npz", 1, 254 * 128)
    write_people(scripts / "data" / "test.npz", 2, 4_000)
    serve.env |= {"PERSIA_CKPT_DIR": str(checkpoint), "REPRODUCIBLE": "1", "EMBEDDING_STALENESS": "8"}
    trained = re.search(r"test auc is ([0-9.]+)", serve.run(python, "train.py", cwd=scripts))
    assert trained
    protocol, generated = Path(PERSIAML) / "resources" / "proto", tmp_path / "proto"
    generated.mkdir()
    out = [f"--python_out={generated}", f"--grpc_python_out={generated}"]
    serve.run(python, "-m", "grpc_tools.protoc", f"--proto_path={protocol}", *out, protocol / "inference.proto")
    serve.env["EMBEDDING_WORKER_SERVICE"] = ",".join(make_job(checkpoint).middlewares)
    serve.start("adult_income", checkpoint / "jit_dense.pt", scripts / "serve_handler.py")
    served = re.search(r"infer_auc = ([0-9.]+)", serve.run(python, "serve_client.py", cwd=scripts))
    sys.stdout.write(f"PersiaML: {trained[0]} in training, {served and served[0]} by TorchServe\n")
    assert served and abs(float(served[1]) - float(trained[1])) < 1e-4, "the batch size is the only difference"
