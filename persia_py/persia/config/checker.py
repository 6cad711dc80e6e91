"""The base of checks across the keys of a ``persia.yml``: the node of a key, its position, and errors about it."""

from collections.abc import Mapping
from typing import Any

from persia.config.findings import Findings
from persia.runtime.yaml_tree import Entries, Node, Place


def node_at(root: Node, path: str) -> Node | None:
    """Return the value of a key; None if the file does not have it."""
    node: Node | None = root
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Entries) else None
    return node


class Checker:
    """Checks keys against each other.

    Args:
        root: The tree of the file, with overrides.
        values: The parsed blocks. A value with an error is None.
        findings: Collects the errors and warnings.
    """

    def __init__(self, root: Entries, values: Mapping[str, Any], findings: Findings) -> None:
        self._root, self._values, self._findings = root, values, findings

    def _node(self, path: str) -> Node | None:
        """Return the value of a key; None if the file does not have it."""
        return node_at(self._root, path)

    def _place(self, path: str) -> Place:
        """Return the place of a key, or of the innermost block around it."""
        while path and (node := self._node(path)) is None:
            path = path.rpartition(".")[0]
        return node.place if path and node is not None else self._root.place

    def _error(self, path: str, message: str) -> None:
        self._findings.error(self._place(path), path, message)

    def _warn(self, path: str, message: str) -> None:
        self._findings.warn(self._place(path), path, message)
