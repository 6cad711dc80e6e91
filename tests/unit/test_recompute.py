"""Activation checkpointing uses less memory between forward and backward pass, with bit-identical results."""

from pathlib import Path

import pytest
import torch
from trainer_files import config_of, fit

from persia.models import DLRM, AutoInt, DCNv2

DENSE = [torch.randn(256, 4, generator=torch.Generator().manual_seed(1))]
SLOTS = [torch.randn(256, 8, generator=torch.Generator().manual_seed(slot)) for slot in range(3)]


def built(name: str, recomputes: bool) -> torch.nn.Module:
    torch.manual_seed(3)
    if name == "dcnv2":
        return DCNv2(4, [8, 8, 8], 6, [64, 64, 64], dropout=0.1, activation_checkpointing=recomputes)
    if name == "autoint":
        return AutoInt(4, [8, 8, 8], 4, deep_mlp=[64, 64], dropout=0.1, activation_checkpointing=recomputes)
    return DLRM(4, 3, 8, [64, 64, 8], [64, 64, 1], dropout=0.1, activation_checkpointing=recomputes)


def step(model: torch.nn.Module) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Return the bytes that the forward pass keeps, the output, and the gradients."""
    kept: dict[int, int] = {}
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(DENSE, SLOTS)
        size = sum(kept.values())  # measured before the backward pass recomputes the results
    output.sum().backward()
    return size, output.detach(), [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.row("S4-12")
@pytest.mark.parametrize(("name", "less"), [("dcnv2", 0.6), ("dlrm", 0.5), ("autoint", 0.5)])
def test_the_forward_keeps_less_and_the_gradients_have_equal_bits(name: str, less: float) -> None:
    whole, recomputed = step(built(name, False)), step(built(name, True))
    assert recomputed[0] < less * whole[0]
    assert torch.equal(whole[1], recomputed[1])
    assert len(whole[2]) == len(recomputed[2]) and all(map(torch.equal, whole[2], recomputed[2]))


@pytest.mark.row("S4-12")
def test_a_run_of_a_configuration_has_the_bits_of_one_without(tmp_path: Path) -> None:
    states = []
    for recomputes in (False, True):
        model = {"name": "dcnv2", "deep_mlp": [16, 8], "activation_checkpointing": recomputes}
        config = config_of(tmp_path, model=model, run={"name": f"run-{recomputes}"})
        trainer, _ = fit(config)
        assert trainer.folder is not None
        newest = max(Path(trainer.folder.saves(config)).glob("step-*"), key=lambda path: int(path.name[5:]))
        states.append(torch.load(newest / "dense.pt", weights_only=True))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["dcnv2", "dlrm", "autoint"])
def test_torchscript_has_the_same_output(name: str) -> None:
    model = built(name, True).eval()
    assert torch.equal(torch.jit.script(model)(DENSE, SLOTS), model(DENSE, SLOTS))
