"""The comparison of states of models and optimizers."""

import torch


def assert_same_form(one: object, other: object) -> None:
    """Compare states: equal keys, and plain tensors that are equal to 1e-6."""
    assert type(one) is type(other)
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_form(one[key], other[key])
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for first, second in zip(one, other, strict=True):
            assert_same_form(first, second)
    elif isinstance(one, torch.Tensor):
        assert type(one) is torch.Tensor
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    else:
        assert one == other
