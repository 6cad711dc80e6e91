"""The import path of PersiaML for :mod:`persia.launch.service_ctx`."""

from persia.launch.service_ctx import PersiaServiceCtx, ensure_persia_service

__all__ = ["PersiaServiceCtx", "ensure_persia_service"]
