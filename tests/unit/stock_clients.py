"""tritonclient in a separate environment, because it requires an older protobuf."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conftest import ROOT

_CLIENT = Path(__file__).with_name("triton_client.py")


def install(folder: Path) -> Path:
    """Create an environment with tritonclient, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    wanted = ROOT / "requirements" / "serving-clients.txt"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", wanted], check=True, env=own)
    return python


def ask(
    python: Path, places: Sequence[str], name: str, token: str, spec: Mapping[str, tuple[str, list[Any]]]
) -> list[tuple[str, list[float]]]:
    """Return the identity of the bundle and the scores: over HTTP with binary tensors, over HTTP with JSON, over gRPC.

    Args:
        python: The result of :func:`install`.
        places: The addresses for HTTP and for gRPC.
        name: The name of the model.
        token: The token.
        spec: The datatype and the values of each input.
    """
    words = [str(python), str(_CLIENT), *places, name, token, json.dumps(spec)]
    done = subprocess.run(words, env={}, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return [(version, scores) for version, scores in json.loads(done.stdout)]
