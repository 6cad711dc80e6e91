"""The same 1,000 rows have the same scores in evaluation, predict, bundles, REST, gRPC and InferCtx.

A third of the rows have ids that did not occur in training. For each column, a tenth of the rows lacks the value.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT
from forking import Popen
from infer_job import InferJob
from stack import missing
from waiting import wait_until

import persia
from persia.checkpoint import snapshot
from persia.ctx import InferCtx
from persia.features import to_batch
from persia.proto import inference_pb2 as pb
from persia.proto import inference_pb2_grpc as services
from persia.serving import Bundle, parity, scores, tensors
from persia.trainer import Trainer, models
from persia.trainer.metrics import binary, regression

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from bundle_files import LABELS, bundle_of, logits, table_of, write_run
from serving_process import Client

Floats = npt.NDArray[np.float32]
FORMS = ("f32", "f16", "int8")
ROWS = 1000
BATCH = 100
"""``data.batch_size`` of the run: the rows of a batch of evaluation."""
NAMES = [f"score_{label}" for label in LABELS]


@dataclass(frozen=True)
class Case:
    """A run, rows, and the scores of the rows.

    Attributes:
        folder: The folder with ``runs/one``, ``rows.parquet``, and a bundle of each form.
        rows: The rows, without labels.
        outputs: The outputs of evaluation: logits of the first label, numbers of the second.
        scores: What ``persia predict`` writes.
    """

    folder: Path
    rows: pa.Table
    outputs: Floats
    scores: Floats

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "runs" / "one"

    def parts(self) -> Iterator[pa.Table]:
        """Yield the rows in the batches of evaluation."""
        yield from (self.rows.slice(at, BATCH) for at in range(0, ROWS, BATCH))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("scores")
    run = write_run(folder)
    table = table_of(ROWS, 2, unseen=True)
    pq.write_table(table, folder / "rows.parquet")
    for form in FORMS:
        bundle_of(run, folder / form, rows=form)
    words = ["persia", "predict", str(run), "rows.parquet", "-o", "scores.parquet"]
    with Popen(words, cwd=folder) as process:
        assert process.wait(120) == 0
    written = pq.read_table(folder / "scores.parquet")
    found = np.stack([np.asarray(written[name], np.float32) for name in NAMES], 1)
    with Bundle.open(folder / "f32") as bundle:
        outputs = logits(bundle, table, BATCH)
    rows = table.drop_columns([*LABELS])
    assert sum(rows[name].null_count for name in rows.schema.names) > 500, "values are missing"
    assert sum(each >= 10**12 for each in rows["user"].to_pylist() if each is not None) > 250, "ids are new"
    assert len(np.unique(found[:, 0])) > 500, "scores that do not depend on the rows prove nothing"
    return Case(folder, rows, outputs, found)


def test_evaluation_predict_and_the_exact_bundle_agree_bit_by_bit(case: Case) -> None:
    with Bundle.open(case.folder / "f32") as bundle:
        assert bundle.scores_from(case.outputs).tobytes() == case.scores.tobytes()
    labels = {name: np.asarray(pq.read_table(case.folder / "rows.parquet")[name], np.float32) for name in LABELS}
    with Trainer(persia.load_config(case.run / "persia.yml", folder=case.folder)) as trainer:
        report = trainer.resume(case.run).evaluate(str(case.folder / "rows.parquet"))
    loss = binary(case.outputs[:, 0], labels["clicked"], ["log_loss"], None, None).values["log_loss"]
    error = regression(case.outputs[:, 1], labels["spent"], ["mse"], None).values["mse"]
    assert (loss, error) == (report.labels["clicked"].values["log_loss"], report.labels["spent"].values["mse"])


def inputs_of(bundle: Bundle, rows: pa.Table, *, nulls: bool) -> list[tensors.Tensor]:
    """Return the tensors of rows.

    Args:
        bundle: The bundle.
        rows: The rows.
        nulls: Whether a missing value is null, except a missing list. Otherwise, the value is 0, or an empty text or
            list, and is marked as missing.
    """
    found = []
    for column in bundle.inputs:
        values = rows[column.name].combine_chunks()
        valid = values.is_valid().to_pylist()
        if column.is_list:
            lists = [each or [] for each in values.to_pylist()]
            flat = [each for row in lists for each in row]
            ends = np.cumsum([0, *map(len, lists)]).tolist()
            found.append(tensors.from_values(f"{column.name}.offsets", "INT64", [len(ends)], ends))
        else:
            texts = values.cast(pa.string()) if column.datatype == "BYTES" else values
            flat = texts.to_pylist() if nulls else texts.fill_null("" if column.datatype == "BYTES" else 0).to_pylist()
        found.append(tensors.from_values(column.name, column.datatype, [len(flat)], flat))
        if column.is_list or not nulls:
            found.append(tensors.from_values(f"{column.name}.valid", "BOOL", [len(valid)], valid))
    return found


def by_records(server: "Server", bundle: Bundle, rows: pa.Table) -> Floats:
    """Return the scores of ``POST /score``."""
    del bundle
    found = server.ask("/score", rows.to_pylist())
    return np.stack([np.array(found["scores"][label], np.float32) for label in LABELS], 1)


def by_rest(server: "Server", bundle: Bundle, rows: pa.Table) -> Floats:
    """Return the scores of the Open Inference Protocol with JSON."""
    inputs = [
        {"name": each.name, "datatype": each.datatype, "shape": [*each.shape], "data": each.values.tolist()}
        for each in inputs_of(bundle, rows, nulls=True)
    ]
    outputs = server.ask("/v2/models/model/infer", {"inputs": inputs})["outputs"]
    assert [each["name"] for each in outputs] == NAMES
    return np.stack([np.array(each["data"], np.float32) for each in outputs], 1)


def by_grpc(server: "Server", bundle: Bundle, rows: pa.Table) -> Floats:
    """Return the scores of the Open Inference Protocol over gRPC."""
    request = pb.ModelInferRequest(model_name="model")
    for each in inputs_of(bundle, rows, nulls=False):
        request.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        if each.datatype == "BYTES":
            texts = [text.encode() for text in each.values.to_pylist()]
            raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        else:
            raw = each.values.tobytes()
        request.raw_input_contents.append(raw)
    answer = server.stub.ModelInfer(request, timeout=60)
    assert [each.name for each in answer.outputs] == NAMES
    return np.stack([np.frombuffer(raw, "<f4") for raw in answer.raw_output_contents], 1)


class Server:
    """``persia serve``, and its clients."""

    def __init__(self, http: int, stub: Any) -> None:
        self._client = Client(http)
        self.stub = stub

    def ask(self, path: str, content: Any) -> Any:
        """Return a response in JSON."""
        status, _, found = self._client.ask("POST", path, json.dumps(content, default=str))
        assert status == 200, found
        return found

    def close(self) -> None:
        """Close the connection."""
        self._client.connection.close()


@contextlib.contextmanager
def served(bundle: Bundle, log: Path) -> Iterator[Server]:
    """Serve a bundle with as many threads as its evaluation had."""
    words = ["persia", "serve", str(bundle.path), "--name", "model", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    words += ["--threads", str(bundle.manifest.model.threads)]
    with (
        log.open("w") as file,
        Popen(words, env={**os.environ, "LOG_FORMAT": "text"}, stderr=file) as process,
        contextlib.ExitStack() as opened,
    ):
        opened.callback(process.kill)
        line = wait_until(
            "the address",
            lambda: next((line for line in log.read_text().splitlines() if ": http:" in line), None),
            90,
            evidence=log.read_text,
        )
        http, remote = (int(part.split(",")[0]) for part in line.split("127.0.0.1:")[1:])
        channel = opened.enter_context(grpc.insecure_channel(f"127.0.0.1:{remote}"))
        server = Server(http, services.GRPCInferenceServiceStub(channel))
        opened.callback(server.close)
        yield server


@pytest.mark.parametrize("form", FORMS)
def test_scores_by_rest_and_grpc_are_those_of_evaluation(case: Case, form: str, no_job: None, tmp_path: Path) -> None:
    with Bundle.open(case.folder / form) as bundle, served(bundle, tmp_path / "log") as server:
        threads = torch.get_num_threads()
        torch.set_num_threads(bundle.manifest.model.threads)
        own = bundle.scores_from(logits(bundle, case.rows, BATCH))
        torch.set_num_threads(threads)
        bound = parity.BOUNDS[form] * np.maximum(1, np.abs(case.outputs))
        bound[:, 0] /= 4  # the slope of the sigmoid is at most a quarter
        assert (np.abs(own - case.scores) <= bound + 1e-7).all()
        if form == "f32":
            assert own.tobytes() == case.scores.tobytes()
        else:
            assert np.abs(own - case.scores).max() > parity.SAME, "rounded rows give other scores"
        for ask in (by_records, by_rest, by_grpc):
            same = np.concatenate([ask(server, bundle, part) for part in case.parts()])
            assert same.tobytes() == own.tobytes(), f"{ask.__name__}, in the batches of evaluation"
            whole = ask(server, bundle, case.rows)
            assert parity.difference(whole, own) <= parity.SAME, f"{ask.__name__}, all rows in one batch"


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_infer_ctx_gives_the_scores_of_evaluation_bit_by_bit(
    case: Case, no_job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bundle.open(case.folder / "f32") as bundle:
        source, threads = bundle.manifest.source, bundle.manifest.model.threads
        kinds = [each.kind for each in bundle.outputs]
        samples = [bundle.transform(part) for part in case.parts()]
        ids = [bundle.outputs_of(each) for each in samples]
    checkpoint = case.run / source.checkpoint
    model = models.build(persia.load_config(case.run / "persia.yml", folder=case.folder))
    model.load_state_dict(snapshot.Load(checkpoint).state("dense.pt"))
    model.eval()
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "30")
    before = torch.get_num_threads()
    job = InferJob(tmp_path, checkpoint, servers=2)
    try:
        ctx = InferCtx(job.start().middlewares)
        ctx.wait_for_serving()
        torch.set_num_threads(threads)
        found = []
        for each in samples:
            looked = ctx.get_embedding_from_bytes(to_batch(each, requires_grad=False).to_bytes())
            dense, rows, _ = ctx.prepare_features(looked)
            with torch.no_grad():
                parts = scores.split(model(dense, rows), [*LABELS])
            found.append(np.stack([scores.numbers(part) for part in parts], 1))
        outputs = np.concatenate(found)
        assert ctx.evaluation_report.missing == sum(each.unseen for each in ids) > 100, "ids without a row"
    finally:
        torch.set_num_threads(before)
        job.close()
        sys.stdout.write(job.logs())  # shown if the test failed
    assert outputs.tobytes() == case.outputs.tobytes()
    columns = [scores.score(outputs[:, at], probability=kind == "probability") for at, kind in enumerate(kinds)]
    assert np.stack(columns, 1).tobytes() == case.scores.tobytes()
