"""The test runner: it names failures, continues interrupted runs, and divides tests into shards."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import selection
from conftest import ROOT
from waiting import wait_until

pytestmark = pytest.mark.clone

MAKEFILE = """
test-layers test-images test-build test-checklist lint chaos-all fuzz:
\t@echo $@; echo $@ >> order; test "$@" != "$(BROKEN)"
test-rust test-python test-compose test-cold:
\t@echo $@ >> order; {python} suite.py $@ $(JUNIT) $(PASSED)
"""

SUITE = """
import os, pathlib, sys, time
step, junit, passed = sys.argv[1:]
names = os.environ.get(step.replace("-", "_"), "one two").split()
if os.environ.get("ALL") and step in ("test-python", "test-compose"):
    names.append("long")
done = pathlib.Path(passed).read_text().split() if os.path.exists(passed) else []
cases, failed = [], False
for name in names:
    if name in done:
        continue
    if name == "hangs":
        pathlib.Path("hanging").touch()
        time.sleep(1000)
    if name == "dies":
        print("Segmentation fault")
        sys.exit(139)
    bad = name.startswith("bad")
    failed |= bad
    text = "<failure>" + "\\n".join(f"line {n} of {name}" for n in range(50)) + "</failure>" if bad else ""
    cases.append(f'<testcase classname="tests.unit.test_x" name="{name}" time="{len(cases) + 1}">{text}</testcase>')
    if not bad:
        with open(passed, "a") as file:
            file.write(name + "\\n")
pathlib.Path(junit).write_text("<testsuites><testsuite>" + "".join(cases) + "</testsuite></testsuites>")
sys.exit(1 if failed else 0)
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone in which variables name the tests of the suites: test_rust="one bad"."""
    (tmp_path / "tools").mkdir()
    for name in ("run_tests.py", "test_report.py"):
        shutil.copy2(ROOT / "tools" / name, tmp_path / "tools")
    (tmp_path / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    (tmp_path / "suite.py").write_text(SUITE)
    (tmp_path / ".gitignore").write_text("runs/\ntarget/\norder\nhanging\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def start(clone: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    words = [sys.executable, "tools/run_tests.py", *arguments]
    env = {**os.environ, "CARGO_TARGET_DIR": "target", **variables, "MAKEFLAGS": ""}
    return subprocess.Popen(words, cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(clone: Path, *arguments: str, **variables: str) -> tuple[int, list[str]]:
    (clone / "order").unlink(missing_ok=True)
    process = start(clone, *arguments, **variables)
    output, _ = process.communicate(timeout=180)
    return process.returncode, output.splitlines()


def order(clone: Path) -> list[str]:
    return (clone / "order").read_text().split()


def test_all_that_passes_is_counted(clone: Path) -> None:
    code, lines = run(clone)
    assert (code, lines[-1]) == (0, "6 passed, 0 failed")
    assert sorted(order(clone)) == sorted(
        ["test-layers", "test-images", "test-build", "test-rust", "test-python", "test-compose", "test-checklist"]
    )
    slowest = (clone / "runs/tests/slowest.txt").read_text().splitlines()
    assert len(slowest) == 6 and slowest[0].startswith("    2.0 s")


def test_every_failing_test_is_named_in_the_last_lines(clone: Path) -> None:
    code, lines = run(clone, test_rust="bad-a ok", test_python="ok bad-b bad-c", test_compose="bad-d")
    assert (code, lines[-1]) == (1, "2 passed, 4 failed")
    tail = lines[-40:]
    for suite, name in (("rust", "a"), ("python", "b"), ("python", "c"), ("compose", "d")):
        place = "tests.unit.test_x" if suite == "rust" else "tests/unit/test_x.py"
        at = tail.index(f"FAILED {suite} {place}::bad-{name}")
        assert f"    line 49 of bad-{name}" in tail[at + 1 : at + 10]


def test_many_failing_tests_are_named_too(clone: Path) -> None:
    names = [f"bad{number}" for number in range(100)]
    _, lines = run(clone, test_python=" ".join(names))
    assert lines[-1] == "4 passed, 100 failed"
    tail = lines[-40:]
    words = " ".join(tail).split()
    assert all(name in words for name in names)
    assert "    line 49 of bad0" in tail, "the end of the first output"
    kept = (clone / "runs/tests/failures.txt").read_text()
    assert all(f"FAILED python tests/unit/test_x.py::{name}\n" in kept for name in names)
    assert all(f"    line 49 of {name}\n" in kept for name in names)


def test_the_report_has_no_more_lines_than_it_may(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import test_report

    for count in range(1, 3000, 101):
        tests = [
            test_report.Test("python", f"tests/unit/test_{n % 90}.py::test_{'x' * 60}_{n}", 0.0, "failed", "a\nb\n" * 9)
            for n in range(count)
        ]
        results = {"python": tests}
        found = test_report.failures(results, {"python": 1}, {"python": tmp_path / "log"}, resumed={})
        lines = test_report.summary(results, found, before=0).splitlines()
        assert len(lines) <= test_report.TAIL and lines[-1] == f"0 passed, {count} failed"
        assert max(map(len, lines)) <= test_report.WIDTH + 4


@pytest.mark.parametrize("step", ["test-layers", "test-images", "test-build", "test-checklist", "lint"])
def test_a_step_that_is_no_suite_is_named(clone: Path, step: str) -> None:
    code, lines = run(clone, "--lint", BROKEN=step)
    name = step.removeprefix("test-")
    assert (code, lines[-1]) == (1, "6 passed, 0 failed")
    assert any(line.startswith(f"FAILED {name}: exit code 2") for line in lines[-40:])


def test_a_suite_that_dies_or_runs_nothing_is_named(clone: Path) -> None:
    code, lines = run(clone, test_rust="dies", test_python=" ")
    assert (code, lines[-1]) == (1, "2 passed, 0 failed")
    assert any(line.startswith("FAILED rust: exit code 2, no failing test") for line in lines)
    assert any("Segmentation fault" in line for line in lines[-40:])
    assert "FAILED python: no test ran" in lines


def test_an_interrupted_run_says_so_and_continues(clone: Path) -> None:
    process = start(clone, test_python="one bad hangs two", test_rust="good")
    wait_until("the test to hang", (clone / "hanging").exists, 30)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM
    assert "FAILED python: did not end" in output and "make test RESUME=1 continues" in output

    code, lines = run(clone, "--resume", test_python="one bad three two", test_rust="good")
    assert (code, lines[-1]) == (1, "6 passed, 1 failed")
    assert "test-rust" not in order(clone), "it had passed"
    code, lines = run(clone, "--resume", test_python="one three two", test_rust="good")
    assert (code, lines[-1]) == (0, "6 passed, 0 failed")


def test_the_long_run_continues_after_the_short_one(clone: Path) -> None:
    code, lines = run(clone)
    assert (code, lines[-1]) == (0, "6 passed, 0 failed")
    code, lines = run(clone, "--all", "--resume")
    assert (code, lines[-1]) == (0, "10 passed, 0 failed"), "two long tests, and those of test-cold"
    assert {*order(clone)} == {"test-images", "test-python", "test-compose", "test-cold", "chaos-all", "fuzz"}
    junit = (clone / "runs/junit/python.xml").read_text()
    assert 'name="long"' in junit and 'name="one"' not in junit
    code, lines = run(clone, "--resume")
    assert (code, lines[-1]) == (0, "8 passed, 0 failed")
    assert any(line == "== python: passed before" for line in lines)


def test_after_an_edit_everything_runs_again(clone: Path) -> None:
    run(clone)
    (clone / "edited").touch()
    code, lines = run(clone, "--resume")
    assert (code, lines[-1]) == (0, "6 passed, 0 failed")
    assert any("nothing to resume" in line for line in lines)
    assert "test-rust" in order(clone)


def test_a_run_waits_for_another_clone_that_builds_into_the_same_directory(clone: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(clone, other, ignore=shutil.ignore_patterns("other"))
    target = str(tmp_path / "shared")
    first = start(clone, test_python="hangs", CARGO_TARGET_DIR=target)
    wait_until("the test to hang", (clone / "hanging").exists, 30)
    second = start(other, CARGO_TARGET_DIR=target)
    assert second.stdout is not None
    assert second.stdout.readline() == f"== another test run uses {target}; waiting for its end\n"
    assert not (other / "order").exists()
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=180)
    output, _ = second.communicate(timeout=180)
    assert output.splitlines()[-1] == "6 passed, 0 failed"


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b"])
def test_a_shard_that_does_not_exist_is_refused(clone: Path, text: str) -> None:
    code, lines = run(clone, "--shard", text)
    assert code == 2 and "--shard" in lines[-1]
    with pytest.raises(pytest.UsageError):
        selection.shard(text)


def test_each_test_is_in_one_shard() -> None:
    names = [f"tests/unit/test_x.py::test_{number}" for number in range(1000)]
    parts = [[name for name in names if selection.belongs(name, (k, 4))] for k in range(1, 5)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(200 < len(part) < 300 for part in parts)


def test_pytest_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_one(): pass\ndef test_two(): pass\ndef test_three(): assert THREE\n")
    passed = tmp_path / "passed"

    def pytest_says(*options: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "pytest", "-p", "selection", "-p", "no:cacheprovider", "-q", *options]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        words += ["--rootdir", ".", "-c", "/dev/null", "--resume-from", str(passed), "."]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    code, output = pytest_says("--shard", "1/1")
    assert (code, len(passed.read_text().split())) == (1, 2)
    assert "FAILED test_it.py::test_three (call," in output.split("FAILURES")[0], "it is named at once"
    (tmp_path / "test_it.py").write_text((tmp_path / "test_it.py").read_text() + "THREE = 3\n")
    code, output = pytest_says("-n", "2")
    assert code == 0 and "1 passed" in output
    for workers in ((), ("-n", "2")):
        assert pytest_says(*workers)[0] == 0, "nothing is left to do"
    passed.unlink()
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.skip\ndef test_one(): pass\ndef test_two(): pass\n"
    )
    pytest_says()
    assert passed.read_text().split() == ["test_it.py::test_two"], "a skipped test may run later"
    (tmp_path / "test_it.py").write_text("def test_one(): pass\ndef test_two(): pass\ndef test_three(): pass\n")
    passed.unlink()
    code, output = pytest_says("--repeat", "3")
    assert code == 0 and "9 passed" in output


def test_images_compile_the_engine_only_if_an_input_of_the_compilation_has_changed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def engine() -> str:
        done = subprocess.run(["tools/image_engine.sh"], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    crate = tmp_path / "rust_core" / "wire"
    (tmp_path / "tools").mkdir()
    (crate / "src").mkdir(parents=True)
    shutil.copy2(ROOT / "tools" / "image_engine.sh", tmp_path / "tools")
    manifest, source = crate / "Cargo.toml", crate / "src" / "lib.rs"
    compose = tmp_path / "docker-compose.yaml"
    compose.write_text("  build:\n    target: server\n  user: 1\n")
    dockerfile = tmp_path / "services" / "Dockerfile"
    dockerfile.parent.mkdir()
    dockerfile.write_text("FROM base AS build\nRUN cargo build\nFROM base AS server\n")
    manifest.write_text("[package]\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    for number in range(10):
        assert engine() == "build", "the manifest is new"
        source.write_text(f"// {number}\n")
        git("add", ".")
        git("commit", "-m", "a change of a source")
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    usable = tuple(map(int, libc.split()[1].split("."))) <= (2, 41)
    assert engine() == ("prebuilt" if usable else "build")
    compose.write_text("  build:\n    target: server\n  user: 2\n")
    assert engine() == ("prebuilt" if usable else "build"), "no image is built differently"
    compose.write_text("  build:\n    target: runtime\n  user: 2\n")
    assert engine() == "build"
    git("checkout", "docker-compose.yaml")
    dockerfile.write_text("FROM base AS build\nRUN cargo build\nFROM base AS server\nRUN apt-get install ca\n")
    assert engine() == ("prebuilt" if usable else "build"), "the engine is compiled as before"
    dockerfile.write_text("FROM base AS build\nRUN cargo build --release\nFROM base AS server\n")
    assert engine() == "build"
    git("checkout", "services/Dockerfile")
    manifest.write_text("# build\n[package]\n")
    compose.write_text("  build:\n    # the target\n    target: server\n  user: 1\n")
    assert engine() == ("prebuilt" if usable else "build"), "a comment changes no image"
    git("checkout", "docker-compose.yaml")
    manifest.write_text("[package]\nname = 'wire'\n")
    assert engine() == "build"
    git("add", ".")
    git("commit", "-m", "a change of a manifest")
    assert engine() == "build"
