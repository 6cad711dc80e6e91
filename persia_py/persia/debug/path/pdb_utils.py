"""Provides the import path of MindSpeed's scripts.

``persia debug run`` puts this folder at the end of ``PYTHONPATH``.
"""

from persia.debug import breakpoint_, clear_

__all__ = ["breakpoint_", "clear_"]
