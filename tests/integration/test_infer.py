"""PersiaML's inference: InferCtx reads what evaluation reads, from servers that serve a checkpoint, without NATS."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Batches, TinyModel
from infer_job import InferJob
from stack import missing

from persia.ctx import EmbeddingCtx, InferCtx, TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.errors import DataError, IncompatibleError, UnreachableError, UsageError
from persia.service import get_embedding_worker_services

SLOTS = "slots_config:\n  a: {dim: 4}\n  b: {dim: 4, sqrt_scaling: true}\n"
START = 60.0

MakeJob = Callable[..., InferJob]
Values = list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]


def requests() -> list[PersiaBatch]:
    """Batches to score, with training ids, unknown ids and samples without ids, and with features in any order."""
    known = [Batches(9, seed=7, ids=200).batch(number, requires_grad=False) for number in range(3)]
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 400, 32, dtype=np.uint64)
    lists = [rng.integers(0, 400, rng.integers(0, 4), dtype=np.uint64) for _ in range(32)]
    dense = NonIDTypeFeature(rng.standard_normal((32, 3), dtype=np.float32))
    a, b = IDTypeFeatureWithSingleID("a", ids), IDTypeFeature("b", lists)
    return [
        *known,
        PersiaBatch([a, b], [dense], requires_grad=False),
        PersiaBatch([b, a], [dense], requires_grad=False),
    ]


def values(ctx: EmbeddingCtx, model: torch.nn.Module, *, as_bytes: bool) -> Values:
    """Return scores and tensors of each request."""
    found: Values = []
    with torch.no_grad():
        for request in requests():
            looked = (
                ctx.get_embedding_from_bytes(request.to_bytes()) if as_bytes else ctx.get_embedding_from_data(request)
            )
            dense, rows, labels = ctx.prepare_features(looked)
            assert not isinstance(ctx, InferCtx) or labels is None
            found.append((model(dense, rows).clone(), [one.clone() for one in dense], [one.clone() for one in rows]))
    return found


def same(one: Values, other: Values) -> bool:
    """Whether all bits are equal."""

    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.detach().numpy().tobytes()

    pairs = zip(one, other, strict=True)
    return all(
        bits(score) == bits(score_2)
        and [*map(bits, dense)] == [*map(bits, dense_2)]
        and [*map(bits, rows)] == [*map(bits, rows_2)]
        for (score, dense, rows), (score_2, dense_2, rows_2) in pairs
    )


class Trained:
    """Checkpoints of 10 and of 20 steps, the model of each, and the results of evaluation with them."""

    def __init__(self, folder: Path) -> None:
        self.model: dict[int, TinyModel] = {}
        self.expected: dict[int, Values] = {}
        self.path: dict[int, Path] = {}
        torch.manual_seed(1)
        model = TinyModel()
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        config = EmbeddingConfig((-0.1, 0.1))
        with TrainCtx(Adagrad(0.1), dense, mixed_precision=False, model=model, embedding_config=config) as ctx:
            for number, batch in enumerate(DataLoader(Batches(20), reproducible=True), start=1):
                output, labels = ctx.forward(batch)
                ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
                if number in (10, 20):
                    self.path[number] = folder / f"step-{number}"
                    ctx.dump_checkpoint(self.path[number])
        for number, path in self.path.items():
            self.model[number] = TinyModel()
            with eval_ctx(model=self.model[number]) as evaluation:
                evaluation.load_checkpoint(path)
                self.expected[number] = values(evaluation, self.model[number], as_bytes=False)


@pytest.fixture
def trained(no_job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Return the checkpoints, and remove the configuration of this process, because a serving process has none."""
    if reason := missing():
        pytest.skip(reason)
    (tmp_path / "embedding_config.yml").write_text(SLOTS)
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(tmp_path / "embedding_config.yml"))
    made = Trained(tmp_path)
    monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG")
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "3")
    return made


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[MakeJob]:
    """Start an infer job, which ends with the test."""
    made: list[InferJob] = []

    def make(checkpoint: Path, **options: Any) -> InferJob:
        made.append(InferJob(tmp_path, checkpoint, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()
        sys.stdout.write(job.logs())  # shown if the test failed


def test_values_are_those_of_evaluation(trained: Trained, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(trained.path[20], servers=3, middlewares=2).start()
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", ", ".join(job.middlewares))
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")  # persia-launcher sets it; InferCtx ignores it
    ctx = InferCtx(get_embedding_worker_services())
    ctx.wait_for_serving()
    model = trained.model[20]
    assert same(values(ctx, model, as_bytes=True), trained.expected[20])
    assert not same(values(ctx, model, as_bytes=True), trained.expected[10]), "the comparison sees a difference"
    assert ctx.evaluation_report.missing > 0, "ids without a row were among them"
    # A middleware that is killed is replaced by the other one.
    job.kill("middleware-0")
    assert same(values(ctx, model, as_bytes=False), trained.expected[20])
    job.start_middleware(0).says(": ready")  # wait, because a look-up is retried only for PERSIA_RPC_TIMEOUT
    job.kill("middleware-1")
    assert same(values(ctx, model, as_bytes=False), trained.expected[20])
    # PersiaML documents InferCtx as a context manager that calls the model.
    with InferCtx(job.middlewares, model=model) as inner:
        output, labels = inner.forward(requests()[4])
        assert torch.equal(output, trained.expected[20][4][0]) and labels is None
        assert sum(inner.get_embedding_size()) > 0 and len(inner.get_embedding_size()) == 3
    with pytest.raises(UsageError, match="outside its `with` block"):
        inner.get_embedding_from_data(requests()[0])


def test_a_killed_server_is_named_and_serves_again(
    trained: Trained, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(trained.path[10]).start()
    ctx = InferCtx(job.middlewares)
    ctx.wait_for_serving()
    model = trained.model[10]
    assert same(values(ctx, model, as_bytes=True), trained.expected[10])
    job.kill("server-1")
    with pytest.raises(UnreachableError, match="server 1 of 2") as raised:
        values(ctx, model, as_bytes=True)
    assert "EMBEDDING_WORKER_SERVICE" in raised.value.hint
    job.start_server(1)
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "60")
    ctx.wait_for_serving()  # connects again, with the new time limit
    assert same(values(ctx, model, as_bytes=True), trained.expected[10])
    # No wait for the server is needed: look-ups are retried until it has loaded the checkpoint.
    job.kill("server-0")
    job.start_server(0)
    assert same(values(ctx, model, as_bytes=True), trained.expected[10])


def test_another_checkpoint_is_not_mixed_in(trained: Trained, make_job: MakeJob) -> None:
    job = make_job(trained.path[10]).start()
    ctx = InferCtx(job.middlewares)
    assert same(values(ctx, trained.model[10], as_bytes=True), trained.expected[10]), "it connects by itself"
    job.serve(trained.path[20])
    job.kill("server-0")
    job.start_server(0).says("serving a checkpoint")
    with pytest.raises(IncompatibleError, match=r"step 20 of .*not the checkpoint"):
        values(ctx, trained.model[10], as_bytes=True)
    with pytest.raises(IncompatibleError, match="step 10 of .*server 0 serves step 20"):
        ctx.wait_for_serving()
    job.kill("server-1")
    job.start_server(1)
    ctx.wait_for_serving()
    assert same(values(ctx, trained.model[20], as_bytes=True), trained.expected[20])


def test_an_infer_job_changes_nothing(
    trained: Trained, make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(trained.path[10], servers=1).start()
    model = TinyModel()
    with InferCtx(job.middlewares, model=model) as ctx:
        calls: list[Callable[[], object]] = [
            lambda: ctx.load_checkpoint(trained.path[20]),
            lambda: ctx.load_embedding(trained.path[20]),
            lambda: ctx.dump_checkpoint(tmp_path / "other"),
            lambda: ctx.dump_embedding(tmp_path / "other"),
            ctx.clear_embeddings,
            TrainCtx(Adagrad(0.1), torch.optim.SGD(model.parameters(), lr=0.1), model=model).__enter__,
        ]
        for call in calls:
            with pytest.raises(UsageError, match="inside InferCtx"):
                call()
        with pytest.raises(DataError, match=r"id features: 'a' in the batch, 'a', 'b' in training"):
            one = IDTypeFeatureWithSingleID("a", np.arange(2, dtype=np.uint64))
            ctx.prepare_features(PersiaBatch([one], requires_grad=False))
        assert same(values(ctx, trained.model[10], as_bytes=False), trained.expected[10])
        with pytest.raises(UsageError, match="inside another context"):
            InferCtx(job.middlewares).__enter__()
    # A training script with the configuration of the infer job.
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(tmp_path / "embedding_config.yml"))
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(tmp_path / "global_config_infer.yml"))
    with pytest.raises(UsageError, match="job_type: Infer"):
        TrainCtx(Adagrad(0.1), torch.optim.SGD(model.parameters(), lr=0.1), model=model).__enter__()


def test_servers_are_given_on_the_command_line(trained: Trained, make_job: MakeJob) -> None:
    job = make_job(trained.path[10], lists=False)
    part = job.start_middleware()
    assert part.wait(START) == 2 and "infer_config.servers" in part.output
    for index in range(2):
        job.start_server(index)
    job.start_middleware(0, "--servers", ",".join(reversed(job.servers)))
    with pytest.raises(IncompatibleError, match="REPLICA_INDEX"):
        InferCtx(job.middlewares).wait_for_serving()
    job.kill("middleware-0")
    job.start_middleware(0, "--servers", ",".join(job.servers))
    ctx = InferCtx([job.middlewares[0].replace(":", ": ")])  # as in PersiaML's documentation
    ctx.wait_for_serving()
    assert same(values(ctx, trained.model[10], as_bytes=True), trained.expected[10])


def test_a_checkpoint_that_cannot_be_served(trained: Trained, make_job: MakeJob, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(trained.path[10], tmp_path / "damaged"))
    shard = next(damaged.glob("shard-*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for checkpoint, text in ((tmp_path / "none", "no checkpoint here"), (damaged, shard.name)):
        part = make_job(checkpoint, servers=1).start_server(0)
        assert part.wait(START) == 4, part.output
        assert "embedding_checkpoint" in part.output and text in part.output


def test_addresses_of_nothing(no_job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ([], [""], "localhost:1"):
        with pytest.raises(UsageError, match="expected a list of the addresses of middlewares"):
            InferCtx(given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="invalid address of a middleware"):
        InferCtx(["localhost"]).wait_for_serving()
    monkeypatch.setenv("PERSIA_START_TIMEOUT", "1")
    with pytest.raises(UnreachableError, match="middleware at localhost:1") as raised:
        InferCtx(["localhost:1"]).wait_for_serving()
    assert "infer job" in raised.value.hint
