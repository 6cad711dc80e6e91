"""YAML as a tree: the same strings, numbers and limits as in the Rust parser."""

import math
from typing import Any

import pytest

from persia.errors import ConfigError
from persia.runtime.yaml_tree import Items, Scalar, TreeError, node_of, number, parse, value_of, whole_number
from persia_core.features import Features

SPELLINGS = [
    *("1000000", "1_000_000", "1e6", "1E6", "1.0e6", "1e+6", "+1000000", "0x10", "0X10", "0o17", "0b11", "010", "1.5"),
    *("1e-3", "_1", "1_", "1__0", "0x", "0x+1", "++1", "1e300", "eight", "1 000", "1.", "1_0.0", "5e0", "0xff_ff"),
    *("4294967295", "'7'", "~", "true", "1e", "e1", ".", "1.e1"),
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_both_parsers_read_the_same_numbers(text: str) -> None:
    items = parse(f"[{text}]")
    assert isinstance(items, Items)
    node = items.items[0]
    assert isinstance(node, Scalar)
    features = f"a: {{type: id, dim: 1, ttl: {text}}}, b: {{type: dense, missing: {text}}}"
    wrong = refused(f"features: {{{features}}}\nlabels: {{y: {{}}}}")
    whole = None if node.quoted else whole_number(node.text)
    assert ("features.a.ttl" in wrong) == (whole is None or not 1 <= whole < 2**32)
    value = None if node.quoted else number(node.text)
    if text not in {"~"}:
        assert ("features.b.missing" in wrong) == (value is None or not math.isfinite(value) or abs(value) > 3e38)


def refused(text: str) -> set[str]:
    """Return the keys that the Rust parser refuses. An empty key means the whole text."""
    try:
        Features.parse(text, "f")
    except ConfigError as error:
        return {path for _, _, path, message in error.findings if "allowed: a mapping" not in message}
    return set()


@pytest.mark.parametrize(
    "text",
    [
        "a: b: c",
        "a: 'x",
        'a: "\\q"',
        "a: [1, 2",
        "a: {b}",
        "a:\n  - b\n c: d",
        "%YAML 1.2\n---\na: 1",
        "a: 1\n...\n",
        "? a\n: b",
        "a: |\n  text\n  more",
        "a: &x 1\nb: *x",
        "a: *y",
        "a: !t x",
        "a: @x",
        "a: `x`",
        "{a: 1, b}",
        "a: 1 # c",
        "a:b",
        "a\n",
        "\ufeffa: 1",
        "a: é",
        "- a\n- b",
        "a: {b: 1,}",
        "'a': \"b\"",
        "a: >-\n  x\n  y\n",
    ],
)
def test_both_parsers_read_the_same_yaml(text: str) -> None:
    whole = f"{text}\n"
    try:
        parse(whole)
        ours = True
    except TreeError:
        ours = False
    assert ours == ("" not in refused(whole))


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -3, 10**20, 0.5, -1e-9, 1e300, "", "x", "1", "1e6", "007", "true", "null", "~", "a: b", "é",
     [], [1, "1", [None]], {}, {"a b": {"c": [1.5]}}],
)  # fmt: skip
def test_a_value_survives_its_node(value: Any) -> None:
    found = value_of(node_of(value))
    assert found == value and type(found) is type(value)
