"""Models that are saved and loaded with and without wrappers, and on a machine without the device."""

import io
from pathlib import Path
from typing import cast

import pytest
import torch
from conftest import Batches, Configure, TinyModel
from test_training import SLOTS, make, train

from persia.checkpoint.state_keys import fitted
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.errors import CheckpointError


class Held(torch.nn.Module):
    """A wrapper whose state dict is like that of DistributedDataParallel: the model is below the name ``module``."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return the output of the model."""
        output: torch.Tensor = self.module(dense, embeddings)
        return output


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return cast(torch.nn.Module, torch.compile(model, backend="eager"))


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """Compile a part of the model."""
    assert isinstance(model, TinyModel)
    model.layers = cast(torch.nn.Sequential, compiled(model.layers))
    return model


WRAPPERS = {"plain": lambda model: model, "module.": Held, "_orig_mod.": compiled, "inner": inner}


@pytest.mark.row("S3-26")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads the attribute of inputs
@pytest.mark.parametrize("saved", WRAPPERS)
def test_a_checkpoint_loads_whatever_wrapped_the_model(configure: Configure, tmp_path: Path, saved: str) -> None:
    configure(SLOTS)
    torch.manual_seed(1)
    model = TinyModel()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = WRAPPERS[saved](model)
    prefix = {
        "plain": "layers.0",
        "module.": "module.layers",
        "_orig_mod.": "_orig_mod.layers",
        "inner": "layers._orig",
    }
    with TrainCtx(make().embedding_optimizer, dense, mixed_precision=False, model=wrapped) as ctx:
        train(ctx, DataLoader(Batches(3)))
        ctx.dump_checkpoint(tmp_path / "saved")
        expected = [each.detach().clone() for each in model.parameters()]
    keys = torch.load(tmp_path / "saved" / "dense.pt", weights_only=True)
    assert all(key.startswith((prefix[saved], "layers.2")) for key in keys) or saved == "inner"
    for name, wrap in WRAPPERS.items():
        other = TinyModel()
        whole = wrap(other)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        with TrainCtx(make().embedding_optimizer, optimizer, mixed_precision=False, model=whole) as ctx:
            ctx.load_checkpoint(tmp_path / "saved")
        assert all(torch.equal(*pair) for pair in zip(expected, other.parameters(), strict=True)), name
        other = TinyModel()
        with eval_ctx(model=wrap(other)) as ctx:
            ctx.load_checkpoint(tmp_path / "saved")
            assert all(torch.equal(*pair) for pair in zip(expected, other.parameters(), strict=True)), name
            next(other.parameters()).data.zero_()
            ctx.load_torch_state_dict(wrap(TinyModel()), tmp_path / "saved" / "dense.pt")


def test_versions_of_modules_move_with_their_keys() -> None:
    """Torch keeps the versions in an attribute of the state dict. BatchNorm of version 1 has no batch counter."""
    held = Held(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    state = fitted(held.module, held.state_dict())
    assert [*state] == [*held.module.state_dict()]
    assert state._metadata["0"]["version"] == 2  # type: ignore[attr-defined]


def test_other_differences_are_refused_with_the_keys_of_the_file(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with make() as ctx:
        state = {f"module.{key}": value for key, value in TinyModel().state_dict().items()}
        state["module.more"] = state.pop("module.layers.0.bias")
        torch.save(state, tmp_path / "dense.pt")
        with pytest.raises(CheckpointError, match=r"layers\.0\.bias: not in the checkpoint; module\.more: not in the"):
            ctx.load_torch_state_dict(TinyModel(), tmp_path / "dense.pt")
    ambiguous = {"a": torch.zeros(1), "module.a": torch.ones(1)}
    assert fitted(TinyModel(), ambiguous) is ambiguous


@pytest.mark.row("S3-28")
def test_a_state_of_a_cuda_device_loads_on_the_cpu(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    path = tmp_path / "dense.pt"
    model = TinyModel()
    with monkeypatch.context() as patched:  # torch saves the device of each tensor
        patched.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        torch.save(model.state_dict(), path)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA device"):
            torch.load(path, weights_only=True)
    other = TinyModel()
    with make() as ctx:
        ctx.load_torch_state_dict(other, path)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.row("S3-28")
def test_a_file_that_would_run_code_is_refused(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('it ran')",)

    file = io.BytesIO()
    torch.save({"layers.0.weight": Evil()}, file)
    (tmp_path / "dense.pt").write_bytes(file.getvalue())
    with make() as ctx, pytest.raises(CheckpointError, match="not a state dict that torch can load"):
        ctx.load_torch_state_dict(TinyModel(), tmp_path / "dense.pt")
