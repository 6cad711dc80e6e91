"""Models in plain torch, with PersiaML's signature: ``model(non_id_tensors, embedding_tensors)``."""

from persia.models.dcnv2 import DCNv2
from persia.models.dlrm import DLRM

__all__ = ["DLRM", "DCNv2"]
