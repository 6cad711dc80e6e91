"""Attention between features on a CUDA device: fused, and operation by operation."""

import pytest
import torch

from persia.models import AutoInt


@pytest.mark.row("S4-14/G")
def test_sdpa_and_math_have_equal_outputs_and_gradients() -> None:
    dims = [8] * 45
    results = []
    for attention in ("sdpa", "math"):
        torch.manual_seed(0)
        model = AutoInt(3, dims, 3, 2, 32, attention).cuda()
        dense, slots = [torch.randn(64, 3).cuda()], [torch.randn(64, dim).cuda() for dim in dims]
        output = model(dense, slots)
        results.append([output.detach(), *torch.autograd.grad(output.square().mean(), [*model.parameters()])])
    assert len(results[0]) == len(results[1]) > 50
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
