"""One rank of a job that trains from a ``persia.yml``. The launcher runs it if no script is specified."""

from pathlib import Path

from persia.config.document import load_for_job
from persia.runtime.settings import settings, variable
from persia.trainer import one_batch
from persia.trainer.operations import effective_batch
from persia.trainer.progress import Shown
from persia.trainer.trainer import Trainer


def train(path: Path) -> None:
    """Train with the other ranks; rank 0 shows the reports.

    Args:
        path: The ``persia.yml``, which all processes of the job have.

    Raises:
        PersiaError: As in :class:`persia.trainer.Trainer`.
    """
    config = load_for_job(path)
    if (test := variable(one_batch.VARIABLE)) is not None:
        one_batch.train_rank(config, path, test)
        return
    stop = config.train.early_stop
    with Trainer(config) as trainer, Shown("auc" if stop is None else stop.metric) as shown:
        reports = trainer.fit()
        if settings.rank == 0:
            shown.note(effective_batch(config))
        for report in reports:
            if settings.rank == 0:
                shown.report(report)
