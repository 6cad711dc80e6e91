"""The DLRM example trained on a device reaches the AUC of the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


def auc(folder: Path, gpus: int) -> float:
    command = [sys.executable, str(ROOT / "examples" / "dlrm" / "train.py"), "--out", str(folder)]
    environment = {**os.environ, "GPU_NUM": str(gpus)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = folder.glob("*/summary.json")
    return float(json.loads(summary.read_text())["auc"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_device_reaches_the_auc_of_the_cpu(tmp_path: Path) -> None:
    assert auc(tmp_path / "cuda", 1) == pytest.approx(auc(tmp_path / "cpu", 0), abs=0.001)
