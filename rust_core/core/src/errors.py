"""What persia raises on purpose. Each class has an exit code, and a hint at the next step."""


class PersiaError(Exception):
    """Base of everything persia raises on purpose.

    Attributes:
        exit_code: The exit code of a process that ends by it.
        hint: What to do next; empty where the message says it.
        step: The step whose look-up or push was refused; None for any other error.
    """

    exit_code: int = 1
    hint: str = ""
    step: int | None = None


class UsageError(PersiaError, RuntimeError):
    """A call that cannot be made here, or not in this order."""

    exit_code = 2


class ConfigError(PersiaError, ValueError):
    """Something is wrong in a configuration file; the message lists every mistake with its place."""

    exit_code = 2
    hint = "correct the file, then run: persia config check"


class DataError(PersiaError, ValueError):
    """A batch that cannot be trained on: the message names the feature, and where it can the row."""

    exit_code = 2


class BatchSizeError(DataError, AssertionError):
    """Features, labels and dense inputs of one batch have different numbers of samples, or none."""


class FeatureTypeError(DataError, TypeError):
    """A feature of the wrong class or dtype."""


class MissingLabelError(DataError, RuntimeError):
    """A training batch without a label."""


class NonFiniteError(PersiaError, ArithmeticError):
    """NaN or infinity where training needs a number."""

    hint = "lower the learning rate, or look at the batch named above"


class CheckpointError(PersiaError):
    """A checkpoint that is not there, damaged, or of another configuration."""

    exit_code = 4
    hint = "run: persia ckpt list DIR, then: persia ckpt verify DIR"


class StorageError(PersiaError, OSError):
    """The operating system refused to read or write; the message names the path."""

    hint = "check the path, its owner and the free space"


class UnreachableError(PersiaError, ConnectionError):
    """A part of the system that does not answer."""

    exit_code = 3
    hint = "look at what runs: persia status"


class IncompatibleError(PersiaError, RuntimeError):
    """A peer of another version, protocol or configuration; the message has both values."""

    exit_code = 2
    hint = "start every part of the job from the same build and the same configuration files"


class AuthError(PersiaError, PermissionError):
    """Credentials or certificates that are missing or not accepted."""

    exit_code = 5
    hint = "give every part of the job the same PERSIA_TOKEN_FILE (and PERSIA_TLS_CA)"


class RunLostError(PersiaError):
    """The run in progress cannot go on: a server lost its rows, a part stayed away, or a rank is gone."""

    exit_code = 75
    hint = "start the trainer again; it goes on from the last checkpoint that its script loads"


class StaleGenerationError(PersiaError):
    """This process belongs to a run that was replaced by a newer one."""

    exit_code = 75
    hint = "start the trainer again"


class WaitTimeoutError(PersiaError, TimeoutError):
    """A wait that took longer than allowed; the message names what was waited for."""

    exit_code = 70


class DeviceError(PersiaError, RuntimeError):
    """A device this build or this machine does not have."""

    exit_code = 2


class StaleCoreError(PersiaError, ImportError):
    """The loaded persia_core was not built from these Python sources."""

    exit_code = 2
