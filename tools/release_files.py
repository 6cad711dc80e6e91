"""The files of a release: what wheels contain and need, and their hashes."""

import hashlib
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import canonicalize_name, parse_wheel_filename

SUMS = "SHA256SUMS"
GLIBC = (2, 28)
"""The glibc that wheels need: that of PyTorch's own wheels (manylinux_2_28). docs/install.md names it."""
LIBRARIES = re.compile(r"(ld-linux-[\w-]+|libc|libm|libdl|libpthread|librt|libutil|libgcc_s)\.so\.\d+")
"""The shared libraries that every system has, of those that the manylinux rules allow."""
ELF = b"\x7fELF"


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Return the files of a release, sorted by name, without the hidden files of the release tool."""
    return sorted(
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".") and path.name != SUMS
    )


def write_sums(folder: Path) -> None:
    """Write the hashes of all files, in the form that ``sha256sum --check`` reads."""
    (folder / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files_of(folder)))


def wrong_sums(folder: Path) -> Iterator[str]:
    """Yield each file that differs from its hash, is missing, or has none."""
    lines = (line.split("  ", 1) for line in (folder / SUMS).read_text().splitlines())
    listed = {name: digest for digest, name in lines}
    found = {path.name: path for path in files_of(folder)}
    for name in sorted(listed.keys() | found.keys()):
        if name not in found:
            yield f"{name} is missing"
        elif name not in listed:
            yield f"{name} is not in {SUMS}"
        elif sha256(found[name]) != listed[name]:
            yield f"{name} differs from its hash in {SUMS}"


def metadata_of(wheel: Path) -> bytes:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return archive.read(name)


def wrong_metadata(wheel: Path, version: str) -> Iterator[str]:
    """Yield what is wrong with the name and the metadata of a wheel, by the rules of package indexes."""
    name, tagged, _, _ = parse_wheel_filename(wheel.name)
    try:
        parsed = Metadata.from_email(metadata_of(wheel), validate=True)
    except Exception as error:  # an ExceptionGroup; for Python 3.10, packaging defines its own class
        yield f"{wheel.name}: {error}: {getattr(error, 'exceptions', '')}"
        return
    if str(tagged) != version or str(parsed.version) != version:
        yield f"{wheel.name} has version {parsed.version}, expected {version}"
    if canonicalize_name(parsed.name) != name:
        yield f"{wheel.name} is called {parsed.name} in its metadata"
    for what, given in (
        ("license", parsed.license_expression),
        ("description", parsed.description),
        ("summary", parsed.summary),
    ):
        if not given:
            yield f"{wheel.name} has no {what}"
    with zipfile.ZipFile(wheel) as archive:
        for licence in parsed.license_files or []:
            if not any(name.endswith(f".dist-info/licenses/{licence}") for name in archive.namelist()):
                yield f"{wheel.name} does not contain its {licence}"
        if not parsed.license_files:
            yield f"{wheel.name} contains no license"


def tagged_glibc(wheel: Path) -> tuple[int, int] | None:
    """Return the glibc that the tags of a wheel promise, None for a wheel without compiled files.

    Raises:
        ValueError: The wheel is tagged for a single machine or for another system.
    """
    _, _, _, tags = parse_wheel_filename(wheel.name)
    found: set[tuple[int, int]] = set()
    for platform in {tag.platform for tag in tags}:
        if platform == "any":
            return None
        many = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", platform)
        if many:
            found.add((int(many[1]), int(many[2])))
        elif not re.fullmatch(r"manylinux(1|2010|2014)_\w+", platform):  # further names of a manylinux tag
            raise ValueError(f"{wheel.name}: the tag {platform} is not a manylinux tag")
    return min(found)


def wrong_binaries(wheel: Path) -> Iterator[str]:
    """Yield wrong tags, and the compiled files that need a newer glibc than the tag says or an uncommon library."""
    try:
        promised = tagged_glibc(wheel)
    except ValueError as error:
        yield str(error)
        return
    count = 0
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            with archive.open(name) as file:
                if file.read(4) != ELF:
                    continue
            count += 1
            for problem in wrong_binary(Path(archive.extract(name, folder)), promised or (0, 0)):
                yield f"{wheel.name}: {name} {problem}"
    if promised is None and count:
        yield f"{wheel.name} has no platform tag, but {count} compiled files"
    if promised is not None and not count:
        yield f"{wheel.name} has a platform tag, but no compiled file"


def wrong_binary(binary: Path, promised: tuple[int, int]) -> Iterator[str]:
    """Yield the reasons why a compiled file may not run with this glibc and the common libraries."""
    try:
        said = readelf(binary, "--version-info", "--dynamic")
    except subprocess.CalledProcessError as error:
        yield f"cannot be read: {error.stderr.strip()}"
        return
    needed = {(int(major), int(minor)) for major, minor in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", said)}
    newer = sorted(version for version in needed if version > promised)
    if newer:
        listed = ", ".join(f"GLIBC_{major}.{minor}" for major, minor in newer)
        yield f"needs {listed}, newer than {promised[0]}.{promised[1]}"
    for library in re.findall(r"\(NEEDED\).*\[(.+)\]", said):
        if not LIBRARIES.fullmatch(library):
            yield f"needs {library}, which not every system has"
    for path in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", said):
        yield f"searches for libraries in {path}"


def readelf(binary: Path, *options: str) -> str:
    """Return the output of ``readelf`` for a file, in English."""
    words = ["readelf", "--wide", *options, str(binary)]
    done = subprocess.run(words, env={**os.environ, "LC_ALL": "C"}, check=True, capture_output=True, text=True)
    return done.stdout


def paths_of_this_machine(wheel: Path, folders: list[Path]) -> Iterator[str]:
    """Yield the files of a wheel that contain a folder of this machine, such as the clone's."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            for folder in folders:
                if str(folder).encode() in content:
                    yield f"{wheel.name}: {name} contains the path {folder}"
