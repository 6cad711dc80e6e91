"""The compiled module: its build information, its stubs, and a stale module."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import persia
import persia_core


def loaded_file() -> Path:
    return Path(persia_core.__file__)


@pytest.mark.stack
def test_build_information() -> None:
    assert persia_core.__version__ == persia.__version__
    assert set(persia_core.BUILD_INFO) >= {"profile", "target", "rustc", "features"}
    assert isinstance(persia_core.FEATURES, list)
    assert loaded_file().suffix == ".so"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_process_waits_until_the_name_of_nats_has_an_address(tmp_path: Path) -> None:
    """In a stack, a service may start before the container of NATS. Until then, the name of NATS has no address."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    ask = "from persia_core.discovery import advertised_host as ask; print(ask('nats://late-nats:4222', timeout_s={}))"
    mount = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts))

    def start(timeout_s: float) -> "subprocess.Popen[str]":
        words = (*mount, sys.executable, "-c", ask.format(timeout_s))
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start(0.5) as process:
        output, errors = process.communicate(timeout=60)
        assert process.returncode != 0 and not output
        assert "cannot determine the address from which this host reaches NATS at nats://late-nats:4222" in errors
    with start(60) as process:
        assert process.stderr is not None
        assert any("waiting for NATS" in line for line in process.stderr)
        hosts.write_text("127.0.0.1 localhost late-nats\n")
        assert process.communicate(timeout=60)[0] == "127.0.0.1\n"


@pytest.mark.stack
def test_a_misaligned_gradient_is_refused() -> None:
    import numpy as np

    from persia.errors import FeatureTypeError

    values = np.zeros(4 * 8 + 1, np.uint8)[1:].view(np.float32)
    with pytest.raises(FeatureTypeError, match="aligned"):
        persia_core.backward.first_nonfinite(values)


@pytest.mark.stack
def test_submodules_can_be_imported_by_name() -> None:
    code = "import persia_core.forward, persia_core.backward as b; print(b.first_nonfinite.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "first_nonfinite", done.stderr


@pytest.mark.stack
@pytest.mark.row("S0-21")
def test_a_lone_library_wins_by_pythonpath(tmp_path: Path) -> None:
    """A persia_core.so on PYTHONPATH overrides the package, which stays installed."""
    shutil.copy(loaded_file(), tmp_path / "persia_core.so")
    code = "import persia, persia_core, persia_core.forward; print(persia_core.__file__, persia_core.FEATURES)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split()[0] == str(tmp_path / "persia_core.so"), done.stderr


def test_a_stale_library_is_refused_with_both_versions(tmp_path: Path) -> None:
    data = loaded_file().read_bytes()
    version = persia.__version__.encode()
    marker = b"persia_core version " + version
    assert marker in data, "the library carries its version as text"
    stale = data.replace(marker, b"persia_core version " + b"0" * (len(version) - 2) + b".9")
    (tmp_path / "persia_core.so").write_bytes(stale)
    done = subprocess.run(
        [sys.executable, "-c", "import persia"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "StaleCoreError" in done.stderr
    assert persia.__version__ in done.stderr and ".9" in done.stderr and "make setup" in done.stderr


def test_stubs_equal_the_binary(tmp_path: Path) -> None:
    if Path(persia_core.__file__).name == "persia_core.so":
        pytest.skip("persia_core.so stands alone here, without stubs")
    pytest.importorskip("mypy", reason="mypy is not installed here")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy.stubtest",
            "persia_core",
            "--allowlist",
            str(ROOT / "tests/unit/stubtest_allowlist.txt"),
        ],
        env={**os.environ, "MYPYPATH": str(ROOT / "rust_core/core/python")},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
