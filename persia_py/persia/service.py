"""The import path of PersiaML for :mod:`persia.discovery.services`."""

from persia.discovery.services import get_embedding_worker_services

__all__ = ["get_embedding_worker_services"]
