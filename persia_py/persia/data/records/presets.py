"""Named file formats: the columns of their files, and the types of the columns."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from persia.runtime.criteo import CRITEO_HEADER
from persia.runtime.errors import UsageError

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "criteo": MappingProxyType(
            {
                "file_format": "tsv",
                "header": CRITEO_HEADER,
                "types": {name: pa.string() if name[0] == "C" else pa.int64() for name in CRITEO_HEADER},
            }
        )
    }
)
"""The arguments of :func:`~persia.data.records.open_files`, by the name of the format."""


def options(name: str | None) -> dict[str, Any]:
    """Return the arguments of :func:`~persia.data.records.open_files` for a preset; none for None.

    Raises:
        UsageError: The preset does not exist.
    """
    if name is None:
        return {}
    if name not in PRESETS:
        raise UsageError(f"preset {name!r}: expected one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])
