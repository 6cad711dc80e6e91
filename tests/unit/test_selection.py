"""The tests that `pytest` runs in an image."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest

ARGS, TESTPATHS = pytest.Config.ArgsSource.ARGS, pytest.Config.ArgsSource.TESTPATHS


def expression(source: object = TESTPATHS, **options: object) -> str:
    """Return the marker expression for a command line."""
    option = SimpleNamespace(**{"all": False, "keyword": "", "markexpr": "", **options})
    conftest.pytest_configure(SimpleNamespace(option=option, args_source=source, addinivalue_line=print))  # type: ignore[arg-type]
    return str(option.markexpr)


def test_an_image_runs_the_chosen_tests_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "IN_IMAGE", True)
    assert expression() == "live or stack"
    assert expression(all=True) == ""
    assert expression(ARGS) == ""
    assert expression(keyword="training") == ""
    assert expression(markexpr="slow") == "slow"
    monkeypatch.setattr(conftest, "IN_IMAGE", False)
    assert expression() == ""


def test_all_tests_need_an_image_with_their_requirements(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(wanted: bool) -> int | None:
        return conftest.pytest_cmdline_main(SimpleNamespace(option=SimpleNamespace(all=wanted)))  # type: ignore[arg-type]

    monkeypatch.setattr(conftest, "IN_IMAGE", True)
    assert code(True) is None
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in {"moto", "xdist"} else find(name))
    assert code(False) is None
    assert capsys.readouterr().err == ""
    assert code(True) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: pytest --all needs moto, xdist, which the runtime image does not have\n  next: ")
    assert "docker-compose.test.yaml" in said


def test_rows_of_tests_that_passed_before_an_interruption_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "_rows", {})
    (tmp_path / "passed").write_text("test_x.py::test_passed\ntest_x.py::test_long_passed\n")
    config = SimpleNamespace(getoption=lambda _: tmp_path / "passed")

    def item(name: str, row: str, nightly: bool) -> SimpleNamespace:
        marker = SimpleNamespace(args=(row,))
        return SimpleNamespace(
            nodeid=f"test_x.py::{name}",
            config=config,
            iter_markers=lambda _: [marker],
            get_closest_marker=lambda _: marker if nightly else None,
        )

    items = [
        item("test_passed", "A", False),
        item("test_long_passed", "B", True),
        item("test_long", "C", True),
        item("test_of_another_shard", "D", False),
    ]
    conftest.pytest_deselected(items)  # type: ignore[arg-type]
    assert conftest._rows == {"A": {"passed"}, "B": {"passed"}, "C": {conftest.NIGHTLY}}
