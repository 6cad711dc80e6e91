"""Exports a trained model to a bundle. Read it top-down from :func:`export`."""

import os
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa
import torch

import persia
import persia_core
from persia.config import Config
from persia.ctx import EmbeddingCtx
from persia.features import Transform, to_batch
from persia.runtime.logging import get_logger
from persia.runtime.places import Place
from persia.serving import parity
from persia.serving.bundle import Bundle
from persia.serving.manifest import MANIFEST, File, Manifest, Model, Output, Parity, Source, Table
from persia.trainer.exporting import compare, dense
from persia.trainer.exporting.held_out import HeldOut, inputs_of
from persia.trainer.exporting.staging import Staging
from persia.trainer.objective import Objective
from persia_core import checkpoint as _core
from persia_core.serving import write_tables

_logger = get_logger("trainer")

TRANSFORM, PARITY = "transform.json", "parity.parquet"
KEPT = 512
"""The maximum number of held-out rows that are kept in a bundle."""
_EXAMPLE = 8


@dataclass(frozen=True)
class Trained:
    """A model to export, and its source.

    Attributes:
        config: The configuration of the run.
        run: The name of the run.
        checkpoint: The checkpoint of the model.
        ctx: An evaluation context, with the rows and the model of the checkpoint.
        model: The dense model.
        objective: The labels of the model.
        transform: The transform of the run.
    """

    config: Config
    run: str
    checkpoint: Place
    ctx: EmbeddingCtx
    model: torch.nn.Module
    objective: Objective
    transform: Transform


@dataclass(frozen=True)
class Exported:
    """A bundle that was written.

    Attributes:
        path: The folder of the bundle.
        manifest: The manifest, which lists the content.
        part: The part of the data from which the held-out rows come.
    """

    path: Path
    manifest: Manifest
    part: str

    @property
    def bytes(self) -> int:
        """The size of all files except the manifest, in bytes."""
        return sum(file.bytes for file in self.manifest.files)


def export(
    trained: Trained, held_out: HeldOut, folder: Path, *, rows: str = "f32", torchscript: bool = False
) -> Exported:
    """Write a bundle. The bundle appears in ``folder`` when it is complete and its scores equal those of evaluation.

    Args:
        trained: The model.
        held_out: The rows on which scores are compared.
        folder: The new folder.
        rows: The data type of embedding rows: ``f32``, ``f16`` or ``int8``.
        torchscript: Whether to write the dense model as TorchScript instead of using ``torch.export``.

    Raises:
        UsageError: The folder exists, the model cannot be exported, or scores differ from those of evaluation by more
            than :data:`persia.serving.parity.BOUNDS` allows.
        CheckpointError: A file of the checkpoint is damaged.
        StorageError: The folder cannot be written; nothing is left.
    """
    threads = len(os.sched_getaffinity(0))
    wanted = compare.evaluated(
        trained.ctx, trained.objective, trained.transform, held_out.rows, trained.config.data.batch_size
    )
    with Staging(folder) as staging:
        manifest = _write(trained, held_out.rows, staging, rows, torchscript)
        manifest = replace(manifest, files=_files(staging.path, manifest, threads))
        bundle = Bundle(staging.path, manifest, threads=threads)
        outputs, largest = compare.check(bundle, trained.ctx, wanted, held_out.rows)
        bundle.close()
        kept = _kept(len(held_out.rows))
        labels = [output.name for output in manifest.outputs]
        content = parity.write(held_out.rows.take(kept), wanted.outputs[kept], outputs[kept], labels)
        entry = File.of(staging.write(PARITY, content), threads)
        found = replace(manifest.parity, rows=len(kept), compared=len(held_out.rows), largest=largest)
        manifest = replace(manifest, parity=found, files=(*manifest.files, entry))
        staging.publish(MANIFEST, manifest.to_text().encode())
    _logger.info("wrote the bundle %s: %s", folder, manifest.identity)
    return Exported(folder, manifest, held_out.part)


def _kept(count: int) -> list[int]:
    """Return the positions of the rows to keep: the first rows, and the last row, which has no values."""
    return [count - 1, *range(min(count - 1, KEPT - 1))]


def _write(trained: Trained, rows: pa.Table, staging: Staging, form: str, torchscript: bool) -> Manifest:
    """Write transform, rows and model, and return the manifest without the entries of files."""
    opened = _core.Checkpoint(trained.checkpoint)
    staging.write(TRANSFORM, trained.transform.to_json().encode())
    embedding = trained.transform.features.embedding_config()
    written = write_tables(opened, embedding, staging.path, form)
    dims = dict(embedding.tables)
    slots, kind, content = _model(trained, rows, torchscript)
    staging.write(dense.FILES[kind], content)
    return Manifest(
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={
            "persia": persia.__version__,
            "persia_core": persia_core.__version__,
            "torch": torch.__version__,
        },
        source=Source(
            trained.run,
            "/".join(trained.checkpoint.parts[-2:]),
            opened.generation,
            opened.step,
            trained.transform.digest,
        ),
        inputs=inputs_of(trained.config, rows),
        outputs=tuple(
            Output(name, "probability" if loss == "bce" else "number") for name, _, loss in trained.objective.labels
        ),
        transform=TRANSFORM,
        model=Model(dense.FILES[kind], kind, slots, torch.get_num_threads()),
        rows=form,
        tables=tuple(Table(name, dims[name], count, ids, weights) for name, count, ids, weights in written),
        parity=Parity(PARITY, 0, 0, parity.bound_of(form), 0.0),
        files=(),
    )


def _model(trained: Trained, rows: pa.Table, torchscript: bool) -> tuple[tuple[str, ...], str, bytes]:
    """Return the id features in the order of the model, and the kind and the content of the model's file."""
    some = rows.take([at % len(rows) for at in range(_EXAMPLE)])
    batch = to_batch(trained.transform(some, labels=False), requires_grad=False)
    backend = trained.ctx.common_context
    names = None if backend is None else backend.inputs.for_evaluation(trained.model)
    floats, vectors, _ = trained.ctx.prepare_features(batch)
    kind, content = dense.written(trained.model, floats, vectors, torchscript=torchscript)
    return tuple(trained.transform.slots) if names is None else names.id_features, kind, content


def _files(path: Path, manifest: Manifest, threads: int) -> tuple[File, ...]:
    names = [manifest.transform, manifest.model.file]
    names += [name for table in manifest.tables for name in (table.ids, table.weights)]
    return tuple(File.of(path / name, threads) for name in names)
