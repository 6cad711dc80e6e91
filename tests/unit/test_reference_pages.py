"""The reference pages agree with the code: commands, exit codes, variables, series of metrics."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from test_monitoring_files import rust, serving
from test_tools import load

from persia.monitor.series import DATA, TRAINER
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import Settings
from persia.serving.metrics import Metrics

pytestmark = pytest.mark.clone

VARIABLES = ROOT / "docs" / "reference" / "variables.md"
OF_TESTS = {"PERSIA_TEST_LIVE"}
ALL = "server, middleware, rank, data-compose, commands"
Row = dict[str, str]


def rows(heading: str | None = None) -> dict[str, Row]:
    """Return the rows of the tables below a heading, or of all tables, by variable."""
    found: dict[str, Row] = {}
    for section in VARIABLES.read_text().split("\n## ")[1:]:
        if heading not in (None, section.partition("\n")[0]):
            continue
        titles, _, *lines = [_cells(line) for line in section.splitlines() if line.startswith("|")]
        for line in lines:
            for name in re.findall(r"`(\w+)`", line[0]):
                assert name not in found, f"{name} is in two rows"
                found[name] = dict(zip(titles, line, strict=True))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def of_python() -> set[str]:
    """Return the variables that the Python package names in its code."""
    found = {"PERSIA_TEST_RUN_FILE"}  # an f-string
    for path in (ROOT / "persia_py" / "persia").rglob("*.py"):
        found |= {*re.findall(r'"(PERSIA_[A-Z0-9_]*[A-Z0-9])"', path.read_text())}
    return found


def of_rust(folder: str) -> set[str]:
    """Return the variables that a crate names, except those of its tests and of its build (``env!``)."""
    found: set[str] = set()
    for path in (ROOT / "rust_core" / folder / "src").rglob("*.rs"):
        found |= {*re.findall(r'(?<!env!\()"(PERSIA_[A-Z0-9_]+)"', path.read_text().partition("#[cfg(test)]")[0])}
    return found


def of_scripts() -> set[str]:
    return {
        name for path in (ROOT / "launch").glob("*.sh") for name in re.findall(r"\bPERSIA_[A-Z_]+\b", path.read_text())
    }


def of_compose() -> dict[str, set[str]]:
    """Return the variables that the compose files substitute, with their defaults."""
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("docker-compose*.yaml"):
        for name, default in re.findall(r"\$\{([A-Z_]+):?-?([^}]*)\}", path.read_text()):
            found.setdefault(name, set()).add(default)
    return found


def arguments() -> dict[str, tuple[str, str, str | None]]:
    """For each variable of the Rust programs, return the structure, the name of the value and the default."""
    source = (ROOT / "rust_core" / "server" / "src" / "args.rs").read_text()
    found = {}
    for structure, body in re.findall(r"^pub struct (\w+) \{\n(.*?)^\}", source, re.MULTILINE | re.DOTALL):
        for given in re.findall(r"#\[arg\((.*?)\)\]\n", body, re.DOTALL):
            if (name := re.search(r'env = "(\w+)"', given)) is None:
                continue
            value = re.search(r'value_name = "(\w+)"', given)
            default = re.search(r'default_value(?:_t)? = "?([\w.]+)', given)
            found[name.group(1)] = (structure, value.group(1) if value else "", default.group(1) if default else None)
    return found


def test_commands_and_exit_codes_are_current() -> None:
    tool = load("reference_pages")
    for name, make in tool.PAGES.items():
        assert (tool.FOLDER / name).read_text() == make(), "run: python tools/reference_pages.py"


def test_every_command_of_the_help_has_a_section() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for name in ("train", "eval", "predict", "export", "serve", "up", "status", "doctor", "ckpt show", "data inspect"):
        assert f"\n## persia {name}\n" in text
    assert "\n## persia-launcher nn-worker\n" in text
    assert re.search(r"^\| `--set [^|]+ \| .+ \|$", text, re.MULTILINE)


@pytest.mark.parametrize("program", ["persia-embedding-sharded-server", "persia-embedding-sharded-middleware"])
def test_the_options_of_the_programs_are_those_that_they_print(program: str) -> None:
    assert shutil.which(program) is not None
    said = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    section = (ROOT / "docs/reference/commands.md").read_text().partition(f"\n## {program}\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE)
    assert [*listed, "--help", "--version"] == re.findall(r"^ +(?:-\w, )?(--[\w-]+)", said, re.MULTILINE)


def test_the_pages_have_every_exit_code() -> None:
    running = (ROOT / "docs" / "running.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", running, re.MULTILINE)}
    assert {*map(int, ExitCode)} | {137, 143} == listed
    rust = (ROOT / "rust_core/server/src/exit.rs").read_text()
    assert {int(code) for code in re.findall(r"=> (\d+),|i32 = (\d+);", rust) for code in code if code} <= {
        *map(int, ExitCode)
    }


def test_every_variable_that_the_code_reads_has_a_row() -> None:
    code = of_python() | of_rust("core") | of_rust("server") | of_rust("wire") | of_rust("store") | of_rust("engine")
    code |= of_scripts() - OF_TESTS
    listed = rows()
    of_containers = rows("Settings of the containers")
    assert len(code) > 45
    missing = sorted(code - {*listed})
    assert not missing, f"docs/reference/variables.md has no row of {missing}"
    unread = {name for name in listed if name.startswith("PERSIA_")} - code - {*of_containers}
    assert not unread, f"docs/reference/variables.md: nothing reads {sorted(unread)}"


def test_the_settings_of_containers_are_those_of_the_compose_files() -> None:
    compose, listed, others = of_compose(), rows("Settings of the containers"), rows()
    assert not {*compose} - {*others} and not {*listed} - {*compose}
    env = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (ROOT / ".env").read_text(), re.MULTILINE))
    for name, row in listed.items():
        assert name in env, f".env does not have {name}"
        if name != "PERSIA_RESTART":
            (default,) = compose[name]
            assert row["default"] == (f"`{default}`" if default else "none"), name


def test_what_servers_and_middlewares_read_is_as_in_their_arguments() -> None:
    listed, found = rows(), arguments()
    elsewhere = of_rust("server") - {*found}
    assert len(found) >= 20 and "PERSIA_SOCKET_IFNAME" in elsewhere
    for name, row in listed.items():
        readers = [each.strip() for each in row.get("read by", "").replace("all", ALL).split(",")]
        structure, value, default = found.get(name, ("CommonArgs" if name in elsewhere else "", "", None))
        assert ("server" in readers) == bool(structure), name
        assert ("middleware" in readers) == (structure == "CommonArgs"), name
        assert not value or row["value"] == value, name
        assert default is None or f"`{default}`" in row["default"], name


def test_defaults_and_types_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, checked = rows(), set()
    for name in listed:
        monkeypatch.delenv(name, raising=False)
    settings = Settings()
    for each, member in vars(Settings).items():
        if not isinstance(member, property) or (named := re.match(r"``(\w+)``", member.__doc__ or "")) is None:
            continue
        row, value = listed[named.group(1)], getattr(settings, each)
        checked.add(name := named.group(1))
        if isinstance(value, bool):
            assert (row["value"], row["default"]) == ("0 or 1", f"`{int(value)}`")
        elif isinstance(value, int | float):
            assert row["value"] == ("SECONDS" if isinstance(value, float) else "N")
            assert f"`{value:g}`" in row["default"], name
        elif isinstance(value, str):
            assert f"`{value}`" in row["default"], name
    assert len(checked) > 20 and "PERSIA_RPC_TIMEOUT" in checked
    assert f"`{settings.staleness(None)}`" == listed["EMBEDDING_STALENESS"]["default"]


def test_the_variables_of_serving_are_the_options_of_the_command() -> None:
    from typer.main import get_command

    from persia.cli.main import app

    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {param.envvar: param for param in command.params if param.envvar}
    listed = rows("Of `persia serve`")
    assert options.keys() == listed.keys()
    for name, param in options.items():
        if param.default is not None:
            assert listed[name]["default"] == f"`{param.default}`", name


def test_the_variables_that_env_lists_have_a_row() -> None:
    env = {*re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env").read_text(), re.MULTILINE)}
    chosen = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]["trainer"]["environment"]
    prefixes = ("AWS_", "NCCL_", "OMP_", "OTEL_")
    external = {name for name in {*env, *chosen} if name.startswith(prefixes)} | {"COMPOSE_FILE"}
    assert not env - external - {*rows()}
    assert {*chosen} - external <= {*rows()}


def test_a_variable_without_a_row_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = VARIABLES.read_text()
    (tmp_path / "variables.md").write_text(re.sub(r"^\| `PERSIA_LISTEN`.*\n", "", text, flags=re.MULTILINE))
    monkeypatch.setitem(globals(), "VARIABLES", tmp_path / "variables.md")
    with pytest.raises(AssertionError, match=r"has no row of \['PERSIA_LISTEN'\]"):
        test_every_variable_that_the_code_reads_has_a_row()


def labels_of_rust() -> dict[str, list[str]]:
    """Return the labels that servers and middlewares give their series."""
    metrics = (ROOT / "rust_core/server/src/metrics.rs").read_text()
    names = dict(re.findall(r'^const (\w+): &str = "(\w+)";', metrics, re.MULTILINE))
    found: dict[str, list[str]] = {}
    for name, rest in re.findall(
        r"\b(?:counter|gauge|histogram)!\((\w+)(.*?)\)\s*\.(?:set|in|de|re)", metrics, re.DOTALL
    ):
        given = re.findall(r'"(\w+)" =>', rest)
        assert found.setdefault(names[name], given) == given, f"{names[name]} has other labels elsewhere"
    return found


def labels_of_serving() -> dict[str, list[str]]:
    registered: list[Any] = [*Metrics().registry._collector_to_names]
    collectors = [each for each in registered if hasattr(each, "_labelnames")]
    return {each._name + ("_total" if each._type == "counter" else ""): [*each._labelnames] for each in collectors}


def test_the_series_of_monitoring_have_their_labels_and_processes() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text().partition("\n## Series\n")[2].partition("\n## ")[0]
    sections = {part.partition("\n")[0]: part for part in page.split("\n### ")[1:]}
    trainer = {each.name: ["rank", *each.labels] for each in TRAINER.values()}
    data = {each.name: ["replica", *each.labels] for each in DATA.values()}
    wanted = {"Trainers": trainer, "Data-compose": data, "Servers and middlewares": labels_of_rust()}
    wanted["`persia serve`"] = labels_of_serving()
    assert wanted["Servers and middlewares"].keys() == rust().keys()
    assert wanted["`persia serve`"].keys() == serving().keys()
    for section, labels in wanted.items():
        listed = re.findall(r"^\| `(\w+)` \| \w+ \| ([\w, ]*)\|", sections[section], re.MULTILINE)
        assert {name: [each for each in given.strip().split(", ") if each] for name, given in listed} == labels, section


def test_the_name_of_a_series_ends_with_its_unit() -> None:
    metrics = (ROOT / "rust_core/server/src/metrics.rs").read_text()
    names = dict(re.findall(r'^const (\w+): &str = "(\w+)";', metrics, re.MULTILINE))
    described = re.findall(r"describe_\w+!\(\s*(\w+),\s*(?:metrics::Unit::(\w+))?", metrics)
    assert {names[name] for name, _ in described} == {*names.values()}
    for name, unit in described:
        ending = names[name].removesuffix("_total").rpartition("_")[2]
        assert (ending if ending in {"seconds", "bytes"} else "") == unit.lower(), names[name]
    of_python = [each for each in [*TRAINER.values(), *DATA.values()] if each.kind == "histogram"]
    assert of_python and all(each.name.endswith("_seconds") for each in of_python)
