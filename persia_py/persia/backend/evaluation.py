"""Counts the ids of an evaluation that have no row, and warns if predictions cannot depend on ids."""

import logging
from dataclasses import dataclass, field

from persia.backend.base import Backend
from persia.backend.serving import ServingBackend
from persia.embedding.listed import listed
from persia.runtime.errors import StaleGenerationError
from persia.runtime.logging import get_logger
from persia_core.data import Batch
from persia_core.forward import TrainingBatch

_logger = get_logger("evaluation")

_MANY = 0.5
"""The share of ids without a row, per slot, above which an evaluation logs a warning."""
_ENOUGH = 100
"""The minimum number of ids of a slot for a warning before the evaluation has ended."""
_SHOWN = 10
"""The maximum number of slots that a log line names."""


@dataclass
class EvaluationReport:
    """The ids that an evaluation looked up. An id counts once in each batch that contains it.

    Attributes:
        batches: The number of batches.
        ids: The number of ids.
        missing: The number of ids without a row. Their vectors are zeros.
        slots: For each slot, the number of ids and the number of ids without a row. They are counted in the batches 1,
            2, 4, 8, … from the first batch with an id without a row on.
        sampled: The number of batches that are counted in ``slots``.
    """

    batches: int = 0
    ids: int = 0
    missing: int = 0
    slots: dict[str, tuple[int, int]] = field(default_factory=dict)
    sampled: int = 0

    @property
    def missing_share(self) -> float:
        """The share of ids without a row, from 0 to 1."""
        return self.missing / self.ids if self.ids else 0.0

    @property
    def slot_shares(self) -> dict[str, float]:
        """For each slot that had ids, the share of its ids without a row, from 0 to 1; the largest share first."""
        shares = {slot: missing / ids for slot, (ids, missing) in self.slots.items() if ids}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


class Evaluation:
    """Counts the ids without a row, one evaluation at a time; :meth:`end` ends the current one.

    It logs at most one warning about each slot, and at most one about empty tables.

    Args:
        backend: The access to the rows.
        load: The call that loads rows in this process, for messages.
    """

    def __init__(self, backend: Backend, load: str) -> None:
        self.report = EvaluationReport()
        self._backend = backend
        self._load = load
        self._warned_slots: set[str] = set()
        self._warned_empty = False
        self._asked_rows = False
        self._ended = 0
        self._is_open = True

    def add(self, batch: Batch, looked: TrainingBatch) -> None:
        """Count a batch that was looked up; warn as soon as most ids of a slot have no row."""
        if not self._is_open:
            self.report, self._is_open, self._asked_rows = EvaluationReport(), True, False
        report = self.report
        ids, missing = looked.missing()
        report.batches += 1
        report.ids += ids
        report.missing += missing
        if report.missing and report.batches & (report.batches - 1) == 0:
            self._count_slots(batch)
        if missing and missing == ids and not self._asked_rows:
            self._asked_rows = True  # once per evaluation, because the next line queries the servers
            self._warned_empty = self._warned_empty or self._warn_if_empty(batch)
        self._warn(_ENOUGH)

    def _warn_if_empty(self, batch: Batch) -> bool:
        empty = sum(self._backend.engine.server_rows()) == 0
        if empty:
            self._warned_slots.update(batch.slots)
            if isinstance(self._backend, ServingBackend):
                step = f"Restart the servers with a checkpoint that has rows: {self._load}"
            else:
                step = f"Load rows first: {self._load}; on servers, train or load rows in the training script"
            _logger.warning(
                "evaluation: the tables are empty (0 rows), so every id reads as zeros and predictions do not "
                "depend on ids. %s",
                step,
            )
        return empty

    def _count_slots(self, batch: Batch) -> None:
        try:
            counts = self._backend.engine.missing(batch)
        except StaleGenerationError:  # a training loop has begun a new generation since the look-up
            return
        slots = self.report.slots
        self.report.sampled += 1
        for slot, (ids, missing) in zip(batch.slots, counts, strict=True):
            before, missing_before = slots.get(slot, (0, 0))
            slots[slot] = (before + ids, missing_before + missing)

    def end(self) -> None:
        """Log the report. The report remains readable until the next batch starts another report."""
        report = self.report
        if not self._is_open or not report.batches:
            return
        self._is_open = False
        self._warn(1)
        by_slot = [f"{slot} {share:.1%}" for slot, share in report.slot_shares.items() if share]
        _logger.log(
            logging.DEBUG if self._ended and report.batches == 1 else logging.INFO,  # a script may do so in each step
            "evaluation: batches: %d, ids: %d, ids without a row, which read as zeros: %.1f %%%s",
            report.batches,
            report.ids,
            100 * report.missing_share,
            f" (by slot, counted in {report.sampled} of the batches: {listed(by_slot, _SHOWN)})" if by_slot else "",
        )
        self._ended += 1

    def rows_change(self) -> None:
        """End the evaluation, because other rows are loaded. Later evaluations may log the same warnings again."""
        self.end()
        self._warned_slots, self._warned_empty = set(), False

    def _warn(self, least: int) -> None:
        most = {
            slot: f"{missing} of {ids} ids of slot {slot!r}"
            for slot, (ids, missing) in self.report.slots.items()
            if ids >= least and missing > _MANY * ids and slot not in self._warned_slots
        }
        if most:
            self._warned_slots.update(most)
            others = len(most) - _SHOWN
            shown = [*most.values()][:_SHOWN]
            shown += [f"most ids of {others} more {'slot' if others == 1 else 'slots'}"] if others > 0 else []
            _logger.warning(
                "evaluation: %s have no row and read as zeros. Check that ids are computed as in training (hash, type, "
                "order of columns), and that the rows are from the checkpoint of this model. To load other rows: %s",
                "; ".join(shown),
                self._load,
            )
