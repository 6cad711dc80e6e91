"""All exceptions that persia raises, with exit codes and hints. Most of the classes are defined in ``persia_core``."""

from persia_core.errors import (
    AuthError,
    BatchSizeError,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    FeatureTypeError,
    ForeignCheckpointError,
    IncompatibleError,
    MissingLabelError,
    NonFiniteError,
    PersiaError,
    RunLostError,
    StaleCoreError,
    StaleGenerationError,
    StorageError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
)

__all__ = [
    "AuthError",
    "BatchSizeError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "FeatureTypeError",
    "ForeignCheckpointError",
    "IncompatibleError",
    "MissingLabelError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PersiaError",
    "RunLostError",
    "StaleCoreError",
    "StaleGenerationError",
    "StorageError",
    "UnreachableError",
    "UsageError",
    "WaitTimeoutError",
]


class OutOfMemoryError(PersiaError, RuntimeError):
    """The dense part of a step needs more memory than the device, or this machine, has.

    The message names the step and lists the largest tensors.

    Attributes:
        can_repeat: Whether the step can be repeated with fewer rows at a time, because no part of it was applied.
    """

    can_repeat = True
