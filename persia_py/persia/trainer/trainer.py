"""Trains a model from a configuration. Read this module top-down from :meth:`Trainer.fit`."""

import contextlib
import dataclasses
import os
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from typing_extensions import Self

from persia.config import Config, load_config
from persia.config.blocks import Paths
from persia.config.environment import variables_of
from persia.ctx import EmbeddingCtx, eval_ctx
from persia.data import IterableDataset
from persia.distributed import network
from persia.features import Transform
from persia.profile.comm import Comm
from persia.runtime import flight
from persia.runtime.environment import applied
from persia.runtime.errors import UsageError
from persia.runtime.places import Place
from persia.runtime.seeding import setup_seed
from persia.runtime.settings import settings
from persia.trainer import fitting, models
from persia.trainer.batches import Rows, read_rows
from persia.trainer.evaluation import evaluate, outputs_of, scores_of
from persia.trainer.facts import check_files, types_in, warn_of_trained
from persia.trainer.objective import Objective
from persia.trainer.operations import spot_watch_of
from persia.trainer.parts import Part, Parts, group_of, labelled_columns, open_given
from persia.trainer.predictions import Predictions, Scored
from persia.trainer.reports import EvaluationReport, StepReport
from persia.trainer.run_folder import FACTS, Found, RunFolder, check_same, find_checkpoint, find_run, of_job
from persia.trainer.sizing import Sizing, preflight
from persia.trainer.training import Training
from persia.trainer.variables import set_variables
from persia_core.engine import Engine

if TYPE_CHECKING:
    from persia.trainer.exporting.export import Exported

Report = StepReport | EvaluationReport


class Trainer:
    """Trains the model of a ``persia.yml``, evaluates it, and predicts with it.

    Use it as::

        with persia.Trainer("persia.yml") as trainer:
            for report in trainer.fit():
                print(report)
            trainer.evaluate("march.parquet")

    If ``PERSIA_NATS_URL`` is not set, rows are in this process. Otherwise this process is one rank of a job:
    data-compose reads and transforms rows, and only rank 0 evaluates and writes files.

    Args:
        config: The configuration, or the path of a ``persia.yml``.
        model: A model to use instead of the ``model`` block, called as ``model(non_id_tensors, embedding_tensors)``.
            Its output has a column for each label, in order; for ``bce``, logits.

    Attributes:
        config: The configuration.
        folder: The folder of the run; None before :meth:`fit` and :meth:`resume`.
        sizing: The memory that a new run needs, on rank 0; None before :meth:`fit`, and with the user's own data set.

    Raises:
        ConfigError: The file has errors; the message lists all of them.
        UsageError: The configuration was not read with :func:`persia.load_config`.
    """

    def __init__(self, config: Config | str | os.PathLike[str], model: torch.nn.Module | None = None) -> None:
        self.config = config if isinstance(config, Config) else load_config(config)
        if not self.config.is_located:
            raise UsageError(
                "Trainer(config): the configuration was made by a program, and not checked",
                hint="write it into a file, and read the file: persia.load_config('persia.yml')",
            )
        self.folder: RunFolder | None = None
        self.sizing: Sizing | None = None
        self._given_model = model
        self._resumes: Found | RunFolder | None = None
        self._training: Training | None = None
        self._loaded: _Loaded | None = None
        self._torch = contextlib.ExitStack()
        self._torch.callback(set_variables(self.config))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(value)

    def fit(self, source: Paths | IterableDataset | None = None) -> Iterator[Report]:
        """Train, and iterate over reports: one every ``run.log_every`` steps, and one for each evaluation.

        The last report of a whole run is that of the test set, if there is one. The test set is scored once, with the
        best model if ``early_stop`` is set.
        Afterwards, and between two reports, :meth:`evaluate` and :meth:`predict` use the current model.

        Args:
            source: Files to use instead of ``data.train``, or a data set with your own batches; None reads
                ``data.train``.

        Returns:
            An iterator, which trains while it is iterated. Checks that need no data run immediately.

        Raises:
            ConfigError: The configuration does not fit the data.
            DataError: A file or a row is invalid; the message names it.
            UnreachableError: ``spot.url`` does not respond.
            UsageError: This trainer has already trained, a run of this name exists, or ranks of a job have trained the
                resumed run.
            SystemExit: The end of this spot instance is already announced; the code is 75.
        """
        if self._training is not None:
            raise UsageError("Trainer.fit was called before; create a new Trainer")
        self._unload()
        self._torch.enter_context(spot_watch_of(self.config))
        self._prepare_torch()
        resumed = self._resumes.folder if isinstance(self._resumes, Found) else self._resumes
        if resumed is not None and settings.nats_url is None:
            _check_one_process(resumed)
        training = Training(self.config, self._given_model, source, resumed)
        self._training, self.folder = training, training.folder
        flight.use_folder(training.folder.path)
        self._torch.callback(flight.use_folder, None)
        if resumed is None and training.step == 0 and settings.rank == 0 and not isinstance(source, IterableDataset):
            rows = int(training.folder.read_json(FACTS)["rows"])
            self.sizing = preflight(self.config, training.parts, training.transform, training.model, rows)
        return self._guarded(training)

    def _guarded(self, training: Training) -> Iterator[Report]:
        try:
            yield from training.run()
        except GeneratorExit:
            raise
        except BaseException as error:
            self._close(error)
            raise

    def evaluate(self, source: Paths | None = None) -> EvaluationReport:
        """Evaluate the model.

        Args:
            source: Labeled files; None means the test set, or the validation set if there is none.

        Raises:
            UsageError: No model is trained or loaded, or there is neither a test set nor a validation set.
            DataError: A row is invalid; the message names file and row.
        """
        with self._evaluating() as (ctx, objective, transform, step):
            part = self._labelled(source)
            rows = self._rows(part, transform)
            name = part.name if source is None else "given"
            report = evaluate(ctx, objective, rows, self.config, name, step)
            return dataclasses.replace(report, files=tuple(part.files.paths))

    def predict(self, source: Paths, *, strict: bool = True, columns: list[str] | None = None) -> Predictions:
        """Iterate over rows with their scores, in the order of the rows. Memory is bounded.

        Args:
            source: The files, with or without labels.
            strict: Whether to refuse values of a wrong type; otherwise they count as null.
            columns: The columns that are read in addition to those of the features; None means all columns.

        Returns:
            An iterator of pairs: rows as they were read, and the scores for each label, ``[rows]``: probabilities for
                ``bce``, the model's outputs for ``mse``. The iterator counts unusual values. During the iteration, it
                raises :class:`UsageError` if no model is trained or loaded, and :class:`DataError`, with file and row,
                for an invalid row.
        """
        found = Predictions()
        return found.of(self._predict(found, source, strict, columns))

    def _predict(self, found: Predictions, source: Paths, strict: bool, columns: list[str] | None) -> Iterator[Scored]:
        with self._evaluating() as (ctx, objective, transform, _):
            needed = self.config.compiled.columns(labels=False)
            wanted = None if columns is None else [*dict.fromkeys([*columns, *needed])]
            kept = {name: ["--keep"] for name in columns or () if name not in needed}
            files = open_given(self.config, source, wanted, self._types(), used_by=kept, lenient=not strict)
            part = Part(files, None, "test", self.config.origin)
            rows = read_rows(part, transform, self.config.data.batch_size, labels=False, strict=strict)
            labels = [name for name, _, _ in objective.labels]
            for each, outputs in outputs_of(ctx, objective, rows):
                found.unusual.add(len(each.samples), each.samples.report.counts)
                found.without_row = ctx.evaluation_report.missing_share
                yield each.table, dict(zip(labels, scores_of(objective, outputs), strict=True))
            found.unusual.add_unreadable(files.unreadable, self.config.origin.uses)

    def export(
        self,
        folder: str | os.PathLike[str],
        *,
        rows: str = "f32",
        torchscript: bool = False,
        held_out: Paths | None = None,
    ) -> "Exported":
        """Write the model of the run's best checkpoint, or its newest, as a bundle for :mod:`persia.serving`.

        Args:
            folder: The folder of the new bundle.
            rows: The data type of embedding rows: ``f32``, ``f16`` or ``int8``.
            torchscript: Whether to write the dense model as TorchScript instead of using ``torch.export``.
            held_out: Files with rows on which the scores of the bundle are compared with those of evaluation; they need
                no labels. None means the test set, or the validation set if there is no test set, or otherwise the
                training rows.

        Raises:
            UsageError: The folder exists, no model is trained, the model cannot be exported, or the scores differ.
            StorageError: The folder cannot be written; nothing is left.
        """
        from persia.serving import parity
        from persia.trainer.exporting import export, staging
        from persia.trainer.exporting import held_out as rows_of

        parity.bound_of(rows)
        staging.check_free(Path(folder))
        if self._training is not None and self._training.is_open:
            raise UsageError(
                "Trainer.export: this trainer is still open and holds the rows of its last step, but an export needs "
                "the rows of a checkpoint",
                hint=(
                    "close the trainer, then: with persia.Trainer(config) as trainer: "
                    f"trainer.resume({self._training.folder.shown!r}).export(...)"
                ),
            )
        with self._evaluating() as (ctx, objective, transform, _):
            found, model = self._resumes, ctx.model
            assert isinstance(found, Found) and model is not None  # noqa: S101 - ensured by _evaluating
            run, checkpoint = found.folder.path.name, found.checkpoint.absolute()
            trained = export.Trained(self.config, run, checkpoint, ctx, model, objective, transform)
            compared = rows_of.read(self.config, held_out, self._types())
            return export.export(trained, compared, Path(folder), rows=rows, torchscript=torchscript)

    def _types(self) -> dict[str, pa.DataType]:
        """Return the types of the columns of the training data, which a text file must have too."""
        return {} if self.folder is None else types_in(self.folder.read_json(FACTS))

    def save(self) -> Place:
        """Save the run now, in addition to its automatic checkpoints, and return the checkpoint.

        Raises:
            UsageError: :meth:`fit` was not called, or has ended.
            StorageError: The checkpoint cannot be written.
        """
        if self._training is None or not self._training.is_open:
            raise UsageError("Trainer.save: nothing is being trained; call save() while iterating fit()")
        return self._training.save()

    def resume(self, run: str | os.PathLike[str] | None = None) -> Self:
        """Use the run in a folder: :meth:`fit` continues it, :meth:`evaluate` and :meth:`predict` use its model.

        :meth:`fit` continues after the newest checkpoint. :meth:`evaluate` and :meth:`predict` use the best checkpoint
        if the run has one, otherwise the newest.

        Args:
            run: The folder of a run, ``runs/LATEST``, or a checkpoint in a run, which only :meth:`evaluate` and
                :meth:`predict` use; None means the run called ``run.name`` or, without a name, ``LATEST`` in
                ``run.dir``.

        Raises:
            UsageError: The run does not exist, or :meth:`fit` was called before.
        """
        if self._training is not None:
            raise UsageError("Trainer.resume cannot be called after fit; create a new Trainer")
        self._unload()
        where = (
            Path(self.config.run.dir).expanduser() / (self.config.run.name or "LATEST") if run is None else Path(run)
        )
        self.folder = find_run(where)
        try:
            self._resumes = find_checkpoint(where)
        except UsageError:
            self._resumes = self.folder  # the run has no checkpoint
        return self

    @property
    def comm(self) -> Comm:
        """The time spent in training on look-ups, pushes and waiting for other ranks: ``trainer.comm.stats()``."""

        def engine() -> Engine:
            if self._training is None or not self._training.is_open:
                raise UsageError("Trainer.comm.stats(): nothing is being trained; call stats() while iterating fit()")
            return self._training.engine

        return Comm(engine, lambda: None if self._training is None else self._training.wrapped_model)

    def close(self) -> None:
        """End the run, and free the rows. If it is not called, the run ends with the ``with`` block."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        try:
            self._unload()
            if self._training is not None:
                self._training.close(error)
        finally:
            self._torch.close()

    def _prepare_torch(self) -> None:
        """Seed random generators. Set torch's threads and the ranks' variables, which :meth:`close` restores."""
        self._torch.enter_context(applied(variables_of(self.config)))
        if settings.nats_url is not None:
            network.check()
        self._use_threads()
        train = self.config.train
        if train.reproducible or settings.reproducible:
            before = torch.are_deterministic_algorithms_enabled()
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            self._torch.callback(torch.use_deterministic_algorithms, before, warn_only=warns)
            setup_seed(train.seed)
        else:
            random.seed(train.seed)
            np.random.seed(train.seed % 2**32)
            torch.manual_seed(train.seed)

    def _use_threads(self) -> None:
        """Set the number of threads of the dense model, on which the last bits of its results may depend."""
        self._torch.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(self.config.train.threads)

    def _labelled(self, source: Paths | None) -> Part:
        if source is not None:
            files = open_given(self.config, source, labelled_columns(self.config), self._types())
            if self.folder is not None:
                warn_of_trained(self.folder, files)
            return Part(files, None, "test", self.config.origin)
        training = self._training  # its parts may be those of files that were passed to fit()
        parts = Parts(self.config) if training is None else training.parts
        part = parts.test or parts.valid
        if part is None:
            raise UsageError(
                "Trainer.evaluate: the configuration has no test set and no validation set",
                hint="specify files with labels: persia eval RUN FILE, or evaluate(FILE)",
            )
        if training is None and part.split is not None and self.folder is not None:
            check_files(self.folder, part.files)
        return part

    def _rows(self, part: Part, transform: Transform) -> Iterator[Rows]:
        train = self.config.train
        group = group_of(self.config)
        return read_rows(part, transform, self.config.data.batch_size, weight=train.weight, group=group)

    @contextlib.contextmanager
    def _evaluating(self) -> "Iterator[tuple[EmbeddingCtx, Objective, Transform, int]]":
        """Enclose an evaluation of the model that is being trained, or of the run's checkpoint."""
        training = self._training
        if training is not None and training.is_open:
            with eval_ctx(model=training.model) as ctx:
                yield ctx, training.objective, training.transform, training.step
            return
        if self._loaded is None:
            if training is not None:
                self._resumes = find_checkpoint(training.folder.path)
            if self._resumes is not None and not isinstance(self._resumes, Found):
                find_checkpoint(self._resumes.path)  # raises an error, because the run has no checkpoint
            if not isinstance(self._resumes, Found):
                raise UsageError("nothing is trained yet: call fit(), or resume() with a run that has a checkpoint")
            self._use_threads()
            self._loaded = _Loaded(self.config, self._given_model, self._resumes)
        loaded = self._loaded
        with eval_ctx(model=loaded.model) as ctx:
            yield ctx, loaded.objective, loaded.transform, loaded.step

    def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()


class _Loaded:
    """The model of a checkpoint, for evaluation only."""

    def __init__(self, config: Config, model: torch.nn.Module | None, found: Found) -> None:
        if model is None and found.folder.read_json(FACTS).get("model_given_by_script"):
            raise UsageError(
                f"{found.folder.shown}: the model of this run was passed by a script, and is not in its persia.yml",
                hint=f"use the run in a script: Trainer(config, model).resume({found.folder.shown!r})",
            )
        check_same(found.folder.shown, found.folder.config(), config)
        self.transform = fitting.load(config, found.folder.path)
        self.objective = Objective(config.compiled.labels)
        self.model = models.build(config) if model is None else model
        self.step = found.step
        self._ctx = eval_ctx(model=self.model, configuration=models.slots_of(config))
        self._ctx.__enter__()
        try:
            self._ctx.load_checkpoint(found.checkpoint.absolute())
        except BaseException:
            self._ctx.__exit__(*sys.exc_info())
            raise

    def close(self) -> None:
        """Free the rows."""
        self._ctx.__exit__(None, None, None)


def _check_one_process(folder: RunFolder) -> None:
    """Check that a run was trained in one process.

    Raises:
        UsageError: Ranks of a job have trained it, so its rows are on servers.
    """
    if of_job(folder.path):
        name, run = shlex.quote(folder.path.name), shlex.quote(folder.shown)
        raise UsageError(
            f"{folder.shown}: the run was trained by the ranks of a job; one process cannot continue it",
            hint=f"continue it as it was started: persia up persia.yml --name {name}, or persia train persia.yml "
            f"--nproc N --resume {run}; to use its model: persia eval {run}, persia predict or persia export",
        )
