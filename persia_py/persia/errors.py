"""Everything persia raises on purpose, with exit codes and hints. The classes live in ``persia_core``."""

from persia_core.errors import (
    BatchSizeError,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    FeatureTypeError,
    MissingLabelError,
    NonFiniteError,
    PersiaError,
    StaleCoreError,
    StaleEpochError,
    StorageError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
)

__all__ = [
    "BatchSizeError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "FeatureTypeError",
    "MissingLabelError",
    "NonFiniteError",
    "PersiaError",
    "StaleCoreError",
    "StaleEpochError",
    "StorageError",
    "UnreachableError",
    "UsageError",
    "WaitTimeoutError",
]
