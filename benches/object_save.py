"""B6 on an object store: a checkpoint of all rows, compared with a plain multipart upload of the same size.

The checkpoint and the upload are measured alternately, on the same store: that of ``AWS_ENDPOINT_URL`` and the bucket
of ``--url``, or an S3 server on this host (moto). The value is the time in seconds. The plain upload is one object from
memory. Its parts have the size that Persia uses, and it has as many requests in flight as the writers of a checkpoint.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import figures
import numpy as np
import torch
from obstore import put
from obstore.store import from_url

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from persia_core import checkpoint

DIM = 64
BATCH = 1 << 16
PART_BYTES = 8 << 20
IN_FLIGHT = 8
"""Four writers with two parts each."""
TARGET = 0.5


class Ids(IterableDataset):
    """Batches in which each id occurs once."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __iter__(self) -> Iterator[PersiaBatch]:
        for first in range(0, self.rows, BATCH):
            ids = np.arange(first, min(first + BATCH, self.rows), dtype=np.uint64)
            yield PersiaBatch(
                [IDTypeFeatureWithSingleID("a", ids)], labels=[Label(np.zeros((len(ids), 1), np.float32))]
            )


class Sum(torch.nn.Module):
    """The sum of a sample's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return one number for each sample."""
        del dense
        return embeddings[0].sum(dim=1, keepdim=True) + self.bias


@contextmanager
def server() -> Iterator[str]:
    """Run an S3 server with one bucket, and return the URL of the bucket."""
    with tempfile.NamedTemporaryFile("r") as log:
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
        with Path(log.name).open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 60
            while (found := re.search(r"Running on (http://127.0.0.1:\d+)", Path(log.name).read_text())) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the S3 server did not start: {Path(log.name).read_text()}")
                time.sleep(0.1)
            names = {"ACCESS_KEY_ID": "bench", "SECRET_ACCESS_KEY": "bench", "REGION": "us-east-1"}
            os.environ.update({f"AWS_{name}": value for name, value in names.items()}, AWS_ENDPOINT_URL=found[1])
            import http.client

            connection = http.client.HTTPConnection(found[1].removeprefix("http://"))
            connection.request("PUT", "/bench")
            connection.getresponse().read()
            yield "s3://bench/b6"
        finally:
            process.terminate()
            process.wait()


def plain(url: str, content: bytes) -> float:
    """Upload ``content`` in parts, and return the seconds."""
    is_http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    store = from_url(url, client_options={"allow_http": is_http}, retry_config={"retry_timeout": timedelta(seconds=60)})
    began = time.perf_counter()
    put(store, "plain", content, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=IN_FLIGHT)
    return time.perf_counter() - began


def measure(url: str, rows: int, repeat: int) -> figures.Record:
    """Return the record of the case."""
    folder = Path(tempfile.mkdtemp(prefix="persia-bench-"))
    (folder / "embedding_config.yml").write_text(f"slots_config:\n  a: {{dim: {DIM}}}\n")
    (folder / "global_config.yml").write_text(f"embedding_parameter_server_config: {{capacity: {4 * rows}}}\n")
    os.environ["PERSIA_EMBEDDING_CONFIG"] = str(folder / "embedding_config.yml")
    os.environ["PERSIA_GLOBAL_CONFIG"] = str(folder / "global_config.yml")
    model = Sum()
    saves, uploads = list[float](), list[float]()
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    with TrainCtx(
        Adagrad(0.01), dense, model=model, mixed_precision=False, embedding_config=EmbeddingConfig((-0.1, 0.1))
    ) as ctx:
        for batch in DataLoader(Ids(rows)):
            output, _ = ctx.forward(batch)
            ctx.backward(output.mean())
        ctx.dump_checkpoint(f"{url}/warm-up")
        size = sum(file["bytes"] for file in checkpoint.Checkpoint(f"{url}/warm-up").files)
        content = os.urandom(size)
        plain(url, content[: PART_BYTES * 4])
        for _ in range(repeat):
            began = time.perf_counter()
            ctx.dump_checkpoint(f"{url}/step")
            saves.append(time.perf_counter() - began)
            uploads.append(plain(url, content))
    saved, uploaded = statistics.median(saves), statistics.median(uploads)
    found = max(figures.spread(saves), figures.spread(uploads)) if repeat > 1 else 0.0
    return {
        "id": "B6",
        "case": f"save to an object store, dim {DIM}, adagrad, {rows} rows, {size >> 20} MiB",
        "value": round(saved, 3),
        "unit": "s",
        "peer": round(uploaded, 3),
        "ratio": round(figures.ratio(uploaded, saved), 3),
        "target": TARGET,
        "spread": round(found, 3),
    }


def main() -> None:
    """Measure, and print the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--url", help="a place in another store, s3://BUCKET/PREFIX")
    given = parser.parse_args()
    if given.url is not None:
        figures.write(measure(given.url, given.rows, given.repeat))
        return
    with server() as url:
        figures.write(measure(url, given.rows, given.repeat))


if __name__ == "__main__":
    main()
