"""Print linked crates, and with ``--python`` Python packages, as a bill of materials (CycloneDX 1.5).

Usage: tools/sbom.py [--crate PACKAGE[:FEATURES]]... [--python] [--add BILL.json]
"""

import argparse
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def component(ecosystem: str, name: str, version: str, licence: str) -> dict[str, Any]:
    """Return one library; ``licence`` is an SPDX expression, or empty where none is known."""
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


def main() -> None:
    """Print the bill; equal inputs give equal output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crate", action="append", default=[])
    parser.add_argument("--python", action="store_true")
    parser.add_argument("--add", type=Path)
    options = parser.parse_args()
    found = json.loads(options.add.read_text())["components"] if options.add else []
    for crate in options.crate:
        package, _, features = crate.partition(":")
        found += crates(package, features)
    if options.python:
        found += installed()
    by_name = {each["purl"]: each for each in found}
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1}
    json.dump(bill | {"components": [by_name[name] for name in sorted(by_name)]}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
