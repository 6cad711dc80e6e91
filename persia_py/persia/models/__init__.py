"""Models in plain torch, with PersiaML's signature: ``model(non_id_tensors, embedding_tensors)``."""

from persia.models.autoint import AutoInt
from persia.models.dcnv2 import DCNv2
from persia.models.dlrm import DLRM
from persia.models.tiny import Tiny

__all__ = ["DLRM", "AutoInt", "DCNv2", "Tiny"]
