"""Overrides from the command line: ``--set train.seed=7``."""

from collections.abc import Sequence

from persia.config.findings import Findings, near
from persia.config.reader import FREE
from persia.runtime.yaml_tree import Entries, Node, Place, Scalar, TreeError, parse


def apply(root: Entries, overrides: Sequence[str], findings: Findings) -> None:
    """Apply overrides of the form ``KEY.KEY=VALUE`` to a tree. The last one for a key wins.

    A new key is added. Whether the key is allowed is checked later, together with the keys of the file.

    Args:
        root: The tree, which is changed.
        overrides: The texts after ``--set``. Values are YAML.
        findings: Receives the errors in the overrides.
    """
    for override in overrides:
        place = Place(0, 0, override)
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            findings.error(place, "", "expected KEY=VALUE, such as train.seed=7")
            continue
        try:
            value: Node = parse(text, override) if text.strip() else Scalar(place, "")
        except TreeError as error:
            findings.error(place, path, str(error))
            continue
        _put(root, keys, value, place, findings)


def _put(block: Entries, keys: list[str], value: Node, place: Place, findings: Findings) -> None:
    done: list[str] = []
    while keys:
        key, keys = _next(block, keys)
        index = next((at for at, (known, _) in enumerate(block.entries) if known.text == key), None)
        if not keys:
            entry = (Scalar(place, key), value)
            if index is None:
                block.entries.append(entry)
            else:
                block.entries[index] = (block.entries[index][0], value)
            return
        inner = None if index is None else block.entries[index][1]
        done.append(key)
        if inner is None and len(done) == 2 and done[0] in FREE:
            kind = done[0][:-1]
            whole = ".".join(done)
            message = f"no {kind} `{key}`{near(key, block.first)}; a new {kind} needs all its keys"
            findings.error(place, whole, f"{message}: --set '{whole}={{…}}'")
            return
        if inner is None or inner.is_null:
            inner = Entries(place, [])
            entry = (Scalar(place, key) if index is None else block.entries[index][0], inner)
            if index is None:
                block.entries.append(entry)
            else:
                block.entries[index] = entry
        elif not isinstance(inner, Entries):
            findings.error(place, ".".join(done), f"found {inner.found()}, which has no key `{keys[0]}`")
            return
        elif index is not None:
            # An alias is one node at several places. A copy of the node keeps the values at the other places.
            inner = Entries(inner.place, [*inner.entries])
            block.entries[index] = (block.entries[index][0], inner)
        block = inner


def _next(block: Entries, keys: list[str]) -> tuple[str, list[str]]:
    """Return the next key and the rest of the path. A known key may contain dots."""
    for count in range(len(keys), 1, -1):
        if (whole := ".".join(keys[:count])) in block.first:
            return whole, keys[count:]
    return keys[0], keys[1:]
