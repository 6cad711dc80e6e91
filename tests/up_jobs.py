"""``persia up`` in a separate folder, and its output, for tests."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from stack import missing
from waiting import is_running, wait_until

DEADLINE = 180.0
TRAIN = """\
import os
from pathlib import Path
import torch
from conftest import Batches, TinyModel
from waiting import wait_until
from persia import distributed, env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD

torch.manual_seed(0)
model = TinyModel()
with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx:
    for step, batch in enumerate(DataLoader(Batches(int(os.environ["STEPS"]), seed=env.get_rank()))):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        print(f"step {step} rank {env.get_rank()}", flush=True)
        if step == 2 and "HOLD" in os.environ:
            wait_until("the test", Path(os.environ["HOLD"]).exists, 60)
    rows = sum(ctx.get_embedding_size())
distributed.report({"rows": rows})
"""


class Up:
    """A running ``persia up``, and its output."""

    def __init__(self, folder: Path, config: str, options: Sequence[str], env: Mapping[str, str]) -> None:
        (folder / "job.yml").write_text(config)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "persia", "up", "job.yml", *options],
            cwd=folder,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def child(self, program: str, **variables: str) -> psutil.Process:
        """Return the only child process whose command line has ``program``, with these environment variables."""

        def matches(child: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):  # the process may end in the meantime
                return (
                    bool(re.search(program, " ".join(child.cmdline()))) and variables.items() <= child.environ().items()
                )
            return False

        found = [child for child in self.children() if matches(child)]
        assert len(found) == 1, found
        return found[0]

    def says(self, pattern: str) -> str:
        """Wait for a line that matches, and return it."""

        def said() -> str | None:
            ended = not self._reader.is_alive()
            line = next((line for line in list(self.lines) if re.search(pattern, line)), None)
            assert line or not ended, f"no line matches {pattern!r}\n{self.output}"
            return line

        return wait_until(f"a line that matches {pattern!r}", said, DEADLINE, evidence=lambda: self.output)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        sys.stdout.write(self.output + "\n")  # shown if the test failed


StartUp = Callable[..., Up]


@pytest.fixture
def up(no_job: None, tmp_path: Path) -> Iterator[StartUp]:
    """Run ``persia up`` on a configuration, in a folder with slots and a small training script."""
    (tmp_path / "slots.yml").write_text("slots_config: {a: {dim: 4}, b: {dim: 4}}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    started: list[Up] = []

    def start(config: str, *options: str, **env: str) -> Up:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {"STEPS": "3", "PERSIA_RPC_TIMEOUT": "15", "PYTHONPATH": path, **env}
        started.append(Up(tmp_path, config, options, environment))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def binaries() -> None:
    if reason := missing():
        pytest.skip(reason)


def ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE)
    return not [process for process in alive if is_running(process.pid)]
