"""Compares a bundle with evaluation on the same rows."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from persia.ctx import EmbeddingCtx
from persia.features import Samples, Transform, to_batch
from persia.runtime.errors import UsageError
from persia.serving import parity, scores
from persia.serving.bundle import Bundle, Floats
from persia.trainer.objective import Objective

BATCHES = {1: 256, 7: 1024, 100: 4096, 4096: 4096}
"""The batch sizes, and the number of rows that are compared with each."""

_AGAIN = "export again; if the error returns, report it with the output of: persia doctor --env"


@dataclass(frozen=True)
class Evaluated:
    """The result of evaluation.

    Attributes:
        samples: The transformed rows.
        outputs: The outputs of evaluation, ``[rows, labels]``.
    """

    samples: Samples
    outputs: Floats


def evaluated(ctx: EmbeddingCtx, objective: Objective, transform: Transform, rows: pa.Table, size: int) -> Evaluated:
    """Return the outputs of evaluation in batches of ``size`` rows."""
    samples, parts = transform(rows, labels=False), []
    for start in range(0, len(samples), size):
        some = samples.slice(start, min(start + size, len(samples)))
        output, _ = ctx.forward(to_batch(some, requires_grad=False))
        parts.append(np.stack([scores.numbers(part) for part in objective.outputs(output)], 1))
    return Evaluated(samples, np.concatenate(parts))


def check(bundle: Bundle, ctx: EmbeddingCtx, wanted: Evaluated, rows: pa.Table) -> tuple[Floats, float]:
    """Compare ids, floats, vectors and outputs.

    Ids and floats must be bit-identical. Vectors must be bit-identical if rows are ``f32``.

    Returns:
        The outputs of the bundle in one batch, and the largest difference in any batch, as in
        :func:`persia.serving.parity.difference`.

    Raises:
        UsageError: Ids, floats or vectors differ, or an output differs by more than the data type of rows allows.
    """
    samples = bundle.transform(rows)
    _check_samples(wanted.samples, samples)
    if bundle.manifest.rows == "f32":
        _check_vectors(bundle, ctx, samples)
    largest, bound = 0.0, bundle.manifest.parity.bound
    for size, count in BATCHES.items():
        some = samples.slice(0, min(count, len(samples)))
        found = bundle.outputs_of(some, at_a_time=size).values
        far = parity.difference(found, wanted.outputs[: len(some)])
        if far > bound:
            _refuse(bundle, found, wanted.outputs[: len(some)], size, far)
        largest = max(largest, far)
    return bundle.outputs_of(samples).values, largest


def _check_samples(wanted: Samples, found: Samples) -> None:
    one, other = (each.batch(requires_grad=False).to_bytes() for each in (wanted, found))
    if one != other:
        raise UsageError(
            "the ids or floats of the bundle's transform differ from those of the run's transform", hint=_AGAIN
        )


def _check_vectors(bundle: Bundle, ctx: EmbeddingCtx, samples: Samples) -> None:
    _, wanted, _ = ctx.prepare_features(to_batch(samples, requires_grad=False))
    _, found, _ = bundle.vectors_of(samples)
    for slot, one, other in zip(bundle.manifest.model.slots, wanted, found, strict=True):
        if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
            raise UsageError(
                f"the vectors of slot {slot!r} in the bundle differ from those of the checkpoint", hint=_AGAIN
            )


def _refuse(bundle: Bundle, found: Floats, wanted: Floats, size: int, far: float) -> None:
    form, bound = bundle.manifest.rows, bundle.manifest.parity.bound
    at = max(range(len(found)), key=lambda row: parity.difference(found[row : row + 1], wanted[row : row + 1]))
    raise UsageError(
        f"the bundle's scores differ from those of evaluation: the held-out row with index {at} has the output "
        f"{found[at].tolist()} in batches of {size}, and {wanted[at].tolist()} in evaluation; the largest "
        f"|difference| / max(1, |output|) is {far:.2g}, the limit for {form} rows is {bound:g}",
        hint=(
            "the model depends on the other rows of a batch, or on random numbers, in evaluation mode: correct its "
            "forward"
            if form == "f32"
            else f"export with more exact rows: --rows {'f32' if form == 'f16' else 'f16'}"
        ),
    )
