"""Check licenses and sources of all crates by the rules in rust_core/deny.toml, if cargo-deny is not installed."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def is_allowed(expression: str, allowed: set[str]) -> bool:
    """Whether these licenses satisfy an SPDX expression, in which ``/`` is an old form of ``OR``."""
    words = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def either() -> bool:
        found = both()
        while words and words[0] == "OR":
            words.pop(0)
            found = both() or found
        return found

    def both() -> bool:
        found = one()
        while words and words[0] == "AND":
            words.pop(0)
            found = one() and found
        return found

    def one() -> bool:
        word = words.pop(0)
        if word == "(":
            found = either()
            words.pop(0)
            return found
        if words[:1] == ["WITH"]:
            word = " ".join([word, words.pop(0), words.pop(0)])
        return word in allowed

    return either()


def problems(packages: list[dict[str, Any]], allowed: set[str]) -> Iterator[str]:
    """Yield the problems of the packages of ``cargo metadata``."""
    for package in packages:
        name, source = f"{package['name']} {package['version']}", package["source"]
        if not package["license"] or not is_allowed(package["license"], allowed):
            yield f"{name}: the license {package['license']} is not allowed in rust_core/deny.toml"
        if source is not None and not source.startswith("registry+"):
            yield f"{name}: the source is {source}, not the registry"
        if source is None:
            for dependency in package["dependencies"]:
                if dependency["req"] == "*" and dependency.get("path") is None:
                    yield f"{name}: any version of {dependency['name']} is accepted"


def main() -> int:
    """Return 1 if there is a problem."""
    words = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    done = subprocess.run(words, cwd=ROOT / "rust_core", check=True, stdout=subprocess.PIPE)
    rules = (ROOT / "rust_core" / "deny.toml").read_text()
    _, licences = rules.split("\nallow = ", 1)
    allowed = set(re.findall(r'"([^"]+)"', licences.split("]", 1)[0]))
    packages = json.loads(done.stdout)["packages"]
    found = list(problems(packages, allowed))
    sys.stdout.write("\n".join(found or [f"licenses and sources of {len(packages)} crates: good"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
