"""Without a CUDA device, a request for one is an error with instructions. The CPU simulates work on a device."""

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import Batches, Configure, TinyModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

import persia_core
from persia.backend.base import Backend, Device, NonFiniteTensor
from persia.ctx import Checkpoints, EmbeddingCtx, PreprocessMode, TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import DeviceError, NonFiniteError, UsageError
from persia.loop.backward import MAX_SKIPPED_STEPS, Backward
from persia.loop.loss_scale import LossScale
from persia.nn import EmbeddingCollection, TableConfig
from persia_core import backward, forward
from persia_core.forward import TrainingBatch

SLOTS = "a: {dim: 4}\nb: {dim: 4}"
loss_fn = torch.nn.BCEWithLogitsLoss()
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
REFUSED = "NVIDIA driver" if "cuda" in persia_core.FEATURES else r"persia_core.*--features cuda"


@without_gpu
@pytest.mark.row("S0-21")
def test_a_device_that_is_not_there_is_refused_with_what_to_do() -> None:
    for check in (forward.check_device, backward.check_device, forward.device_memory):
        with pytest.raises(DeviceError, match=rf"CUDA device 3.*{REFUSED}.*train on the CPU"):
            check(3)
    with pytest.raises(DeviceError, match="device 0"):
        EmbeddingCtx(PreprocessMode.EVAL, device_id=0)
    with pytest.raises(DeviceError, match="device 1"):
        EmbeddingCollection([TableConfig("t", 4, ["f"])], SGD(0.1), device="cuda:1")


@without_gpu
def test_the_refusal_ends_a_script_with_a_sentence_and_no_panic() -> None:
    code = "import persia_core.forward as f; f.check_device(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DeviceError: CUDA device 0" in done.stderr
    assert "panicked" not in done.stderr


def test_vectors_have_a_dtype_that_the_device_makes(configure: Configure) -> None:
    with pytest.raises(UsageError, match="without device_id embedding tensors are float32"):
        EmbeddingCtx(PreprocessMode.EVAL, embedding_dtype=torch.float16)
    configure(SLOTS)
    with EmbeddingCtx(PreprocessMode.EVAL) as ctx:
        with pytest.raises(UsageError, match=r"dtype torch.int8 of embedding tensors: expected torch.float32"):
            Device(0, torch.int8).serve(ctx.engine)
        with pytest.raises(UsageError, match="f32, f16 or bf16"):
            ctx.engine.use_device(0, "f64")
    table = [TableConfig("t", 4, ["f"])]
    with pytest.raises(UsageError, match="on the CPU vectors are float32"):
        EmbeddingCollection(table, SGD(0.1), dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="expected a CUDA device"):
        EmbeddingCollection(table, SGD(0.1), device="meta")


def test_a_batch_on_the_cpu_has_no_device_to_sum_on(configure: Configure) -> None:
    configure(SLOTS)
    with scaled(None) as ctx:
        for batch in DataLoader(Batches(1)):
            assert batch.device_id is None
            assert all(tensor.__dlpack_device__() == (1, 0) for tensor in batch.embeddings())
            with pytest.raises(UsageError, match="its embeddings are on the CPU"):
                batch.sum([], 1.0)
            batch.discard()
        assert ctx.grad_scaler is None


def scaled(scale: LossScale | None) -> TrainCtx:
    """Return a context whose loss is scaled, as it is with a GPU."""
    torch.manual_seed(1)
    model = TinyModel()
    ctx = TrainCtx(
        SGD(0.1),
        torch.optim.SGD(model.parameters(), lr=0.1),
        mixed_precision=False,
        model=model,
        embedding_config=EmbeddingConfig((-0.1, 0.1)),
    )
    ctx._backward.loss_scale = scale
    return ctx


def train(ctx: TrainCtx, steps: int, spoil: int = -1) -> list[float]:
    """Return the loss that each step back-propagated. The gradient of the step ``spoil``, from 0, overflows."""
    losses = []
    for number, batch in enumerate(DataLoader(Batches(steps), reproducible=True)):
        output, labels = ctx.forward(batch)
        loss = loss_fn(output, labels[0])
        if number == spoil:
            loss = loss * 1e36  # the loss is finite, but not after scaling
        losses.append(float(ctx.backward(loss)))
    return losses


def state(ctx: TrainCtx) -> list[torch.Tensor]:
    assert ctx.model is not None
    batch = Batches(1).batch(0, requires_grad=False)
    rows = [from_dlpack(tensor) for tensor in ctx.get_embedding_from_data(batch).embeddings()]
    return [*rows, *ctx.model.state_dict().values()]


def test_a_scaled_loss_trains_model_and_rows_as_an_unscaled_one(configure: Configure) -> None:
    """All factors are powers of 2, so the results are bit-identical."""
    configure(SLOTS)
    with scaled(None) as ctx:
        plain = train(ctx, 6)
        expected = state(ctx)
    scale = LossScale(3, "cpu")
    with scaled(scale) as ctx:
        losses = train(ctx, 6)
        found = state(ctx)
        assert ctx.grad_scaler is scale.scaler
    assert losses == [loss * (2.0**16 if step < 3 else 2.0**17) for step, loss in enumerate(plain)]
    assert scale.value == 2.0**18 == scale.scaler.get_scale()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_step_that_overflows_changes_neither_model_nor_rows_and_halves_the_scale(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    configure(SLOTS)
    scale = LossScale(100, "cpu")
    with scaled(scale) as ctx, caplog.at_level(logging.WARNING):
        train(ctx, 2)
        before = state(ctx)
        assert scale.value == 2.0**16
    with scaled(scale) as ctx, caplog.at_level(logging.WARNING):
        train(ctx, 3, spoil=2)
        assert all(torch.equal(one, other) for one, other in zip(state(ctx), before, strict=True))
    assert scale.value == 2.0**15
    assert "step 3 skipped" in caplog.text and "scaled by 32768" in caplog.text


def test_an_overflow_at_every_step_ends_the_training(configure: Configure) -> None:
    configure(SLOTS)
    with scaled(LossScale(4, "cpu")) as ctx, pytest.raises(NonFiniteError, match=f"{MAX_SKIPPED_STEPS} steps in a row"):
        for batch in DataLoader(Batches(MAX_SKIPPED_STEPS + 1)):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]) * float("inf"))


def test_the_scale_stops_growing_and_goes_on_from_a_checkpoint(configure: Configure, tmp_path: object) -> None:
    configure(SLOTS)
    scale = LossScale(1, "cpu")
    with scaled(scale) as ctx:
        train(ctx, 12)
        assert scale.value == 2.0**24
        scale.update(finite=False)
        ctx.dump_checkpoint(f"{tmp_path}/saved")
    again = LossScale(5, "cpu")
    with scaled(again) as ctx:
        ctx.load_checkpoint(f"{tmp_path}/saved")
    assert again.value == 2.0**23 == again.scaler.get_scale()
    with scaled(None) as ctx:
        ctx.load_checkpoint(f"{tmp_path}/saved")  # a context without a loss scale ignores the saved one


class OnDevice:
    """A batch whose vectors are on a device, as the training loop uses it. The CPU simulates the device."""

    device_id, slots, step = 0, ("a", "b"), 7
    dense_names = label_names = (None,)

    requires_grad = True

    def __init__(self, flag: int = 0) -> None:
        self.nonfinite = torch.tensor([flag], dtype=torch.int32)
        self.given = torch.ones(3, 2)
        self.calls: list[tuple[object, ...]] = []

    def sum(self, gradients: list[torch.Tensor], scale: float) -> "OnDevice":
        self.calls.append(("sum", len(gradients), scale))
        return self

    def push_sums(self, sums: object, lr_factor: float) -> None:
        assert sums is self
        self.calls.append(("push_sums", lr_factor))

    def push(self, gradients: list[torch.Tensor | None], lr_factor: float, scale: float) -> None:
        kinds = [None if each is None else (each.dtype, each.device.type) for each in gradients]
        self.calls.append(("push", kinds, lr_factor, scale))

    def discard(self) -> None:
        self.calls.append(("discard",))

    def embeddings(self) -> list[torch.Tensor]:
        return [torch.ones(3, 4) for _ in self.slots]

    def masks(self) -> list[None]:
        return [None] * len(self.slots)

    def truncated(self) -> list[int]:
        return [0] * len(self.slots)

    def missing(self) -> tuple[int, int]:
        return 6, 0

    def dense(self) -> list[torch.Tensor]:
        return [self.given]

    labels = dense


def one_step(
    batch: OnDevice,
    *,
    spoil: float = 1.0,
    spoilt: int | None = None,
    used: int = 2,
    scale: LossScale | None = None,
    asked: list[str] | None = None,
) -> float:
    """Run the backward half of a step with a batch, and return the dense weight, which was 2 before.

    The gradient of sample ``spoilt`` in the last embedding is not finite.
    """
    dense = torch.nn.Parameter(torch.tensor([2.0]))
    embeddings = [torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True) for _ in batch.slots]
    if spoilt is not None:
        sample = torch.tensor([spoilt])
        embeddings[-1].register_hook(lambda gradient: gradient.index_fill(0, sample, float("inf")))  # type: ignore[no-untyped-call]
    loss = torch.stack([embedding.float().sum() for embedding in embeddings[:used]]).sum() * dense.sum() * spoil
    step = Backward(torch.optim.SGD([dense], lr=1.0), scale)
    with contextlib.nullcontext() if asked is None else Asked(asked):
        step(loss, cast(TrainingBatch, batch), embeddings, SGD(0.5), cast(Backend, Alone()))
    return float(dense.detach())


class Alone:
    """No other ranks."""

    def collective(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, step: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def first_nonfinite(self, mine: NonFiniteTensor | None) -> NonFiniteTensor | None:
        return mine


def test_gradients_are_summed_where_they_are_and_pushed_if_all_is_finite() -> None:
    batch = OnDevice()
    assert one_step(batch) == 2.0 - 24.0
    assert batch.calls == [("sum", 2, 1.0), ("push_sums", 1.0)]
    batch, scale = OnDevice(), LossScale(100, "cpu")
    assert one_step(batch, scale=scale) == 2.0 - 24.0
    assert batch.calls == [("sum", 2, 2.0**-16), ("push_sums", 1.0)]


@pytest.mark.parametrize(
    ("flag", "spoil", "named"),
    [(1, 1.0, "the sum of the gradients of one id"), (1, float("nan"), "the loss is nan"), (0, float("inf"), "loss")],
)
def test_what_a_device_flags_is_not_pushed(
    flag: int, spoil: float, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = OnDevice(flag)
    with caplog.at_level(logging.WARNING):
        assert one_step(batch, spoil=spoil) == 2.0
    assert batch.calls == [("sum", 2, 1.0), ("discard",)]
    assert named in caplog.text


def test_a_gradient_of_a_sample_without_ids_is_looked_at_as_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """The sums on the device do not contain the gradient, because the sample has no id that receives it."""
    batch = OnDevice(flag=0)
    with caplog.at_level(logging.WARNING):
        assert one_step(batch, spoilt=1) == 2.0
    assert batch.calls == [("sum", 2, 1.0), ("discard",)]
    assert "the gradient of slot 'b', sample 1, is inf" in caplog.text


def test_a_step_on_a_device_asks_for_one_number() -> None:
    """Reading a number from a tensor on a device waits for the device."""
    for scale in (None, LossScale(100, "cpu")):
        asked: list[str] = []
        one_step(OnDevice(), scale=scale, asked=asked)
        assert asked == ["aten::_local_scalar_dense"]


class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the functions that read tensors."""

    def __init__(self, asked: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asked = asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}:
            self._asked.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_feature_without_a_gradient_goes_by_way_of_the_cpu() -> None:
    batch, scale = OnDevice(), LossScale(100, "cpu")
    one_step(batch, used=1, scale=scale)
    assert batch.calls == [("push", [(torch.float32, "cpu"), None], 1.0, 2.0**-16)]


def test_tensors_are_handed_over_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses to export a tensor of a device that is not the current one."""
    inside: list[bool] = []

    @contextlib.contextmanager
    def of(tensor: torch.Tensor) -> Iterator[None]:
        assert tensor.dtype == torch.bfloat16
        inside.append(True)
        yield
        inside.clear()

    class Seen(OnDevice):
        def sum(self, gradients: list[torch.Tensor], scale: float) -> OnDevice:
            assert inside
            return super().sum(gradients, scale)

    monkeypatch.setattr(torch.cuda, "device_of", of)
    batch = Seen()
    one_step(batch)
    assert batch.calls[-1] == ("push_sums", 1.0)


class Played:
    """A device for contexts that is simulated on the CPU and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[object] = []
        monkeypatch.setattr(forward, "check_device", lambda number: None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda number: self.calls.append(("current", number)))
        monkeypatch.setattr(Device, "serve", lambda device, engine: self.calls.append(("serve", device.number)))


def test_the_outermost_context_makes_its_device_the_current_one_first(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    played = Played(monkeypatch)
    with EmbeddingCtx(PreprocessMode.EVAL, device_id=1), eval_ctx(device_id=0):
        pass
    assert played.calls == [("current", 1), ("serve", 1)]
    with eval_ctx():
        pass
    assert len(played.calls) == 2


def test_a_lookup_on_another_device_is_not_the_contexts(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(SLOTS)
    played = Played(monkeypatch)
    batch = Batches(1).batch(0, requires_grad=False)
    with EmbeddingCtx(PreprocessMode.EVAL, device_id=0, embedding_dtype=torch.bfloat16) as outer:

        def lookup(batch: object, device_id: int | None) -> OnDevice:
            played.calls.append(device_id)
            return OnDevice()

        monkeypatch.setattr(outer._backend, "lookup", lookup)
        del played.calls[:]
        for ctx in (outer, eval_ctx(), eval_ctx(device_id=1)):
            with contextlib.nullcontext() if ctx is outer else ctx:
                for device_id in (None, 0, 1):
                    ctx.get_embedding_from_data(batch, device_id)
    # None selects the context's own device and dtype.
    assert played.calls == [None, None, 1] * 3


def test_what_is_kept_of_a_batch_on_a_device_keeps_no_other_memory_of_it(configure: Configure) -> None:
    configure(SLOTS)
    with EmbeddingCtx(PreprocessMode.TRAIN) as ctx:
        for device_id in (None, 0):
            batch = OnDevice()
            batch.device_id = device_id  # type: ignore[assignment]
            dense, _, labels = ctx.prepare_features(cast(TrainingBatch, batch))
            for tensor in (*dense, *labels):
                assert torch.equal(tensor, batch.given)
                assert (tensor.data_ptr() == batch.given.data_ptr()) == (device_id is None)


@without_gpu
def test_a_run_of_a_device_goes_on_without_one(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)

    def run(folder: Path) -> TrainCtx:
        torch.manual_seed(1)
        model = TinyModel()
        dense = torch.optim.Adam(model.parameters(), lr=0.1)
        state = {"other": torch.nn.Linear(2, 2)}
        return TrainCtx(SGD(0.1), dense, model=model, checkpoints=Checkpoints(folder, every=2, state=state))

    with run(tmp_path) as ctx, monkeypatch.context() as patch:
        # Torch writes this content for a tensor on a device.
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        train(ctx, 2)
    saved = next(tmp_path.glob("step-2"))
    with pytest.raises(RuntimeError, match="on a CUDA device"):
        torch.load(saved / "dense.pt", weights_only=True)
    with run(tmp_path) as ctx:
        assert ctx.step == 2
    with eval_ctx(model=TinyModel()) as inner:
        inner.load_checkpoint(saved)
