"""The folder of a run that is a job: ``PERSIA_RUN_DIR``, which all ranks share and rank 0 writes."""

from collections.abc import Mapping
from pathlib import Path

from persia.config import Config
from persia.runtime import job
from persia.runtime.errors import ConfigError
from persia.runtime.files import make_folders
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia.trainer.run_folder import BEST, CONFIG, FACTS, METRICS, RunFolder, resolved

_logger = get_logger("trainer")

FITS = "fits"
"""The folder of the fit that ranks share."""


class JobFolder(RunFolder):
    """The folder of the current run of this job. Checkpoints are below ``PERSIA_CKPT_DIR``, where servers write theirs.

    A run that was interrupted continues in its folder. A run that starts after the end of another one replaces its
    files.
    """

    @classmethod
    def new(cls, config: Config) -> "JobFolder":
        """Return the folder, which is created if it is missing.

        Raises:
            ConfigError: The rows are to be random, which data-compose does not send.
            StorageError: It cannot be made.
        """
        if config.data.synthetic:
            error = ConfigError("data.synthetic: found true, allowed: false in a job, where data-compose sends rows")
            error.hint = "train in one process: persia train persia.yml --set data.synthetic=true"
            raise error
        if config.checkpoint.dir is not None and settings.rank == 0:
            _logger.warning("checkpoint.dir has no effect in a job: checkpoints are below PERSIA_CKPT_DIR")
        folder = cls(job.run_dir())
        with folder._naming():
            make_folders(folder.path)
        return folder

    @property
    def is_interrupted(self) -> bool:
        """Whether there is an unfinished run in this folder."""
        return (self.path / job.RUN).exists() and bool(self.read_json(FACTS))

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints, on rank 0."""
        return Path(settings.checkpoint_root or self.path, job.run_name())

    def note_checkpoints(self) -> None:
        """Record the folder of the checkpoints, on rank 0, so that they are found from the run's folder."""
        self.write_json(FACTS, {**self.read_json(FACTS), "checkpoints": str(self.checkpoints)})

    def saves(self, config: Config) -> Path:
        """Return the folder of the checkpoints, on rank 0."""
        del config
        return self.checkpoints

    @property
    def best(self) -> Path:
        """The folder of the best checkpoint, on rank 0."""
        return self.checkpoints / BEST

    def name_latest(self) -> None:
        """Nothing: a job has one folder."""

    def make(self, config: Config, files: Mapping[str, str]) -> None:
        """Write the configuration and other files of a new run.

        Raises:
            StorageError: It cannot be written.
        """
        for name, content in {CONFIG: resolved(config), METRICS: "", **files}.items():
            self.write(name, content)
