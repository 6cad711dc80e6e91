"""Models in plain torch, called as PersiaML calls them: ``model(non_id_tensors, embedding_tensors)``."""

from persia.models.dlrm import DLRM

__all__ = ["DLRM"]
