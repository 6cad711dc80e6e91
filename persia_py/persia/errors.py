"""The import path of PersiaML for :mod:`persia.runtime.errors`."""

from persia.runtime.errors import *  # noqa: F403  # the module defines __all__
from persia.runtime.errors import __all__ as __all__
