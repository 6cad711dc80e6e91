"""The tensors of a batch, in the form that a model receives."""

import torch
from torch.utils.dlpack import from_dlpack

from persia_core.forward import Tensor, TrainingBatch


def given_tensors(batch: TrainingBatch, tensors: list[Tensor]) -> list[torch.Tensor]:
    """Return dense inputs or labels. On a device, copy them out of the batch's single large buffer."""
    shared = [from_dlpack(tensor) for tensor in tensors]
    return shared if batch.device_id is None else [tensor.clone() for tensor in shared]
