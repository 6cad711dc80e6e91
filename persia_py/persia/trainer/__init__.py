"""The trainer: ``persia.yml`` in, a trained model out.

* :mod:`persia.trainer.trainer`: :class:`Trainer`, what a script uses
* :mod:`persia.trainer.training`: one run, step by step
* :mod:`persia.trainer.parts`, :mod:`persia.trainer.batches`: rows of train, valid and test
* :mod:`persia.trainer.fitting`: the transform, fitted once
* :mod:`persia.trainer.models`, :mod:`persia.trainer.optimizers`, :mod:`persia.trainer.objective`: what is trained
* :mod:`persia.trainer.evaluation`, :mod:`persia.trainer.metrics`: how good it is
* :mod:`persia.trainer.validation`: the best checkpoint, and the early stop
* :mod:`persia.trainer.state`: what a checkpoint keeps of a trainer
* :mod:`persia.trainer.run_folder`, :mod:`persia.trainer.record`, :mod:`persia.trainer.pages`: the files of a run
* :mod:`persia.trainer.prediction`: scores in a Parquet file
* :mod:`persia.trainer.progress`: what is shown while training
* :mod:`persia.trainer.baselines`: models to compare with
"""

from persia.trainer.metrics import Metrics
from persia.trainer.reports import EvaluationReport, StepReport
from persia.trainer.trainer import Trainer

__all__ = ["EvaluationReport", "Metrics", "StepReport", "Trainer"]
