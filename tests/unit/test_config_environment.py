"""The blocks ``dist`` and ``nccl``: variables of the ranks, shown by ``config show``."""

import logging
import os
from pathlib import Path

import pytest
import torch
from config_files import GOOD
from trainer_files import config_of, fit

import persia
from persia.config.document import open_document
from persia.config.environment import variables_of
from persia.config.show import show
from persia.errors import ConfigError
from persia.runtime.environment import applied

BLOCKS = """
dist: {backend: nccl, timeout_s: 5, interface: eth1}
nccl: {debug: INFO, debug_subsys: "INIT,NET", ib_disable: true, topo_file: topology.xml}
"""


@pytest.mark.row("S3-09", "S4-18", "S4-22")
def test_the_blocks_are_variables_of_the_ranks(persia_yml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    persia_yml.write_text(GOOD + BLOCKS)
    config = persia.load_config(persia_yml)
    expected = {
        "PERSIA_DIST_BACKEND": "nccl",
        "PERSIA_DIST_TIMEOUT": "5",
        "PERSIA_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_IB_DISABLE": "1",
        "NCCL_TOPO_FILE": str(persia_yml.absolute().parent / "topology.xml"),
    }
    for name in expected:
        monkeypatch.delenv(name, raising=False)
    assert {name: each.value for name, each in variables_of(config).items()} == expected
    shown = show(open_document(persia_yml))
    for name, value in expected.items():
        assert f"#   {name}={value}  # " in shown
    with applied(variables_of(config)):
        assert {name: os.environ[name] for name in expected} == expected
    assert not any(name in os.environ for name in expected)


@pytest.mark.row("S3-09")
def test_they_are_set_while_a_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    seen: list[list[str | None]] = []

    class Notes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            seen.append([os.environ.get(name) for name in names])
            output: torch.Tensor = self.layer(embeddings[0])
            return output

    fit(config_of(tmp_path, nccl={"debug": "WARN", "ib_disable": True, "socket_ifname": "=lo"}), model=Notes())
    assert seen and all(each == ["WARN", "1", "=lo"] for each in seen)
    assert not any(name in os.environ for name in names)


def test_the_environment_wins_with_a_warning(
    persia_yml: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    persia_yml.write_text(GOOD + "nccl: {debug: INFO}\n")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    with applied(variables_of(persia.load_config(persia_yml))):
        assert os.environ["NCCL_DEBUG"] == "WARN"
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert {*caplog.messages} == {"NCCL_DEBUG=WARN in the environment overrides nccl.debug: INFO"}


def test_without_the_blocks_nothing_is_set(persia_yml: Path) -> None:
    persia_yml.write_text(GOOD)
    assert not variables_of(persia.load_config(persia_yml))
    assert "environment of the ranks" not in show(open_document(persia_yml))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("dist: {backend: mpi}", "dist.backend: found `mpi`, allowed: auto, nccl, gloo"),
        ("dist: {timeout_s: 0}", "dist.timeout_s: found `0`"),
        ("nccl: {debug: info}", "nccl.debug: found `info`, allowed: VERSION, WARN, INFO, TRACE"),
        ("nccl: {topology_file: a}", "nccl.topology_file: unknown key"),
    ],
)
def test_mistakes_are_named(persia_yml: Path, blocks: str, message: str) -> None:
    persia_yml.write_text(f"{GOOD}{blocks}\n")
    with pytest.raises(ConfigError) as error:
        persia.load_config(persia_yml)
    assert message in str(error.value)


def test_settings_without_effect_are_warnings(persia_yml: Path) -> None:
    persia_yml.write_text(GOOD + "dist: {backend: gloo}\nnccl: {debug_subsys: ALL}\n")
    warnings = " ".join(open_document(persia_yml).findings.warnings)
    assert "nccl: has no effect with `dist.backend: gloo`" in warnings
    assert "nccl.debug_subsys: has no effect without nccl.debug" in warnings
