"""The wheels of both distributions install into a clean environment outside the clone, and train there."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.clone

TRAIN = """
import json
from pathlib import Path

import numpy as np
import persia
import persia_core
import torch
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD


class Parity(IterableDataset):
    # The label is the id's parity: only separate rows can learn it.
    def __iter__(self):
        for step in range(100):
            ids = np.random.default_rng(step).integers(0, 20, 32, dtype=np.uint64)
            yield PersiaBatch(
                [IDTypeFeatureWithSingleID("item", ids)],
                [NonIDTypeFeature(np.ones((32, 1), np.float32))],
                [Label((ids % 2).astype(np.float32)[:, None])],
            )


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)

    def forward(self, dense, embeddings):
        return self.layer(torch.cat([*dense, *embeddings], 1))


torch.manual_seed(0)
model, losses = Model(), []
dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with TrainCtx(SGD(5.0), dense_optimizer, mixed_precision=False, model=model) as ctx:
    for batch in DataLoader(Parity(), reproducible=True):
        output, labels = ctx.forward(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0])
        losses.append(float(ctx.backward(loss)))
    rows = ctx.get_embedding_size()
    ctx.dump_checkpoint("checkpoint")
result = {"losses": losses, "rows": sum(rows), "saved": Path("checkpoint/MANIFEST.json").exists()}
files = {"persia": persia.__file__, "persia_core": persia_core.__file__}
Path("result.json").write_text(json.dumps({**result, "files": files}))
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Return the output of a command. A failing command fails the test with its output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    inherited.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both wheels, as `make wheels` builds them."""
    folder = tmp_path_factory.mktemp("wheels")
    run("make", "wheels", f"DIST={folder}", cwd=ROOT)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def clean(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with both wheels.

    The dependencies come from the running environment by path, because a download of PyTorch takes long. Python does
    not read `.pth` files in a path that a `.pth` file adds, so editable packages are not found.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        *wheels,
        cwd=ROOT.parent,
    )
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", code, cwd=folder).strip())
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_one_wheel_serves_every_python(wheels: list[Path]) -> None:
    assert len(wheels) == 2
    pure, core = (wheel.name for wheel in wheels)
    assert pure.startswith("persia-")
    assert pure.endswith("-py3-none-any.whl")
    assert core.startswith("persia_core-")
    assert "-cp310-abi3-" in core


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_wheels_train_outside_the_clone(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    config = tmp_path / "config"
    config.mkdir()
    (config / "embedding_config.yml").write_text("slots_config: {item: {dim: 4}}\n")
    run(clean / "bin" / "python", "train.py", cwd=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert all(Path(file).is_relative_to(clean) for file in result["files"].values()), result["files"]
    losses = result["losses"]
    assert len(losses) == 100
    assert losses[0] > 0.6
    assert losses[-1] < 0.3
    assert result["rows"] == 20
    assert result["saved"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_command_is_installed(clean: Path, tmp_path: Path) -> None:
    version = run(clean / "bin" / "persia", "--version", cwd=tmp_path)
    assert f"from {clean}" in version
