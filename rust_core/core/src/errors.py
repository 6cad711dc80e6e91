"""The exceptions of persia. Each class has an exit code, and most have a hint at the next step."""


class PersiaError(Exception):
    """Base of all exceptions of persia.

    Args:
        args: The message.
        hint: The next step of the user; None takes that of the class.

    Attributes:
        exit_code: The exit code of a process that ends with this error.
        hint: The next step of the user; empty if the message includes it.
        step: The step whose look-up, push or gradients failed; None for any other error.
    """

    exit_code: int = 1
    hint: str = ""
    step: int | None = None

    def __init__(self, *args: object, hint: str | None = None) -> None:
        super().__init__(*args)
        if hint is not None:
            self.hint = hint


class UsageError(PersiaError, RuntimeError):
    """A call that is not allowed here, or not in this order."""

    exit_code = 2


class ConfigError(PersiaError, ValueError):
    """An invalid configuration file, variable or option. All errors in a file are listed, with positions.

    Attributes:
        findings: Line, column, key path and message of each error, if a file that the engine reads has
            errors; otherwise empty.
    """

    findings: list[tuple[int, int, str, str]] = []  # noqa: RUF012
    exit_code = 2
    hint = "correct the file, variable or argument that is named above; to check a persia.yml: persia config check"


class DataError(PersiaError, ValueError):
    """Data, a batch or gradients that cannot be used. The message names the feature and the row, if known."""

    exit_code = 2


class BatchSizeError(DataError, AssertionError):
    """Features, labels and dense inputs of a batch have different numbers of samples, or no samples."""


class FeatureTypeError(DataError, TypeError):
    """A feature, a tensor or a table of a wrong class or dtype."""


class MissingLabelError(DataError, RuntimeError):
    """A training batch without a label."""


class NonFiniteError(PersiaError, ArithmeticError):
    """NaN or infinity where training needs a number."""

    hint = "lower the learning rate, or inspect the batch named above"


class CheckpointError(PersiaError):
    """A checkpoint that is missing, damaged, of a newer format, or of a different configuration."""

    exit_code = 4
    hint = "run: persia ckpt list DIR, then: persia ckpt verify DIR"


class ForeignCheckpointError(CheckpointError):
    """An intact checkpoint, or a transform, whose tables, dims, optimizer or features are not those of the run."""

    hint = (
        "compare the tables with those of the checkpoint: persia ckpt show FOLDER. Then change the configuration, or "
        "load a checkpoint of this configuration"
    )


class StorageError(PersiaError, OSError):
    """A file or object that cannot be read or written (the message names its path), or no memory for rows."""

    hint = "check the path, its owner and the free space"


class UnreachableError(PersiaError, ConnectionError):
    """A process of the job, or NATS, that does not respond or cannot serve the request now."""

    exit_code = 3
    hint = "list the running processes: persia status"


class IncompatibleError(PersiaError, RuntimeError):
    """A peer of a different version, protocol or configuration, or with an invalid reply."""

    exit_code = 2
    hint = "start every process of the job from the same build and with the same configuration files"


class AuthError(PersiaError, PermissionError):
    """Credentials or certificates that are missing or refused."""

    exit_code = 5
    hint = "set the same PERSIA_TOKEN_FILE (and PERSIA_TLS_CA) for every process of the job"


class RunLostError(PersiaError):
    """The run cannot continue: a server lost its rows, a process is unreachable, or a rank ended."""

    exit_code = 75
    hint = "restart the trainer; it resumes after the last checkpoint that its script loads"


class StaleGenerationError(PersiaError):
    """This process belongs to a generation that a newer one has replaced."""

    exit_code = 75
    hint = "restart the trainer"


class WaitTimeoutError(PersiaError, TimeoutError):
    """A wait that exceeded its time limit. The message names the awaited event."""

    exit_code = 70


class DeviceError(PersiaError, RuntimeError):
    """A device that this build or this machine does not have, or that failed."""

    exit_code = 2


class StaleCoreError(PersiaError, ImportError):
    """The loaded persia_core was not built from these Python sources."""

    exit_code = 2
