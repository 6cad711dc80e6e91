"""``make release``: refusals, checks, and resumption. test_release_build.py runs a complete release."""

import datetime
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import IN_IMAGE, ROOT

import persia

if IN_IMAGE:
    pytest.skip("no clone here", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))

import release
import release_files as files
import release_install
import release_source as source
import release_steps
from release_source import ReleaseError

pytestmark = pytest.mark.clone

TODAY = datetime.date(2026, 11, 25)
TOOLS = (
    *("release.py", "release_steps.py", "release_source.py", "release_files.py", "release_install.py"),
    *("run_tests.py", "test_report.py"),
)
METADATA = """\
Metadata-Version: 2.4
Name: persia-core
Version: 1.2.3
Summary: An engine
License-Expression: MIT OR Apache-2.0
License-File: LICENSE-MIT
Description-Content-Type: text/markdown

# persia-core
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone at version 1.2.3 with two unreleased changes, and with all files that contain the version."""
    for name in (*source.PLACES, "Makefile", *(f"tools/{tool}" for tool in TOOLS)):
        target = tmp_path / "clone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    clone = tmp_path / "clone"
    (clone / source.CHANGELOG).write_text("# Changelog\n\n## Unreleased\n\n### Added\n\n- One.\n- Two.\n")
    (clone / ".gitignore").write_text("/runs/\n__pycache__/\n")
    git(clone, "init", "--quiet")
    source.set_version(clone, "9.9.9", TODAY)
    (clone / source.CHANGELOG).write_text("# Changelog\n\n## Unreleased\n\n### Added\n\n- One.\n- Two.\n")
    commit(clone)
    return clone


def git(clone: Path, *words: str) -> None:
    config = ("-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *config, *words], cwd=clone, check=True, capture_output=True)


def commit(clone: Path) -> None:
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "Change")


def refusals(clone: Path) -> str:
    return "\n".join(f"{each} | {each.following}" for each in source.problems(clone))


def test_all_places_of_this_clone_have_one_version() -> None:
    assert source.version(ROOT) == persia.__version__
    members = {each for each in source.places(ROOT) if each.file == "rust_core/Cargo.lock"}
    assert len(members) == len(list((ROOT / "rust_core").glob("*/src/lib.rs"))), "one line of each crate"


@pytest.mark.parametrize("file", [*source.PLACES])
def test_a_place_with_another_version_is_named(clone: Path, file: str) -> None:
    path = clone / file
    path.write_text(path.read_text().replace("9.9.9", "9.9.8", 1))
    with pytest.raises(ReleaseError, match=r"9\.9\.8") as refused:
        source.version(clone)
    assert file in str(refused.value) and refused.value.following.startswith("make next-version V=9.9.")


def test_a_place_without_a_version_is_refused(clone: Path) -> None:
    path = clone / "persia_py/pyproject.toml"
    path.write_text(path.read_text().replace("persia-server==9.9.9", "persia-server"))
    with pytest.raises(ReleaseError, match=r"persia_py/pyproject.toml: found no version"):
        source.version(clone)


def test_a_release_is_refused_until_everything_agrees(clone: Path) -> None:
    said = refusals(clone)
    assert "no section '## 9.9.9 - DATE' | make next-version V=9.9.9" in said
    assert "tests/data/upgrade/9.9.9 is missing" in said and "make upgrade-data" in said
    assert source.set_version(clone, "10.0.0", TODAY) == [source.CHANGELOG, *source.PLACES]
    assert source.version(clone) == "10.0.0"
    assert source.section(clone, "10.0.0") == "### Added\n\n- One.\n- Two."
    assert "files differ from the commit: CHANGELOG.md" in refusals(clone)
    (clone / source.UPGRADE / "10.0.0").mkdir(parents=True)
    (clone / source.UPGRADE / "10.0.0" / "file").touch()
    commit(clone)
    assert refusals(clone) == ""
    (clone / "forgotten.py").touch()
    assert "1 file differs from the commit: forgotten.py | git commit" in refusals(clone)
    (clone / "forgotten.py").unlink()
    git(clone, "tag", "v10.0.0")
    assert refusals(clone) == "", "the tag is this commit"
    (clone / "later.py").touch()
    commit(clone)
    assert "version 10.0.0 is released: the tag v10.0.0 points to another commit | make next-version" in refusals(clone)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("## Unreleased\n\n## 9.9.9 - soon\n\n- One.\n", "date of section 9.9.9 is 'soon'"),
        (
            "## Unreleased\n\n## 9.9.9 - 2026-11-25\n\n## 9.9.8 - 2026-11-24\n\n- Old.\n",
            "section 9.9.9 lists no change",
        ),
        ("## Unreleased\n\n- Late.\n\n## 9.9.9 - 2026-11-25\n\n- One.\n", "under 'Unreleased'"),
        ("## 99999 - 2026-11-25\n\n- One.\n", "no section '## 9.9.9"),
    ],
)
def test_a_changelog_that_does_not_describe_the_version_is_refused(clone: Path, text: str, said: str) -> None:
    (clone / source.CHANGELOG).write_text(text)
    with pytest.raises(ReleaseError, match=said):
        source.section(clone, "9.9.9")


@pytest.mark.parametrize(
    ("new", "said"), [("1.2", "expected a version"), ("9.9.8", "lower than"), ("v10.0.0", "expected a")]
)
def test_a_wrong_next_version_changes_nothing(clone: Path, new: str, said: str) -> None:
    with pytest.raises(ReleaseError, match=said):
        source.set_version(clone, new, TODAY)
    assert source.version(clone) == "9.9.9"


def test_a_version_without_changes_is_refused(clone: Path) -> None:
    source.set_version(clone, "9.9.9", TODAY)
    with pytest.raises(ReleaseError, match="nothing under 'Unreleased'"):
        source.set_version(clone, "10.0.0", TODAY)


def test_make_release_names_all_that_is_wrong_and_the_next_commands(clone: Path) -> None:
    (clone / "changed").touch()
    words = [sys.executable, "tools/release.py", "--no-images", "--borrow", ".venv"]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 2 and not (clone / "dist").exists(), done.stdout
    for text in (
        "error: --borrow",
        "error: 1 file differs",
        "error: CHANGELOG.md has no section",
        "error: tests/data/upgrade/9.9.9 is",
    ):
        assert text in done.stderr, done.stderr
    assert done.stderr.count("next:  ") == done.stderr.count("error: ")


def test_sums_find_each_changed_file(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(name)
    files.write_sums(tmp_path)
    assert [*files.wrong_sums(tmp_path)] == []
    subprocess.run(["sha256sum", "--check", "--strict", files.SUMS], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "one").write_text("another")
    (tmp_path / "two").unlink()
    (tmp_path / "four").touch()
    assert [*files.wrong_sums(tmp_path)] == [
        "four is not in SHA256SUMS",
        "one differs from its hash in SHA256SUMS",
        "two is missing",
    ]


def wheel(
    folder: Path, name: str = "persia_core-1.2.3-cp310-abi3-manylinux_2_28_x86_64.whl", **changes: bytes | Path
) -> Path:
    """Write a wheel. ``metadata`` and ``licence`` replace its files of this kind, ``so`` is a compiled file."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        info = "persia_core-1.2.3.dist-info"
        for inside, content in {
            f"{info}/METADATA": changes.get("metadata", METADATA.encode()),
            f"{info}/licenses/LICENSE-MIT": changes.get("licence", b"MIT"),
            "persia_core/persia_core.abi3.so": changes.get("so"),
        }.items():
            if isinstance(content, Path):
                archive.write(content, inside)
            elif content:
                archive.writestr(inside, content)
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("Version: 1.2.3", "Version: 1.2.4"), "has version 1.2.4, expected 1.2.3"),
        (("Name: persia-core", "Name: other"), "is called other"),
        (("License-Expression: MIT OR Apache-2.0\n", ""), "has no license"),
        (("License-Expression: MIT OR Apache-2.0", "License-Expression: Nonsense"), "Nonsense"),
        (("Summary: An engine\n", ""), "has no summary"),
        (("License-File: LICENSE-MIT", "License-File: LICENSE-BSD"), "does not contain its LICENSE-BSD"),
        (("License-File: LICENSE-MIT\n", ""), "contains no license"),
    ],
)
def test_wrong_metadata_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert [*files.wrong_metadata(wheel(tmp_path), "1.2.3")] == []
    assert change[0] in METADATA
    found = [*files.wrong_metadata(wheel(tmp_path, metadata=METADATA.replace(*change).encode()), "1.2.3")]
    assert any(said in each for each in found), found


Compile = Callable[..., Path]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    """Compile a shared library: ``compiled("double f(double x) { … }", "-lm")``."""

    def make(text: str, *options: str) -> Path:
        (tmp_path / "f.c").write_text(text)
        words = ("cc", "-shared", "-fPIC", "-o", str(tmp_path / "f.so"), str(tmp_path / "f.c"), *options)
        subprocess.run(words, check=True, capture_output=True)
        return tmp_path / "f.so"

    return make


OLD = "#include <stdlib.h>\nvoid *f(void) { return malloc(9); }\n"
NEW = "#include <math.h>\ndouble f(double x) { return pow(x, x); }\n"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here (binutils)")
def test_a_binary_that_needs_more_than_its_tag_is_named(tmp_path: Path, compiled: Compile) -> None:
    assert [*files.wrong_binaries(wheel(tmp_path, so=compiled(OLD)))] == []
    (found,) = files.wrong_binaries(wheel(tmp_path, so=compiled(NEW, "-lm")))
    assert "persia_core.abi3.so needs GLIBC_2.29, newer than 2.28" in found
    newer = wheel(tmp_path, "persia_core-1.2.3-cp310-abi3-manylinux_2_29_x86_64.whl", so=compiled(NEW, "-lm"))
    assert [*files.wrong_binaries(newer)] == []
    own = compiled(OLD, "-Wl,-soname,libmine.so.1").rename(tmp_path / "libmine.so")
    (found,) = files.wrong_binaries(wheel(tmp_path, so=compiled(OLD, "-Wl,--no-as-needed", str(own))))
    assert "needs libmine.so.1, which not every system has" in found
    (found,) = files.wrong_binaries(wheel(tmp_path, so=compiled(OLD, "-Wl,-rpath,/somewhere")))
    assert "searches for libraries in /somewhere" in found


def test_a_wheel_for_this_machine_only_is_refused(tmp_path: Path) -> None:
    one = wheel(tmp_path, "persia_core-1.2.3-cp310-abi3-linux_x86_64.whl")
    assert "linux_x86_64 is not a manylinux tag" in next(files.wrong_binaries(one))
    assert "but no compiled file" in next(files.wrong_binaries(wheel(tmp_path)))
    pure = wheel(tmp_path, "persia_core-1.2.3-py3-none-any.whl", so=b"\x7fELF")
    found = "\n".join(files.wrong_binaries(pure))
    assert "persia_core.abi3.so cannot be read" in found and "has no platform tag, but 1 compiled files" in found


def test_a_path_of_the_build_is_found(tmp_path: Path) -> None:
    found = wheel(tmp_path, so=b"panicked at " + str(tmp_path / "src/lib.rs").encode())
    assert "contains the path" in next(files.paths_of_this_machine(found, [tmp_path]))
    assert not [*files.paths_of_this_machine(found, [tmp_path / "other"])]


def made(folder: Path, sources: str = "tree", **changes: Any) -> release_steps.Release:
    values: dict[str, Any] = {"version": "1.2.3", "revision": "abc", "epoch": 0, "tag": "1.2.3"}
    options: dict[str, Any] = {"lto": "thin", "images": False, "borrow": None}
    return release_steps.Release(folder=folder, sources=sources, **{**values, **options, **changes})


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the steps of a release by two steps that record their names. With ``fails``, the second step fails."""
    ran: list[str] = []

    def first(this: release_steps.Release) -> list[Path]:
        ran.append("first")
        this.details["install"] = "trained"
        (this.folder / "one").write_text("one")
        return [this.folder / "one"]

    def second(this: release_steps.Release) -> list[Path]:
        ran.append("second")
        this.run(["sh", "-c", "seq 100; echo wrong >&2; exit 3" if "fails" in ran else "true"])
        (this.folder / files.SUMS).write_text("")
        return []

    monkeypatch.setattr(release, "WHEEL_STEPS", (release_steps.Step("first", "make", first),))
    monkeypatch.setattr(release, "LAST", release_steps.Step("second", "end", second))
    return ran


def test_a_release_continues_after_its_last_step(tmp_path: Path, steps: list[str]) -> None:
    steps.append("fails")
    with pytest.raises(ReleaseError, match=r"(?s)exited with 3:.*wrong.*second\.log") as refused:
        release.make(made(tmp_path))
    assert "finished steps are kept" in refused.value.following
    steps[:] = []
    release.make(made(tmp_path))
    assert steps == ["second"]
    release.make(made(tmp_path))
    assert steps == ["second"], "everything is done"
    (tmp_path / "one").write_text("changed")
    release.make(made(tmp_path))
    assert steps == ["second", "first", "second"]
    (tmp_path / "one").write_text("changed again")
    steps[:] = ["fails"]
    with pytest.raises(ReleaseError):
        release.make(made(tmp_path))
    steps[:] = []
    release.make(made(tmp_path))
    assert steps == ["second"], "it was done with the file that has been replaced"
    (tmp_path / "old").touch()
    release.make(made(tmp_path, sources="other"))
    assert steps == ["second", "first", "second"] and not (tmp_path / "old").exists()


def test_notes_and_sums_that_changed_are_written_again(
    tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "LAST", release_steps.Step("sums", "write the checksums", release_steps.finish))
    release.make(made(tmp_path))
    for path in (tmp_path / "NOTES.md", tmp_path / files.SUMS):
        content = path.read_text()
        path.write_text("changed")
        release.make(made(tmp_path))
        assert path.read_text() == content
        path.unlink()
        release.make(made(tmp_path))
        assert path.read_text() == content
    assert steps == ["first"], "the other steps are not repeated"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": True}, ""),
        ({}, " IMAGES=0"),
        ({"rehearsal": True, "images": True}, " REHEARSE=1"),
        (
            {"rehearsal": True, "borrow": Path(".venv"), "lto": "false"},
            " REHEARSE=1 IMAGES=0 BORROW=.venv LTO=false",
        ),
    ],
)
def test_the_command_that_repeats_a_release_has_its_options(options: dict[str, Any], words: str) -> None:
    assert release_steps.again(made(Path("dist"), **options)) == f"rm -r dist && make release{words}"


def test_a_command_that_asks_gets_no_answer(tmp_path: Path) -> None:
    """The command would wait for the terminal although its question is only in a log."""
    reader, writer = os.pipe()
    os.write(writer, b"yes\n")
    os.close(writer)
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        this = made(tmp_path, log=tmp_path / "log")
        assert this.run(["sh", "-c", "read answer || echo none"]) == "none\n"
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(reader)


def test_two_releases_at_once_are_refused(tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def again(_: release_steps.Release) -> list[Path]:
        with pytest.raises(ReleaseError, match="another process is making"):
            release.make(made(tmp_path))
        raise ReleaseError("enough", "")

    monkeypatch.setattr(release, "WHEEL_STEPS", (release_steps.Step("first", "make", again),))
    with pytest.raises(ReleaseError, match="enough"):
        release.make(made(tmp_path))


def test_a_missing_program_of_a_step_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    step = release_steps.Step("first", "make", lambda made: [Path(made.run(["no-such-program"]))])
    monkeypatch.setattr(release, "WHEEL_STEPS", (step,))
    with pytest.raises(ReleaseError, match="no-such-program: No such file"):
        release.make(made(tmp_path))


def test_the_bare_environment_has_no_compiler_and_nothing_of_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/clone")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    bare = release_install.Bare(tmp_path / "bare", lambda *_, **__: "", sys.executable)
    env = bare.env()
    assert "PYTHONPATH" not in env and env["HTTPS_PROXY"] == "http://proxy"
    assert shutil.which("cc") and not shutil.which("cc", path=env["PATH"])

    def with_cargo(words: list[str | Path], **_: object) -> str:
        bin_folder = Path(words[-1], "bin")
        bin_folder.mkdir(parents=True)
        (bin_folder / "cargo").touch(0o755)
        return ""

    with pytest.raises(ReleaseError, match=f"cargo is on the PATH .*: {sys.executable} -m venv") as caught:
        release_install.Bare(tmp_path / "bare", with_cargo, sys.executable)
    assert "make release PYTHON=" in caught.value.following, "the folder is replaced anyway"


def test_versions_and_results_that_differ_are_refused(tmp_path: Path) -> None:
    said = "persia 1.2.3\npersia_core 1.2.3 from /x.so\nbuilt: profile release, features cuda, revision abc\n"
    release_install.check_versions(said, "1.2.3", "abc")
    for old, new in (
        ("persia 1.2.3", "persia 1.2.4"),
        ("core 1.2.3", "core 1.2.4"),
        ("abc", "abcd"),
        (", revision abc", ""),
    ):
        with pytest.raises(ReleaseError, match="expected"):
            release_install.check_versions(said.replace(old, new), "1.2.3", "abc")
    with pytest.raises(ReleaseError, match=r"no summary\.json"):
        release_install.check_summary(tmp_path)
    for summary in ({"status": "running", "auc": 0.9}, {"status": "finished", "auc": 0.6}, {"status": "finished"}):
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        with pytest.raises(ReleaseError, match="expected at least"):
            release_install.check_summary(tmp_path)
    for of_job in ('"auc": 0.9', '"result": {"auc": 0.9}'):
        (tmp_path / "summary.json").write_text(f'{{"status": "finished", {of_job}}}')
        assert release_install.check_summary(tmp_path) == 0.9, "of a script, and of a job"


def test_the_lock_file_as_constraints() -> None:
    text = (ROOT / "requirements" / "runtime.txt").read_text()
    found = release_install.locked(text)
    assert "--hash" not in found and "\\" not in found and "\nnumpy==" in found
    assert found.count("\n") == text.count("==") - text.count("'==") - sum(
        line.count(" ==") for line in text.splitlines()
    )


def test_a_bill_names_its_file_and_the_packages_of_debian(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("libc6\t2.41-12\tamd64\nlibstdc++6\t14.2.0-19\tamd64\n")
    (tmp_path / "file").write_text("content")
    of = ("--of", "container:persia/nats@1.2.3", "--file", tmp_path / "file")
    words = ("tools/sbom.py", "--debian", tmp_path / "list", *of)
    bill = json.loads(subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True).stdout)
    subject = bill["metadata"]["component"]
    assert (subject["type"], subject["name"], subject["version"]) == ("container", "persia/nats", "1.2.3")
    assert subject["hashes"] == [{"alg": "SHA-256", "content": files.sha256(tmp_path / "file")}]
    assert [each["purl"] for each in bill["components"]] == [
        "pkg:deb/debian/libc6@2.41-12?arch=amd64",
        "pkg:deb/debian/libstdc%2B%2B6@14.2.0-19?arch=amd64",
    ]


@pytest.mark.parametrize("name", ["LICENSE-MIT", "LICENSE-APACHE"])
def test_each_package_has_the_licences_of_the_repository(name: str) -> None:
    """``persia_py`` has copies and not links, because hatchling would put links into the source archive."""
    for folder in ("persia_py", "rust_core/core", "rust_core/server"):
        assert (ROOT / folder / name).read_bytes() == (ROOT / name).read_bytes()
    assert not (ROOT / "persia_py" / name).is_symlink()


def test_the_pure_wheel_and_its_sources_are_reproducible(tmp_path: Path) -> None:
    """Builds at different times in different folders give equal bytes."""
    digests = set()
    for number in range(2):
        copy = tmp_path / f"clone{number}"
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "persia_py", copy / "persia_py", symlinks=True, ignore=ignore)
        out = tmp_path / f"out{number}"
        for target in ("wheel", "sdist"):
            words = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", out]
            env = {"PATH": "/usr/bin:/bin", "SOURCE_DATE_EPOCH": "1700000000"}
            subprocess.run(words, cwd=copy / "persia_py", env=env, check=True, capture_output=True)
        digests.add(tuple((path.name, files.sha256(path)) for path in sorted(out.iterdir())))
    (found,) = digests
    assert len(found) == 2
    with tarfile.open(next((tmp_path / "out0").glob("*.tar.gz"))) as archive:
        assert {"LICENSE-MIT", "LICENSE-APACHE"} <= {Path(each.name).name for each in archive}
        assert all(each.isfile() for each in archive), "a link would point out of the archive"
    (made_wheel,) = (tmp_path / "out0").glob("*.whl")
    assert [*files.wrong_metadata(made_wheel, persia.__version__), *files.wrong_binaries(made_wheel)] == []
