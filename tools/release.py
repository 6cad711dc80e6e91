"""Build and verify a release in ``dist/persia-VERSION``: wheels, source archives, images, bills of materials, sums.

``make release`` runs it. It is resumable: steps that are done for these sources are not repeated. Nothing is published.

``--rehearse`` makes everything from sources that are not those of a release, in ``dist/rehearsal/persia-VERSION``; the
tags of its images end with ``-rehearsal``.
"""

import argparse
import fcntl
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import release_files
import release_install
from release_source import ROOT, ReleaseError, git, problems, version
from release_steps import IMAGE_STEPS, LAST, LTO, WHEEL_STEPS, CommandError, Release, Step
from run_tests import fingerprint


def is_done(release: Release, step: Step) -> bool:
    """Whether a step is done, and its files are unchanged."""
    path = release.state / f"{step.name}.json"
    if not path.exists():
        return False
    record: dict[str, Any] = json.loads(path.read_text())
    files = {release.folder / name: digest for name, digest in record["files"].items()}
    if not all(file.is_file() and release_files.sha256(file) == digest for file, digest in files.items()):
        return False
    release.details |= record["details"]
    return step.holds(release)


def remaining(release: Release, steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps from the first one that is not done. Their records are removed."""
    done = 0
    while done < len(steps) and is_done(release, steps[done]):
        tell(f"{steps[done].what}: done before")
        done += 1
    for step in steps[done:]:
        (release.state / f"{step.name}.json").unlink(missing_ok=True)
    return steps[done:]


def perform(release: Release, step: Step) -> None:
    """Do a step, and record it."""
    path = release.state / f"{step.name}.log"
    tell(f"{step.what} (output: {path})")
    started = time.monotonic()
    path.unlink(missing_ok=True)
    release.log = path
    try:
        files = step.do(release)
    except CommandError as failed:
        following = "correct the cause, then repeat the command; finished steps are kept"
        raise ReleaseError(f"{failed}\nthe whole output is in {path}", following) from failed
    digests = {file.name: release_files.sha256(file) for file in files}
    record = {"files": digests, "details": release.details}
    (release.state / f"{step.name}.json").write_text(json.dumps(record, indent=1))
    tell(f"{step.what}: done in {time.monotonic() - started:.0f} s")


def tell(line: str) -> None:
    """Print a line of this script."""
    print(f"== {line}", flush=True)


def missing_programs(*, images: bool) -> Iterator[ReleaseError]:
    """Yield an error for each program that this machine lacks."""
    programs = {"cargo": "https://rustup.rs", "readelf": "Debian: apt-get install binutils"}
    for program, how in {
        **programs,
        **({"docker": "install a Docker engine, or make release IMAGES=0"} if images else {}),
    }.items():
        if shutil.which(program) is None:
            yield ReleaseError(f"{program} is missing", how)


def prepare(options: argparse.Namespace) -> Release:
    """Check the sources, and return the description of the release.

    Raises:
        ReleaseError: A program is missing, or these are not the sources of a release. The message names all reasons.
    """
    found = [*missing_programs(images=options.images)]
    if options.borrow and not options.rehearse:
        what = "--borrow needs --rehearse: a release installs its own dependencies, for its bill of materials"
        found.append(ReleaseError(what, "make release, or make release REHEARSE=1 BORROW=.venv"))
    unfit = [*problems(ROOT)]
    if options.rehearse:
        for each in unfit:
            tell(f"rehearsal, not a release: {each}")
        own = version(ROOT)
    else:
        found += unfit
    if found:
        last = found.pop()
        listed = [f"{each}\nnext:  {each.following}" for each in found]
        raise ReleaseError("\nerror: ".join([*listed, str(last)]), last.following)
    own = version(ROOT)
    folder = options.folder / ("rehearsal" if options.rehearse else "") / f"persia-{own}"
    return Release(
        folder=folder.absolute(),
        version=own,
        revision=git(ROOT, "rev-parse", "HEAD"),
        epoch=int(git(ROOT, "show", "--no-patch", "--format=%ct", "HEAD")),
        sources=f"{fingerprint()} {git(ROOT, 'rev-parse', 'HEAD')} lto={options.lto} borrow={options.borrow}",
        tag=f"{own}-rehearsal" if options.rehearse else own,
        lto=options.lto,
        images=options.images,
        borrow=options.borrow,
        rehearsal=options.rehearse,
    )


def discard_others(release: Release) -> None:
    """Remove files that were made from other sources."""
    mark = release.state / "sources.txt"
    if mark.exists() and mark.read_text() == release.sources:
        return
    for path in [*release.folder.iterdir(), *release.state.iterdir()]:
        if path.is_file() and path.name != "lock":
            path.unlink()
    mark.write_text(release.sources)


def make(release: Release) -> None:
    """Do all steps.

    Raises:
        ReleaseError: A step failed, or another process makes this release.
    """
    release.state.mkdir(parents=True, exist_ok=True)
    with (release.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ReleaseError(f"another process is making {release.folder}", "wait until it ends") from error
        discard_others(release)
        steps = [*WHEEL_STEPS, *(IMAGE_STEPS if release.images else ()), LAST]
        for step in remaining(release, steps):
            perform(release, step)
    print(f"\nPersia {release.version}, commit {release.revision[:12]}, in {release.folder}:")
    for path in [*release_files.files_of(release.folder), release.folder / release_files.SUMS]:
        print(f"  {path.stat().st_size:>12,}  {path.name}")
    if release.images:
        print("images (export them with `docker save`):")
        for name in release_install.IMAGES:
            print(f"  {release.image(name)}")
    print(f"compiled for glibc {'.'.join(map(str, release_files.GLIBC))} or later; {release.details['install']}")


def main() -> int:
    """Make a release and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="accept sources that are not those of a release")
    parser.add_argument("--no-images", dest="images", action="store_false", help="build wheels only")
    parser.add_argument(
        "--borrow", type=Path, metavar="VENV", help="test with the packages of VENV as dependencies, offline"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "dist", help="parent of the folder of the release (default: dist)"
    )
    parser.add_argument("--lto", default=LTO, choices=["thin", "false"], help="link-time optimization")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        make(prepare(parser.parse_args()))
    except ReleaseError as refused:
        print(f"error: {refused}\nnext:  {refused.following}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; repeat the command to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
