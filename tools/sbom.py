"""Print crates, Python packages and Debian packages as a bill of materials (CycloneDX 1.5).

Usage: tools/sbom.py [--crate PACKAGE[:FEATURES]]... [--python] [--add BILL.json] [--debian LIST]
    [--of TYPE:NAME@VERSION] [--file FILE]

``--crate`` adds the crates that are linked into a package, ``--python`` the Python packages of this environment.
``--debian`` reads lines of package, version and architecture, separated by tabs. ``--of`` names the object that the
bill describes, and ``--file`` the file of this object, whose hash is then in the bill.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def component(ecosystem: str, name: str, version: str, licence: str) -> dict[str, Any]:
    """Return one library; ``licence`` is an SPDX expression, or empty if it is unknown."""
    found: dict[str, Any] = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:{ecosystem}/{name}@{version}",
    }
    if licence:
        found["licenses"] = [{"expression": licence}]
    return found


def crates(package: str, features: str) -> list[dict[str, Any]]:
    """Return the crates that are linked into a package of this workspace, without the compiler's own libraries."""
    tree = ["cargo", "tree", "--locked", "--offline", "--edges", "normal", "--prefix", "none", "--format", "{p}\t{l}\t"]
    words = [*tree, "--package", package, "--features", features]
    done = subprocess.run(words, cwd=ROOT / "rust_core", check=True, stdout=subprocess.PIPE, text=True)
    found = []
    for line in filter(None, done.stdout.splitlines()):
        crate, licence, _ = line.split("\t")
        name, version = crate.split()[:2]
        found.append(component("cargo", name, version.removeprefix("v"), licence.replace("/", " OR ")))
    return found


def installed() -> list[dict[str, Any]]:
    """Return the Python packages of this environment."""
    found = []
    for each in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower()
        licence = str(each.metadata.json.get("license_expression", ""))
        found.append(component("pypi", name, each.version, licence))
    return found


def debian(lines: str) -> list[dict[str, Any]]:
    """Return Debian packages from lines of package, version and architecture."""
    found = []
    for line in lines.splitlines():
        name, version, architecture = line.split("\t")
        each = component("deb/debian", name, version, "")
        found.append(each | {"purl": f"{each['purl'].replace('+', '%2B')}?arch={architecture}"})
    return found


def subject(text: str, file: Path | None) -> dict[str, Any]:
    """Return the object that a bill describes, from ``TYPE:NAME@VERSION``."""
    kind, _, named = text.partition(":")
    name, _, version = named.rpartition("@")
    found: dict[str, Any] = {"type": kind, "name": name, "version": version}
    if file is not None:
        found["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}]
    return found


def main() -> None:
    """Print the bill. Equal inputs give equal output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crate", action="append", default=[])
    parser.add_argument("--python", action="store_true")
    parser.add_argument("--add", type=Path)
    parser.add_argument("--debian", type=Path)
    parser.add_argument("--of")
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    found = json.loads(options.add.read_text())["components"] if options.add else []
    for crate in options.crate:
        package, _, features = crate.partition(":")
        found += crates(package, features)
    if options.python:
        found += installed()
    if options.debian:
        found += debian(options.debian.read_text())
    by_name = {each["purl"]: each for each in found}
    bill: dict[str, Any] = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1}
    if options.of:
        bill["metadata"] = {"component": subject(options.of, options.file)}
    json.dump(bill | {"components": [by_name[name] for name in sorted(by_name)]}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
