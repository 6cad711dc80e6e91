"""B8 on a CUDA device: kernels, embedding steps and training, compared with a plain copy, the CPU and FBGEMM.

Every line on stdout is JSON. ``runs/bench-gpu.json`` has all these records and a description of the machine. FBGEMM is
measured if ``fbgemm_gpu`` can be imported. FBGEMM's tables are fixed arrays on the device. Persia's tables are in host
memory, and grow.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch
import workload
from embedded_step import build, make_batches
from torch.utils.dlpack import from_dlpack

import persia_core
from persia.backend.base import Backend, Device
from persia.backend.local import LocalBackend
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.models import DLRM
from persia_core.forward import device_memory

ROOT = Path(__file__).resolve().parents[1]
STEPS = 10_000
"""The number of steps over which memory must not grow."""

Record = dict[str, Any]


def refuse() -> str:
    """Return the reason why nothing can be measured; empty if there is none."""
    if not torch.cuda.is_available():
        return "no CUDA device on this host; check with: nvidia-smi"
    if "cuda" not in persia_core.FEATURES:
        return f"{persia_core.__file__} was built without the feature cuda; run: make setup"
    return ""


def kernels() -> Iterator[Record]:
    """Measure the kernels alone, and the copy that they are compared with."""
    command = ["cargo", "run", "--quiet", "--release", "--locked", "--manifest-path", "rust_core/Cargo.toml"]
    command += ["-p", "persia-cuda", "--example", "bench_kernels"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    yield from (json.loads(line) for line in done.stdout.splitlines())


@contextmanager
def stepper(dim: int, per_sample: int, device: int | None) -> Iterator[tuple[Backend, Callable[[int], None]]]:
    """Yield the backend and a function for one step: deduplicate, look up ahead, pool, sum gradients by id, update."""
    context = LocalBackend(device=None if device is None else Device(device))
    context.begin(optimizer=Adagrad(workload.LEARNING_RATE), config=EmbeddingConfig((-0.05, 0.05), weight_bound=0))
    pipeline = context.open_loop(4, False, 4)
    batches = make_batches(per_sample, zipf=False)
    place = "cpu" if device is None else f"cuda:{device}"
    gradients = [torch.randn(workload.BATCH, dim, device=place) * 1e-3 for _ in range(workload.FEATURES)]

    def feed(number: int) -> None:
        pipeline.feed(build(batches[number % len(batches)], per_sample))

    feed(0)

    def step(number: int) -> None:
        feed(number + 1)
        looked = pipeline.next(60.0)
        assert looked is not None  # noqa: S101 - the source has not ended
        vectors = [from_dlpack(tensor) for tensor in looked.embeddings()]
        del vectors
        if device is None:
            looked.push(gradients, 1.0)
        else:
            sums = looked.sum(gradients, 1.0)
            from_dlpack(sums.nonfinite).item()  # the only wait of the step
            looked.push_sums(sums, 1.0)

    yield context, step
    context.engine.drain()
    context.close_loop(pipeline, together=False)
    context.close()


def timed(step: Callable[[int], object], seconds: float) -> float:
    """Return the seconds of a step, as the median over windows of 10 steps."""
    for number in range(10):
        step(number)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        for number in range(10):
            step(number)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 10)
    return statistics.median(times)


def fbgemm(dim: int, per_sample: int) -> Callable[[int], object] | None:
    """Return a training step of FBGEMM's tables on the device; None if FBGEMM is not installed."""
    if find_spec("fbgemm_gpu") is None:
        return None
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(workload.IDS, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * workload.FEATURES,
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=workload.LEARNING_RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    module.init_embedding_weights_uniform(-0.05, 0.05)
    ids = [torch.from_numpy(batch.reshape(-1)).pin_memory() for batch in workload.make_ids(per_sample, zipf=False)]
    offsets = torch.arange(0, workload.rows_of(per_sample) + 1, per_sample, device="cuda")
    gradient = torch.randn(workload.BATCH, workload.FEATURES * dim, device="cuda") * 1e-3
    return lambda number: module(ids[number % len(ids)].cuda(non_blocking=True), offsets).backward(gradient)


def embedding_steps(seconds: float) -> Iterator[Record]:
    """Measure the embedding step on the device, on the CPU, and with FBGEMM."""
    for dim in (32, 64, 128):
        configure(dim)
        for per_sample in (1, 10):
            found: Record = {"id": "B8", "case": "embedding step", "dim": dim, "L": per_sample}
            for name, device in (("cpu", None), ("cuda", 0)):
                with stepper(dim, per_sample, device) as (_, step):
                    found[f"{name}_mrows_per_s"] = workload.rows_of(per_sample) / timed(step, seconds) / 1e6
            found["over_cpu"] = found["cuda_mrows_per_s"] / found["cpu_mrows_per_s"]
            peer = fbgemm(dim, per_sample)
            if peer is not None:
                found["fbgemm_mrows_per_s"] = workload.rows_of(per_sample) / timed(peer, seconds) / 1e6
                found["over_fbgemm"] = found["cuda_mrows_per_s"] / found["fbgemm_mrows_per_s"]
            yield found


def configure(dim: int) -> None:
    """Write the slots of the workload to the file from which the configuration is read."""
    slots = "".join(f"  f{feature}: {{dim: {dim}}}\n" for feature in range(workload.FEATURES))
    Path(os.environ["PERSIA_EMBEDDING_CONFIG"]).write_text(f"feature_index_prefix_bit: 0\nslots_config:\n{slots}")


class Click(IterableDataset):
    """Batches of the workload with dense inputs and labels."""

    def __init__(self, steps: int, per_sample: int) -> None:
        super().__init__(buffer_size=8)
        rng = np.random.default_rng(0)
        dense = rng.standard_normal((workload.BATCH, 13), np.float32)
        label = rng.integers(0, 2, (workload.BATCH, 1)).astype(np.float32)
        self._steps = steps
        self._batches = [
            PersiaBatch(
                [IDTypeFeature(f"f{feature}", list(ids.astype(np.uint64))) for feature, ids in enumerate(batch)],
                [NonIDTypeFeature(dense)],
                [Label(label)],
            )
            for batch in workload.make_ids(per_sample, zipf=True)
        ]

    def __iter__(self) -> Iterator[PersiaBatch]:
        for number in range(self._steps):
            yield self._batches[number % len(self._batches)]


def train(dim: int, device: int | None, steps: int, notice: Callable[[int], None]) -> float:
    """Return samples per second of a DLRM's training loop."""
    torch.manual_seed(0)
    model = DLRM(13, workload.FEATURES, dim, [256, dim], [512, 256, 1])
    model = model if device is None else model.cuda(device)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = torch.nn.BCEWithLogitsLoss()
    start, begun = 0.0, 0
    with TrainCtx(Adagrad(0.01), dense, mixed_precision=False, model=model, device_id=device) as ctx:
        for number, batch in enumerate(DataLoader(Click(steps, 4))):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            notice(number)
            if number == min(20, steps // 4):
                start, begun = time.perf_counter(), number
        torch.cuda.synchronize()
        return (steps - 1 - begun) * workload.BATCH / (time.perf_counter() - start)


def training(quick: bool) -> Iterator[Record]:
    """Measure samples per second of training on the device and on the CPU, then memory over many steps."""
    configure(64)
    steps = 60 if quick else 200
    rates = {name: train(64, device, steps, lambda _: None) for name, device in (("cpu", None), ("cuda", 0))}
    yield {"id": "B8", "case": "training", "dim": 64, **rates, "over_cpu": rates["cuda"] / rates["cpu"]}
    seen: list[tuple[int, int]] = []

    def notice(number: int) -> None:
        if number in (500, many - 1):
            torch.cuda.synchronize()
            free, _ = torch.cuda.mem_get_info(0)
            seen.append((free, device_memory(0)[1]))

    many = 1_000 if quick else STEPS
    train(64, 0, many, notice)
    (free, reserved), (free_after, reserved_after) = seen
    yield {
        "id": "B8",
        "case": "device memory",
        "steps": many,
        "grown_bytes": free - free_after,
        "pool_bytes": [reserved, reserved_after],
    }


def collect(parts: dict[str, Iterator[Record]]) -> list[Record]:
    """Print and return the records of all parts. A part that fails gets a failed record, and the others continue."""
    records: list[Record] = []

    def add(record: Record) -> None:
        wrong = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        if wrong:
            record = {**record, "invalid": f"not finite: {', '.join(wrong)}"}
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in record.items()}
        figures.write(rounded)
        records.append(figures.plain(rounded))

    for name, part in parts.items():
        try:
            for record in part:
                add(record)
        except Exception as error:  # for any error, because the other parts are still measured
            traceback.print_exc()
            add({"id": "B8", "case": name, "failed": f"{type(error).__name__}: {error}"})
    return records


def main() -> int:
    """Measure all parts, or report why nothing can be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 everything was measured; 2 usage, or nothing can be measured here;\n"
        f"{figures.UNMEASURED} a record has `invalid` or `failed`; the others were measured",
    )
    parser.add_argument("--quick", action="store_true", help="a shorter run")
    arguments = parser.parse_args()
    if reason := refuse():
        print(f"error: nothing is measured: {reason}", file=sys.stderr)
        return 2
    machine = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "driver": torch.cuda.driver_version() if hasattr(torch.cuda, "driver_version") else None,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(machine))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PERSIA_EMBEDDING_CONFIG"] = str(Path(folder) / "embedding_config.yml")
        seconds = 1.0 if arguments.quick else 3.0
        steps, loop = embedding_steps(seconds), training(arguments.quick)
        records = collect({"kernels": kernels(), "embedding step": steps, "training": loop})
    out = ROOT / "runs" / "bench-gpu.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "records": records}, indent=1) + "\n")
    return figures.UNMEASURED if any(map(figures.problem, records)) else 0


if __name__ == "__main__":
    sys.exit(main())
