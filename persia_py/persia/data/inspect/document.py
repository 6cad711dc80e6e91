"""A proposal as the text of a ``persia.yml``, with reasons as comments."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from persia.data.inspect.proposal import Proposal

_PLAIN = re.compile(r"^[A-Za-z_][A-Za-z0-9_./-]*$")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"}


def write(proposal: Proposal) -> str:
    """Return the text of the document."""
    return "\n".join(_lines(proposal)) + "\n"


def _lines(proposal: Proposal) -> Iterator[str]:
    yield f"# Proposed by `persia data inspect` from {proposal.source}. Edit this file, then: persia train persia.yml"
    yield "# A comment says why its line was proposed. The documentation has all keys: persia.yml, Feature transforms."
    for warning in proposal.warnings:
        yield f"# warning: {warning}"
    yield "data:"
    for key, setting in proposal.data.items():
        yield f"  {key}: {flow(setting.value)}{_comment(setting.reason)}"
    yield ""
    yield "features:"
    for feature in proposal.features:
        yield f"  {flow(feature.name)}: {flow(feature.keys)}{_comment(feature.reason)}"
    for column in proposal.left_out:
        how = "; to use it anyway, remove the # below" if column.features else ""
        yield f"  # left out: {column.column}: {column.reason}{how}"
        for feature in column.features:
            yield f"  # {flow(feature.name)}: {flow(feature.keys)}"
    yield ""
    yield "labels:"
    keys = {"column": proposal.label.column, **proposal.label.keys}
    yield f"  {flow(proposal.label_name)}: {flow(keys)}{_comment(proposal.label.reason)}"
    yield ""
    yield f"model: {flow(proposal.model.value)}{_comment(proposal.model.reason)}"
    yield ""
    yield "train:"
    for key, setting in proposal.train.items():
        yield f"  {key}: {flow(setting.value)}{_comment(setting.reason)}"
    for key, setting in proposal.options.items():
        yield f"  # {key}: {flow(setting.value)}{_comment(setting.reason)}"


def _comment(reason: str) -> str:
    return f"  # {reason}" if reason else ""


def flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(each) for each in value) + "]"
    if isinstance(value, str):
        if _PLAIN.match(value) and value.lower() not in _WORDS:
            return value
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return f"{value:.1f}"
    # PyYAML reads 1e-6 as a string, and 1.0e-6 as a number.
    text = repr(value) if isinstance(value, float) else str(yaml.safe_dump(value)).split("\n")[0]
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)
