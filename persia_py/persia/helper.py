"""PersiaML's import path of :mod:`persia.launch.service_ctx`."""

from persia.launch.service_ctx import PersiaServiceCtx, ensure_persia_service

__all__ = ["PersiaServiceCtx", "ensure_persia_service"]
