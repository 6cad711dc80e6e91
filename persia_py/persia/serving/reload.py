"""Serves a newer bundle when it appears, without refusing a request.

The path is checked every second, and immediately after SIGHUP. A newer bundle is loaded and verified while the current
bundle is served, and replaces it between two batches. If the newer bundle cannot be loaded, the current one is kept.
Loading is retried later, because the files may still be being copied.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persia.runtime.errors import CheckpointError
from persia.runtime.logging import get_logger, next_step
from persia.serving.batching import Batcher
from persia.serving.location import Found, find
from persia.serving.metrics import Metrics

_logger = get_logger("serving")

LOOK_S = 1.0
"""Seconds between two checks of the path."""
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
"""The maximum number of seconds until loading a failed bundle is retried; the delay doubles each time."""


class Reloader:
    """Checks the path of the bundle, and replaces the model of a batcher.

    Attributes:
        model: The served model.
    """

    def __init__(
        self,
        path: Path,
        served: tuple[Found, Any],
        load: Callable[[Path], Any],
        batcher: Batcher,
        metrics: Metrics,
        *,
        look_s: float = LOOK_S,
    ) -> None:
        """Watch a path.

        Args:
            path: The path to pass to :func:`persia.serving.location.find`.
            served: The bundle at the path at the start, and the model loaded from it.
            load: Loads and checks a bundle; runs in a thread.
            batcher: The batcher, which scores with the model.
            metrics: The metrics, which count reloads.
            look_s: Seconds between two checks.
        """
        self._path = path
        self._found, self.model = served
        self._load = load
        self._batcher = batcher
        self._metrics = metrics
        self._look_s = look_s
        self._asked = asyncio.Event()
        self._failed: Found | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._again_at = 0.0
        metrics.serves(self.model.identity, self.model.exported_at)

    def ask(self) -> None:
        """Check for a newer bundle now, and retry one that could not be loaded."""
        self._again_at = 0.0
        self._failed = None
        self._asked.set()

    async def run(self) -> None:
        """Check repeatedly until the task is canceled."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._look_s)
            asked = self._asked.is_set()
            self._asked.clear()
            await self._look(asked)

    async def _look(self, asked: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(None, find, self._path)
        except CheckpointError as error:
            if asked:
                _logger.warning("%s; still serving %s%s", error, self.model.identity, next_step(error))
            return
        if found == self._found:
            if asked:
                _logger.info("%s is already served", found.path)
            return
        if found == self._failed and loop.time() < self._again_at:
            return
        await self._replace(found)

    async def _replace(self, found: Found) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            model = await loop.run_in_executor(None, self._load, found.path)
        except Exception as error:
            self._pause_s = _FIRST_PAUSE_S if found != self._failed else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._failed, self._again_at = found, loop.time() + self._pause_s
            self._metrics.reloads.labels("failed").inc()
            _logger.error(
                "%s cannot be served: %s; still serving %s, retrying in %g s%s",
                found.path, error, self.model.identity, self._pause_s, next_step(error),
            )  # fmt: skip
            return
        before = await asyncio.wrap_future(self._batcher.switch(model))
        self._found, self.model, self._failed = found, model, None
        self._metrics.serves(model.identity, model.exported_at)
        self._metrics.reloads.labels("ok").inc()
        _logger.info("serving %s, bundle %s, loaded in %.2f s", found.path, model.identity, loop.time() - began)
        before.close()
