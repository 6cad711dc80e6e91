"""PersiaML's import path of :mod:`persia.discovery.services`."""

from persia.discovery.services import get_embedding_worker_services

__all__ = ["get_embedding_worker_services"]
