"""The tensors of a batch, in the form in which a model gets them."""

import torch
from torch.utils.dlpack import from_dlpack

from persia_core.forward import Tensor, TrainingBatch


def given_tensors(batch: TrainingBatch, tensors: list[Tensor]) -> list[torch.Tensor]:
    """Return dense inputs or labels. On a device they are copied from the batch's single buffer, which is large."""
    shared = [from_dlpack(tensor) for tensor in tensors]
    return shared if batch.device_id is None else [tensor.clone() for tensor in shared]
