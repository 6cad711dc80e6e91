"""A sharded model whose shards are all in this process: gathered tensors, refusals, and the state after a step."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Configure, TinyModel
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not explicitly

from persia.checkpoint.run_state import RunState
from persia.ctx import eval_ctx
from persia.distributed.sharded import ShardedModel
from persia.distributed.wrapped import synchronise_gradients, trained_module, zero_loss
from persia.embedding.optim import SGD
from persia.errors import UsageError
from persia.loop.gather_model import GatherModel
from persia.runtime import flight

INPUTS = ([torch.ones(2, 3)], [torch.ones(2, 4), torch.ones(2, 4)])


@pytest.fixture
def sharded() -> Iterator[ShardedModel]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield ShardedModel(TinyModel(), None)
    distributed.destroy_process_group()


def test_a_step_that_is_left_in_its_middle_leaves_no_gradient(sharded: ShardedModel) -> None:
    def gradients(parts: int) -> list[torch.Tensor]:
        for part in range(parts):
            sharded.synchronise_gradients(part == parts - 1)
            sharded(*INPUTS).sum().backward()
        found = [each.grad.full_tensor() for each in sharded.module.parameters()]  # type: ignore[union-attr]
        sharded.module.zero_grad()
        return found

    whole = gradients(1)
    sharded.synchronise_gradients(False)
    sharded(*INPUTS).sum().backward()
    sharded.drop_step()
    for one, other in zip(whole, gradients(1), strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(whole, gradients(2), strict=True):
        torch.testing.assert_close(2 * one, other)


def test_a_step_whose_weights_were_gathered_gathers_none(sharded: ShardedModel) -> None:
    """If memory ran out in the forward pass of one rank, the other ranks would wait in the all-gather."""

    def sharded_weights() -> list[bool]:
        return [hasattr(each, "to_local") for each in sharded.module.parameters()]

    for _ in range(2):
        assert all(sharded_weights())
        sharded.gather_weights()
        assert not any(sharded_weights())
        sharded.synchronise_gradients(False)
        for _ in range(2):
            sharded(*INPUTS).sum().backward()
            assert not any(sharded_weights())
        sharded.synchronise_gradients(True)
        zero_loss(sharded, INPUTS).backward()  # type: ignore[no-untyped-call]
        whole = [each.grad.full_tensor() for each in sharded.module.parameters()]  # type: ignore[union-attr]
        expected = torch.autograd.grad(2 * sharded.whole(*INPUTS).sum(), [*sharded.whole.parameters()])
        torch.testing.assert_close(whole, [*expected])
        sharded.module.zero_grad()
    sharded.gather_weights()
    sharded.drop_step()  # another rank had no memory
    assert all(sharded_weights())


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_gradients_are_averaged_without_a_forward_of_the_model(sharded: ShardedModel, wrapped: str) -> None:
    """The model's forward would give NaN for few rows."""
    ddp = torch.nn.parallel.DistributedDataParallel(sharded.whole, find_unused_parameters=True)
    model: torch.nn.Module = sharded if wrapped == "fsdp" else ddp
    module = trained_module(model)
    synchronise_gradients(model, False)
    for factor in (1.0, 2.0):
        (factor * model(*INPUTS).sum()).backward()
    output = 3 * sharded.whole(*INPUTS).sum()
    expected = torch.autograd.grad(output, [*sharded.whole.parameters()])
    module.forward = lambda *_: torch.full((2, 1), torch.nan, requires_grad=True)
    given = module.forward
    synchronise_gradients(model, True)
    loss = zero_loss(model, INPUTS)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0 and loss.shape == () and module.forward is given
    for weight, want in zip(module.parameters(), expected, strict=True):
        assert weight.grad is not None
        full = getattr(weight.grad, "full_tensor", lambda weight=weight: weight.grad)()
        torch.testing.assert_close(full, want)
    del module.forward
    model(*INPUTS).sum().backward()  # the reducer has all gradients of the earlier pass


def test_a_backward_that_has_failed_is_dropped(sharded: ShardedModel) -> None:
    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("as the test wants")

    sharded(*INPUTS).sum().backward()
    whole = [each.grad.full_tensor() for each in sharded.module.parameters()]  # type: ignore[union-attr]
    sharded.module.zero_grad()
    assert sharded.can_reset
    output = sharded(*INPUTS)
    output.register_hook(fail)
    with pytest.raises(RuntimeError, match="as the test wants"):
        output.sum().backward()
    sharded.drop_step()
    sharded(*INPUTS).sum().backward()
    for one, other in zip(whole, sharded.module.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one, other.grad.full_tensor())  # type: ignore[attr-defined]


def test_the_states_of_shards_are_not_taken_for_those_of_the_model(
    configure: Configure, tmp_path: Path, sharded: ShardedModel
) -> None:
    configure("a: {dim: 4}\nb: {dim: 4}")
    optimizer = torch.optim.Adam(sharded.whole.parameters())
    sharded.bind(optimizer)
    with eval_ctx(model=sharded.whole) as ctx:
        ctx.dump_torch_state_dict(sharded, tmp_path, "first.pt")
        assert torch.load(tmp_path / "first.pt", weights_only=True).keys() >= sharded.whole.state_dict().keys()
        with pytest.raises(UsageError, match="into TinyModel: the weights are sharded.*load it before TrainCtx"):
            ctx.load_torch_state_dict(sharded.whole, tmp_path / "first.pt")
        sharded(*INPUTS).sum().backward()
        optimizer.step()
        for each in (sharded, sharded.whole):
            with pytest.raises(UsageError, match=r"call ctx.gather_model\(\) on every rank"):
                ctx.dump_torch_state_dict(each, tmp_path, "second.pt")
        with pytest.raises(UsageError, match="cannot save the state of Adam: it is sharded"):
            ctx.dump_torch_state_dict(optimizer, tmp_path, "opt.pt")
        with pytest.raises(UsageError, match="load a state into Adam: the weights are sharded"):
            ctx.load_torch_state_dict(optimizer, tmp_path)
        sharded.gather(optimizer)
        assert sharded.is_gathered
        ctx.dump_torch_state_dict(sharded.whole, tmp_path, "second.pt")
        sharded.release(optimizer)
        ctx.load_torch_state_dict(sharded.whole, tmp_path / "second.pt")
    assert len(optimizer.state_dict()["state"]) == len([*sharded.whole.parameters()])


def test_the_next_training_forward_frees_the_whole_state_of_the_optimizer(sharded: ShardedModel) -> None:
    optimizer = torch.optim.Adam(sharded.whole.parameters())
    sharded.bind(optimizer)
    sharded.gather(optimizer)
    with torch.no_grad():
        sharded(*INPUTS)
    assert sharded.is_gathered
    sharded(*INPUTS)
    assert sharded._optimizer_state is None


def test_rank_0_decides_whether_shards_are_gathered_and_the_recorder_names_it(sharded: ShardedModel) -> None:
    """After a load, rank 0 has whole weights. The other ranks get them when the next loop starts."""
    given: list[bool] = []
    backend: Any = SimpleNamespace(collective=contextlib.nullcontext, all_gather=lambda topic, mine: [*given, mine])
    optimizer = torch.optim.Adam(sharded.whole.parameters())
    sharded.bind(optimizer)
    state = RunState(backend, lambda: sharded, lambda: optimizer, SGD(0.1), None, None)
    given = [True]
    state.gather_model()
    assert not sharded.is_gathered
    given = [False]
    seen: list[str] = []
    gather = sharded.gather

    def recorded(each: torch.optim.Optimizer) -> None:
        seen.append(flight.last(1)[0]["detail"])
        gather(each)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sharded, "gather", recorded)
        state.gather_model()
    assert seen == ["shards of the model"] and sharded.is_gathered


def test_ranks_with_shards_compare_at_which_steps_they_write_digests(
    sharded: ShardedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank wrote no digests, the others would wait for it while they gather weights."""
    monkeypatch.setenv("PERSIA_DIGEST", "3")
    backend: Any = SimpleNamespace()
    optimizer = torch.optim.Adam(sharded.whole.parameters())
    models: list[torch.nn.Module] = [sharded, sharded.whole]
    for identity in ("GatherModel(PERSIA_DIGEST=3)", "GatherModel"):
        state = RunState(backend, lambda: models[0], lambda: optimizer, SGD(0.1), None, None)
        assert GatherModel(state).identity == identity
        del models[0]


@pytest.mark.row("S4-09")
@pytest.mark.parametrize("reshards", [False, True])
def test_weights_are_sharded_between_forward_and_backward_if_that_is_wanted(
    sharded: ShardedModel, reshards: bool
) -> None:
    model = ShardedModel(sharded.whole, None, reshard_after_forward=reshards)
    output = model(*INPUTS).sum()
    assert all(hasattr(each, "to_local") for each in model.module.parameters()) == reshards
    output.backward()
    expected = torch.autograd.grad(sharded.whole(*INPUTS).sum(), [*sharded.whole.parameters()])
    whole = [each.grad.full_tensor() for each in model.module.parameters()]  # type: ignore[union-attr]
    torch.testing.assert_close(whole, [*expected])
