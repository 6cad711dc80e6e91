"""The sources of a release: the places of the version, the changelog, the state of the clone.

``release_source.py VERSION`` makes VERSION the next version: it writes VERSION to every place, and renames the section
``Unreleased`` of the changelog to VERSION.
"""

import datetime
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

VERSION = r"(?P<version>\d+\.\d+\.\d+)"
FORM = re.compile(r"\d+\.\d+\.\d+")

PLACES: dict[str, tuple[str, ...]] = {
    "rust_core/Cargo.toml": (rf'^version = "{VERSION}"$',),
    "rust_core/Cargo.lock": (rf'^name = "persia-[a-z-]+"\nversion = "{VERSION}"$',),
    "rust_core/fuzz/Cargo.lock": (rf'^name = "persia-(?!fuzz")[a-z-]+"\nversion = "{VERSION}"$',),
    "persia_py/pyproject.toml": (
        rf'^version = "{VERSION}"$',
        rf'"persia-core=={VERSION}"',
        rf'"persia-server=={VERSION}"',
    ),
    "persia_py/persia/__init__.py": (rf'^__version__ = "{VERSION}"$',),
}
"""The files that contain the version, and the patterns of its places. Each pattern occurs at least once."""
WORKSPACE = "rust_core/Cargo.toml"
"""The file whose version is that of the sources."""
CHANGELOG = "CHANGELOG.md"
UNRELEASED = "## Unreleased\n"
UPGRADE = "tests/data/upgrade"
"""The folder with a checkpoint and a log of each released version."""


class ReleaseError(Exception):
    """A release that cannot be made. The message has the problem and the next command."""

    def __init__(self, what: str, following: str) -> None:
        super().__init__(what)
        self.following = following


@dataclass(frozen=True)
class Place:
    """One occurrence of the version."""

    file: str
    line: int
    version: str


def places(root: Path) -> Iterator[Place]:
    """Yield every occurrence of the version.

    Raises:
        ReleaseError: A pattern of :data:`PLACES` does not occur.
    """
    for file, patterns in PLACES.items():
        text = (root / file).read_text()
        for pattern in patterns:
            found = list(re.finditer(pattern, text, re.MULTILINE))
            if not found:
                raise ReleaseError(
                    f"{file}: found no version of the form {pattern}", "correct PLACES in tools/release_source.py"
                )
            for each in found:
                yield Place(file, text.count("\n", 0, each.start("version")) + 1, each["version"])


def version(root: Path) -> str:
    """Return the version of the sources.

    Raises:
        ReleaseError: The places have different versions. The message names all places.
    """
    found = list(places(root))
    own = next(each.version for each in found if each.file == WORKSPACE)
    others = [each for each in found if each.version != own]
    if others:
        listed = "; ".join(f"{each.file}:{each.line} has {each.version}" for each in others)
        raise ReleaseError(f"{WORKSPACE} has version {own}, but {listed}", f"make next-version V={own}")
    return own


def section(root: Path, of: str) -> str:
    """Return the changes of a version, as the changelog lists them.

    Raises:
        ReleaseError: There is no such section, the section has no date or no line, or ``Unreleased`` is not empty.
    """
    text = (root / CHANGELOG).read_text()
    found = re.search(rf"^## {re.escape(of)} - (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    following = f"make next-version V={of}"
    if found is None:
        raise ReleaseError(f"{CHANGELOG} has no section '## {of} - DATE'", following)
    try:
        datetime.date.fromisoformat(found[1])
    except ValueError as error:
        raise ReleaseError(
            f"{CHANGELOG}: the date of section {of} is {found[1]!r}, not YYYY-MM-DD", following
        ) from error
    if not found[2].strip():
        raise ReleaseError(f"{CHANGELOG}: section {of} lists no change", f"describe the changes in {CHANGELOG}")
    if _unreleased(text):
        raise ReleaseError(
            f"{CHANGELOG} lists changes under 'Unreleased', which would be part of version {of}",
            f"move them to section {of}",
        )
    return found[2].strip()


def _unreleased(text: str) -> str:
    found = re.search(rf"^{UNRELEASED}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def git(root: Path, *words: str) -> str:
    """Return the output of a git command.

    Raises:
        ReleaseError: The command failed.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}", "release from a clone of the repository")
    return done.stdout.rstrip("\n")


def problems(root: Path) -> Iterator[ReleaseError]:
    """Yield the reasons why these sources are not those of a release."""
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        names = ", ".join(line[3:] for line in changed[:5]) + (", …" if len(changed) > 5 else "")
        differ = "1 file differs" if len(changed) == 1 else f"{len(changed)} files differ"
        yield ReleaseError(f"{differ} from the commit: {names}", "git commit, or git stash --include-untracked")
    try:
        own = version(root)
        yield from _problems_of(root, own)
    except ReleaseError as refused:
        yield refused


def _problems_of(root: Path, own: str) -> Iterator[ReleaseError]:
    try:
        section(root, own)
    except ReleaseError as refused:
        yield refused
    if not (root / UPGRADE / own).is_dir():
        what = f"{UPGRADE}/{own} is missing: later versions are tested with the checkpoint and the log in it"
        yield ReleaseError(what, "make upgrade-data")
    tags = git(root, "tag", "--list", f"v{own}")
    if tags and git(root, "rev-list", "-n", "1", f"v{own}") != git(root, "rev-parse", "HEAD"):
        what = f"version {own} is released: the tag v{own} points to another commit"
        yield ReleaseError(what, "make next-version V=NEXT")


def set_version(root: Path, new: str, today: datetime.date) -> list[str]:
    """Write a version to every place, rename the section ``Unreleased``, and return the names of the changed files.

    Raises:
        ReleaseError: The version is not of the form 1.2.3, is too low, or there are no unreleased changes.
    """
    if not FORM.fullmatch(new):
        raise ReleaseError(f"V={new}: expected a version such as 0.2.0", "make next-version V=0.2.0")
    own = next(each.version for each in places(root) if each.file == WORKSPACE)
    if _numbers(new) < _numbers(own):
        raise ReleaseError(f"V={new} is lower than the current version, {own}", f"make next-version V={own}")
    text = (root / CHANGELOG).read_text()
    released = f"## {new} - {today.isoformat()}\n"
    done = re.search(rf"^## {re.escape(new)} - ", text, re.MULTILINE)
    if not done and not _unreleased(text):
        raise ReleaseError(f"{CHANGELOG} lists nothing under 'Unreleased'", f"describe the changes in {CHANGELOG}")
    contents = {} if done else {CHANGELOG: text.replace(UNRELEASED, f"{UNRELEASED}\n{released}", 1)}
    for file, patterns in PLACES.items():
        content = (root / file).read_text()
        for pattern in patterns:
            content = re.sub(pattern, lambda each: _replaced(each, new), content, flags=re.MULTILINE)
        contents[file] = content
    changed = [file for file, content in contents.items() if content != (root / file).read_text()]
    for file in changed:
        (root / file).write_text(contents[file])
    return changed


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _replaced(found: "re.Match[str]", new: str) -> str:
    start, end = found.start("version") - found.start(), found.end("version") - found.start()
    return found[0][:start] + new + found[0][end:]


def main() -> int:
    """Set the version that the command line names."""
    try:
        if len(sys.argv) != 2:
            raise ReleaseError(
                f"expected one version; {WORKSPACE} has version {version(ROOT)}", "make next-version V=0.2.0"
            )
        for file in set_version(ROOT, sys.argv[1], datetime.datetime.now(datetime.timezone.utc).date()):
            print(f"changed {file}")
    except ReleaseError as refused:
        print(f"error: {refused}\nnext:  {refused.following}", file=sys.stderr)
        return 2
    print("next:  make upgrade-data, then commit, then make release")
    return 0


if __name__ == "__main__":
    sys.exit(main())
