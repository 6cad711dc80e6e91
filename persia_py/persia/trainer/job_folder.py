"""The folder of a run that is a job: ``PERSIA_RUN_DIR``, which all ranks share and rank 0 writes."""

import os
from collections.abc import Mapping

from persia.config import Config
from persia.runtime import job
from persia.runtime.errors import ConfigError
from persia.runtime.files import is_url, make_folders
from persia.runtime.logging import get_logger
from persia.runtime.places import Place, below
from persia.runtime.settings import settings
from persia.trainer.run_folder import BEST, CONFIG, FACTS, METRICS, RunFolder, resolved

_logger = get_logger("trainer")

FITS = "fits"
"""The folder for the fit that ranks share."""


class JobFolder(RunFolder):
    """The folder of the current run of this job.

    Checkpoints are below ``PERSIA_CKPT_DIR``, where servers write, or below ``checkpoint.dir`` if that is a URL. An
    interrupted run continues in its folder. A run that starts after the end of another run replaces its files.
    """

    @classmethod
    def new(cls, config: Config) -> "JobFolder":
        """Return the folder, which is created if it is missing.

        Raises:
            ConfigError: ``data.synthetic`` is true, but data-compose does not send random rows.
            StorageError: The folder cannot be created.
        """
        if config.data.synthetic:
            raise ConfigError(
                "data.synthetic: found true, allowed: false in a job, where data-compose sends rows",
                hint=(
                    "set data.synthetic: false, or train in one process: persia train persia.yml --local "
                    "--set data.synthetic=true"
                ),
            )
        saves = config.checkpoint.dir
        if saves is not None and is_url(saves):
            # This sets the variable of this rank only. A server whose PERSIA_CKPT_DIR differs refuses the URL.
            os.environ["PERSIA_CKPT_DIR"] = saves
        elif saves is not None and settings.rank == 0:
            text = "checkpoint.dir: the folder %s has no effect in a job, whose checkpoints are below PERSIA_CKPT_DIR"
            _logger.warning(text, saves)
        folder = cls(job.run_dir())
        with folder._naming():
            make_folders(folder.path)
        return folder

    @property
    def is_interrupted(self) -> bool:
        """Whether this folder has an unfinished run."""
        return (self.path / job.RUN).exists() and bool(self.read_json(FACTS))

    @property
    def checkpoints(self) -> Place:
        """The folder or the URL of the run's checkpoints. Valid only on rank 0."""
        return below(settings.checkpoint_root or self.path, job.run_name())

    def note_checkpoints(self) -> None:
        """On rank 0, record the folder of the checkpoints in the run's folder."""
        self.write_json(FACTS, {**self.read_json(FACTS), "checkpoints": str(self.checkpoints)})

    def saves(self, config: Config) -> Place:
        """Return the folder or the URL of the checkpoints. Valid only on rank 0."""
        del config
        return self.checkpoints

    @property
    def best(self) -> Place:
        """The folder or the URL below which the best checkpoint is. Valid only on rank 0."""
        return self.checkpoints / BEST

    def name_latest(self) -> None:
        """Do nothing, because a job has only one folder."""

    def make(self, config: Config, files: Mapping[str, str]) -> None:
        """Write the configuration and other files of a new run.

        Raises:
            StorageError: A file cannot be written.
        """
        for name, content in {CONFIG: resolved(config), METRICS: "", **files}.items():
            self.write(name, content)
