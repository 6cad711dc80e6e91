"""The exit codes of ``persia serve``, which docs/serve.md lists. Signals and faults: ``test_serving_faults.py``."""

import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from serving_model import SmallModel
from serving_process import write_bundle

from persia.cli.main import main
from persia.errors import UnreachableError
from persia.runtime.exit_codes import ExitCode
from persia.serving.server import Options, serve

VARIABLES = ("PERSIA_TOKEN_FILE", "PERSIA_TLS_CERT", "PERSIA_TLS_KEY", "PERSIA_BUNDLE")
BY_SIGNALS = {0, 1, 75, 130}
"""The codes of processes in ``test_serving_faults.py``."""
MISTAKES = {
    "no bundle is specified": ([], 2, "no BUNDLE"),
    "no address": (["{}/bundle", "--http", "nowhere"], 2, "--http nowhere: expected HOST:PORT"),
    "no number": (["{}/bundle", "--waiting", "many"], 2, "Invalid value for '--waiting'"),
    "a folder without a bundle": (["{}/empty"], 4, "no bundle: the folder has neither"),
    "no folder": (["{}/none"], 4, "no bundle: No such file"),
    "a damaged manifest": (["{}/bundle"], 4, "manifest.json"),
    "a public address without a token": (["{}/bundle", "--http", "0.0.0.0:0"], 5, "refusing to listen without a token"),
    "no server": (["--health", "--http", "127.0.0.1:1"], 1, ""),
}
Ends = Callable[..., tuple[int, str]]


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ends:
    """Run the command, and return its exit code and its output."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").mkdir()
    write_bundle(tmp_path / "bundle", 1.0)  # persia export did not write this bundle

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["persia", "serve", *(each.format(tmp_path) for each in words)])
        with pytest.raises(SystemExit) as ended:
            main()
        found = capfd.readouterr()
        return int(ended.value.code or 0), " ".join((found.out + found.err).split())

    return run


def listed() -> set[int]:
    """Return the exit codes on the page docs/serve.md."""
    section = (ROOT / "docs" / "serve.md").read_text().partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    return {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_its_code_and_a_message(ends: Ends, mistake: str) -> None:
    words, code, message = MISTAKES[mistake]
    found, said = ends(*words)
    assert (found, message in said) == (code, True), said
    assert "Traceback" not in said


def test_a_token_and_a_certificate_that_cannot_be_read(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_TOKEN_FILE", str(tmp_path / "none"))
    code, said = ends("{}/bundle")
    assert code == 5 and f"{tmp_path / 'none'}" in said
    monkeypatch.delenv("PERSIA_TOKEN_FILE")
    monkeypatch.setenv("PERSIA_TLS_CERT", str(tmp_path / "none"))
    code, said = ends("{}/bundle")
    assert code == 2 and f"cannot read PERSIA_TLS_CERT={tmp_path / 'none'}: No such file" in said and "ls -l" in said
    (tmp_path / "none").touch()
    code, said = ends("{}/bundle")
    assert code == 2 and "PERSIA_TLS_KEY is not set" in said and "export PERSIA_TLS_KEY=FILE" in said


def test_a_package_that_is_missing(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.delitem(sys.modules, "persia.serving.server")
    code, said = ends("{}/bundle")
    assert code == 2 and "needs the package uvloop" in said and "persia[serve]" in said


@pytest.mark.parametrize("option", ["http", "grpc"])
def test_a_port_that_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    bundle = write_bundle(tmp_path / "bundle", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        addresses = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", option: taken}
        options = Options(addresses["http"], addresses["grpc"])
        with pytest.raises(UnreachableError, match=f"--{option}: cannot listen on {taken}") as raised:
            serve(bundle, options, lambda path: SmallModel())
    assert raised.value.exit_code == 3


def test_the_page_lists_every_code() -> None:
    assert listed() == BY_SIGNALS | {code for _, code, _ in MISTAKES.values()} | {3}
    assert listed() <= {*map(int, ExitCode)}
