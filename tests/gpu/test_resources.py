"""The resources that a CUDA device needs: memory that does not grow, and one wait in each step."""

from collections.abc import Iterator

import pytest
import torch
from conftest import Batches, Configure, TinyModel

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import SGD
from persia_core.forward import device_memory

WAITS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
}
"""Calls by which a thread waits for a device."""


class Again(Batches):
    """The same 50 batches repeatedly, because creating batches takes longer than training on them."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        batches = [self.batch(number) for number in range(50)]
        for number in range(self.count):
            yield batches[number % len(batches)]


loss_fn = torch.nn.BCEWithLogitsLoss()


def make(embeddings: int = 8) -> TrainCtx:
    model = TinyModel(embeddings=embeddings).cuda()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model, device_id=0)


def used() -> tuple[int, int]:
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info(0)
    return free, device_memory(0)[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_device_memory_does_not_grow_over_10000_steps(configure: Configure) -> None:
    configure("a: {dim: 64}\nb: {dim: 64}")
    with make(128) as ctx:
        begun = (0, 0)
        for number, batch in enumerate(DataLoader(Again(10_500, batch_size=256, ids=5000))):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            if number == 500:
                begun = used()
        free, reserved = used()
    assert reserved <= 2 * begun[1] + (1 << 20), (begun, reserved)
    assert free >= begun[0] - (64 << 20), (begun, free)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_step_waits_for_the_device_once(configure: Configure) -> None:
    """A step waits for the flag that says whether all values are finite. The push thread waits in the background."""
    configure("a: {dim: 4}\nb: {dim: 4}")
    steps = 20
    with make() as ctx:
        loader = iter(DataLoader(Batches(steps + 10)))

        def step() -> None:
            output, labels = ctx.forward(next(loader))
            ctx.backward(loss_fn(output, labels[0]))

        for _ in range(10):
            step()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(steps):
                step()
        for _ in loader:
            pass
    # Count the waits of the training thread; the trace itself ends with one wait.
    events = [event for event in profile.events() if event.name == "aten::_local_scalar_dense"]
    assert len(events) == steps, [event.name for event in profile.events()]
    waits = [event for event in profile.events() if event.name in WAITS and event.thread == events[0].thread]
    assert len(waits) <= steps + 1, [event.name for event in waits]
