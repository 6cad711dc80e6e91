"""The steps of a release: wheels, source archives, images, bills of materials and sums, and what each one checks."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import release_files
import release_install
from release_source import ROOT, ReleaseError, section

TAIL = 40
"""The lines of a failed command's output that are shown."""
WHEELS = ("persia", "persia_core", "persia_server")
CRATES = {"persia_core": "rust_core/core", "persia_server": "rust_core/server"}
BILLS = {"persia_core": "persia-core:cuda", "persia_server": "persia-embedding-sharded-server"}
"""The crate of each compiled wheel, with its features."""
SBOM = ROOT / "tools" / "sbom.py"
LTO = "thin"
"""The link-time optimization of a release."""
COMPATIBILITY = "manylinux_{}_{}".format(*release_files.GLIBC)


class CommandError(Exception):
    """A command that failed."""


@dataclass
class Release:
    """The description of a release.

    Attributes:
        folder: The folder of the files.
        version: The version of the sources.
        revision: The commit.
        epoch: The time of the commit in seconds. All files in archives have this time.
        sources: A hash of the sources. The record of a completed step has this hash.
        tag: The tag of images.
        lto: The link-time optimization of the engine.
        images: Whether images are part of the release.
        borrow: The environment whose packages the bare environment uses as dependencies. None: the dependencies are
            installed.
        rehearsal: Whether the sources need not be those of a release.
        log: The file for the output of the current step.
    """

    folder: Path
    version: str
    revision: str
    epoch: int
    sources: str
    tag: str
    lto: str
    images: bool
    borrow: Path | None
    rehearsal: bool = False
    log: Path = Path(os.devnull)
    details: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        """The folder of logs and of the records of completed steps."""
        return self.folder / ".release"

    def image(self, name: str) -> str:
        """Return the full name of an image."""
        return f"{os.environ.get('PERSIA_IMAGE') or 'persia'}/{name}:{self.tag}"

    def wheels(self) -> list[Path]:
        """Return the wheels, in the order of :data:`WHEELS`."""
        return [path for name in WHEELS for path in self.folder.glob(f"{name}-*.whl")]

    def run(self, words: Sequence[str | Path], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
        """Run a command with its output in the log, and return its standard output.

        Raises:
            CommandError: The command is missing or failed. The error has the end of the output.
        """
        command = [str(word) for word in words]
        with self.log.open("ab") as log:
            start = log.tell()
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            try:
                done = subprocess.run(
                    command,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,  # a command that asks a question ends, so the release does not wait
                    stdout=subprocess.PIPE,
                    stderr=log,
                    check=False,
                )
            except OSError as error:
                raise CommandError(f"{command[0]}: {error.strerror}") from error
            errors = self.log.read_bytes()[start:]
            log.write(done.stdout)
        if done.returncode != 0:
            said = (done.stdout + errors).decode(errors="replace").splitlines()[-TAIL:]
            ending = "\n".join(f"  {line}" for line in said)
            raise CommandError(f"{' '.join(command)}\nexited with {done.returncode}:\n{ending}")
        return done.stdout.decode()


@dataclass(frozen=True)
class Step:
    """A part of a release.

    Attributes:
        name: The name of its log, and of the file that records that the step is done.
        what: A description of the step.
        do: Performs the step, and returns the files of the release that it made.
        holds: Returns whether the results outside the folder still exist.
    """

    name: str
    what: str
    do: Callable[[Release], list[Path]]
    holds: Callable[[Release], bool] = lambda _: True


def build_environment(release: Release) -> dict[str, str]:
    """Return the variables that make builds independent of this machine and of the time."""
    cargo_home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "rust_core" / "target").resolve() / "wheels"
    flags = [f"--remap-path-prefix={path}={name}" for path, name in ((ROOT, "/persia"), (cargo_home, "/cargo"))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "RUSTFLAGS"))}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
        "CARGO_TARGET_DIR": str(target),
        "CARGO_PROFILE_RELEASE_LTO": release.lto,
        "CARGO_PROFILE_RELEASE_DEBUG": "false",
        "CARGO_PROFILE_RELEASE_STRIP": "debuginfo",
        "PYO3_NO_PYTHON": "1",
        "PERSIA_REVISION": release.revision,
        "SOURCE_DATE_EPOCH": str(release.epoch),
    }


def build_wheels(release: Release) -> list[Path]:
    """Build the compiled wheels against an old glibc, the pure wheel, and the source archives."""
    env = build_environment(release)
    out = str(release.folder)
    for pattern in ("*.whl", "*.tar.gz"):
        for old in release.folder.glob(pattern):
            old.unlink()
    for crate in CRATES.values():
        build = ["maturin", "build", "--release", "--locked", "--zig", "--compatibility", COMPATIBILITY, "--out", out]
        release.run(build, cwd=ROOT / crate, env=env)
        release.run(["maturin", "sdist", "--out", out], cwd=ROOT / crate, env=env)
    for target in ("wheel", "sdist"):
        release.run(["hatchling", "build", "--target", target, "--directory", out], cwd=ROOT / "persia_py", env=env)
    return [*release.wheels(), *release.folder.glob("*.tar.gz")]


def check_wheels(release: Release) -> list[Path]:
    """Check names, metadata, glibc and paths of the wheels, and that the source archives are complete."""
    wheels = release.wheels()
    archives = sorted(release.folder.glob("*.tar.gz"))
    for kind, found in (("wheels", wheels), ("source archives", archives)):
        if len(found) != len(WHEELS):
            names = ", ".join(path.name for path in found) or "none"
            raise ReleaseError(f"expected {len(WHEELS)} {kind}, found {names}", again(release))
    folders = [ROOT, Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")]
    wrong = [
        problem
        for wheel in wheels
        for problem in (
            *release_files.wrong_metadata(wheel, release.version),
            *release_files.wrong_binaries(wheel),
            *release_files.paths_of_this_machine(wheel, folders),
        )
    ]
    if wrong:
        raise ReleaseError("\n".join(wrong), "correct it in the sources")
    scratch = release.state / "sources"
    shutil.rmtree(scratch, ignore_errors=True)
    for archive in archives:
        with tarfile.open(archive) as file:
            file.extractall(scratch, filter="data")
        unpacked = scratch / archive.name.removesuffix(".tar.gz")
        if (crate := CRATES.get(archive.name.rsplit("-", 1)[0])) is None:
            rebuild(release, unpacked)
            continue
        (manifest,) = unpacked.glob(f"**/{Path(crate).name}/Cargo.toml")
        # `cargo metadata` names a crate that the archive lacks. The lock file may list crates that are not needed.
        words: list[str | Path] = [
            "cargo",
            "metadata",
            "--offline",
            "--format-version",
            "1",
            "--manifest-path",
            manifest,
        ]
        release.run(words)
    shutil.rmtree(scratch)
    return []


def rebuild(release: Release, sources: Path) -> None:
    """Check that the unpacked source archive of the Python package gives the same wheel."""
    out = sources.parent / "rebuilt"
    words = ["hatchling", "build", "--target", "wheel", "--directory", str(out)]
    release.run(words, cwd=sources, env=build_environment(release))
    (made,) = out.glob("*.whl")
    if release_files.sha256(made) != release_files.sha256(release.folder / made.name):
        released = release.folder / made.name
        what = f"a build from the source archive gives a different {made.name}"
        raise ReleaseError(what, f"compare the output of: unzip -v {made}; unzip -v {released}")


def install(release: Release) -> list[Path]:
    """Install the wheels into a bare environment without Rust, train the demo there, and list its packages."""
    bare = release_install.Bare(release.state / "bare", release.run, release_install.find_python())
    bare.install(release.wheels(), borrow=release.borrow)
    bare.versions(release.version, release.revision)
    release.details["install"] = bare.train()
    (wheel,) = release.folder.glob("persia-*.whl")
    words: list[str | Path] = [
        "python",
        "-I",
        SBOM,
        "--python",
        "--of",
        f"library:persia@{release.version}",
        "--file",
        wheel,
    ]
    bill = release.folder / f"persia-{release.version}.cdx.json"
    bill.write_text(bare.run(*words))
    shutil.rmtree(bare.folder)
    return [bill]


def build_images(release: Release) -> list[Path]:
    """Build the images, with labels of the version and the commit."""
    extra = release.state / "images.yaml"
    extra.write_text(release_install.overlay(release.version, release.revision))
    env = os.environ | {
        "COMPOSE_FILE": ":".join([*release_install.FILES, str(extra)]),
        "PERSIA_TAG": release.tag,
        "LTO": release.lto,
    }
    release.run([ROOT / "tools" / "compose_plugin.sh"])
    release.run([ROOT / "tools" / "base_image.sh"])
    release.run(["docker", "compose", "build", *release_install.IMAGES.values()], env=env)
    return []


def images_exist(release: Release) -> bool:
    """Whether all images of this commit exist."""
    for name in release_install.IMAGES:
        words = ["docker", "image", "inspect", release.image(name)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0 or release.revision not in done.stdout:
            return False
    return True


def check_images(release: Release) -> list[Path]:
    """Check labels and programs of the images, and write their bills of materials."""
    made, listed = [], {}
    for name in release_install.IMAGES:
        image = release.image(name)
        release_install.check_image(name, image, release.version, release.revision, release.run)
        bill, debian = release_install.packages_of(image, release.run)
        (release.state / "debian.txt").write_text(debian)
        (release.state / "bill.json").write_text(bill or json.dumps({"components": []}))
        path = release.folder / f"image-{name}-{release.version}.cdx.json"
        parts = ("--add", release.state / "bill.json", "--debian", release.state / "debian.txt")
        words = (*parts, "--of", f"container:persia/{name}@{release.version}")
        path.write_text(release.run([sys.executable, SBOM, *words]))
        made.append(path)
        found = release_install.inspect(image, release.run)
        listed[image] = {"id": found["Id"], "bytes": found["Size"], "labels": found["Config"]["Labels"]}
    release_install.check_serving(release.image("runtime"), release.image("serving"), release.run)
    path = release.folder / "images.json"
    path.write_text(json.dumps(listed, indent=1) + "\n")
    return [*made, path]


def write_bills(release: Release) -> list[Path]:
    """Write the bills of materials of the compiled wheels."""
    made = []
    for name, crate in BILLS.items():
        (wheel,) = release.folder.glob(f"{name}-*.whl")
        of = f"library:{name.replace('_', '-')}@{release.version}"
        path = release.folder / f"{name}-{release.version}.cdx.json"
        words = ("--crate", crate, "--of", of, "--file", wheel)
        path.write_text(release.run([sys.executable, SBOM, *words], env=build_environment(release)))
        made.append(path)
    return made


def finish(release: Release) -> list[Path]:
    """Write the notes and the checksums, and compare the files with the checksums."""
    try:
        notes = section(ROOT, release.version)
    except ReleaseError as refused:  # in a rehearsal only
        notes = f"No notes: {refused}"
    path = release.folder / "NOTES.md"
    path.write_text(f"# Persia {release.version}\n\n{notes}\n")
    release_files.write_sums(release.folder)
    wrong = [*release_files.wrong_sums(release.folder)]
    if wrong:
        raise ReleaseError("\n".join(wrong), again(release))
    return [path, release.folder / release_files.SUMS]


WHEEL_STEPS = (
    Step("wheels", "build wheels and source archives", build_wheels),
    Step("check", "check metadata, glibc and source archives", check_wheels),
    Step("install", "install the wheels into a bare environment and train the demo", install),
    Step("bills", "write bills of materials", write_bills),
)
IMAGE_STEPS = (
    Step("images", "build the images", build_images, images_exist),
    Step("image-checks", "check the images and write their bills of materials", check_images, images_exist),
)
LAST = Step("sums", "write the checksums", finish)


def again(release: Release) -> str:
    """Return the command that repeats a release from the start."""
    variables = [
        *(["REHEARSE=1"] if release.rehearsal else []),
        *([] if release.images else ["IMAGES=0"]),
        *([f"BORROW={release.borrow}"] if release.borrow else []),
        *([f"LTO={release.lto}"] if release.lto != LTO else []),
    ]
    return " ".join([f"rm -r {release.folder} && make release", *variables])
