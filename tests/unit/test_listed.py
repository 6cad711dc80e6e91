"""Lists of names in messages."""

from persia.embedding.listed import listed, listed_sizes


def test_a_list_is_bounded() -> None:
    assert listed([]) == "none"
    assert listed(["a", "b"]) == "a, b"
    assert listed(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert listed(dict.fromkeys("abc"), 2) == "a, b and 1 more"
    assert listed(["a is 1", "b is 2", "c is 3"], 2, "; ") == "a is 1; b is 2; and 1 more"


def test_of_many_sizes_those_that_differ_are_listed() -> None:
    assert listed_sizes([("a", 2), ("b", 3)], 2) == "a: 2, b: 3"
    assert listed_sizes([*((f"f{number}", 2) for number in range(12)), ("label", 3)], 2) == "f0: 2, label: 3"
