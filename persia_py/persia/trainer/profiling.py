"""The profile of a run that has the block ``profile``."""

import contextlib
import sys
from pathlib import Path

from persia.config import Config
from persia.ctx import TrainCtx
from persia.profile import profiler, report
from persia.runtime.settings import settings
from persia.trainer.run_folder import RunFolder


def profiler_of(
    config: Config, folder: RunFolder, ctx: TrainCtx
) -> contextlib.AbstractContextManager[profiler.Profiler | None]:
    """Return the recorder of the training loop; None without the block ``profile``."""
    block, train = config.profile, config.train
    if block is None:
        return contextlib.nullcontext()
    reproducible = train.reproducible or settings.reproducible
    facts = {
        "staleness": 1 if reproducible else train.staleness,
        "reproducible": reproducible,
        "threads": train.threads,
        "step_rows": config.step_rows,
    }
    schedule = profiler.Schedule(block.wait, block.warmup, block.active, block.stack, block.memory)
    return profiler.Profiler(folder.path / profiler.FOLDER, ctx, schedule, facts=facts)


def profile_of(folder: Path) -> int | None:
    """Return the modification time of a run's profile, in ns; None if there is none."""
    try:
        return (folder / profiler.FOLDER / "rank-0.json").stat().st_mtime_ns
    except OSError:
        return None


def show_profile(folder: RunFolder) -> None:
    """Show the times of the recorded steps, the bottleneck, and the path of the trace.

    If no step was recorded, show nothing.
    """
    place = folder.path / profiler.FOLDER
    if not (place / "rank-0.json").exists():
        return
    profiles = report.read(place)
    report.show_steps(profiles)
    report.show_report(profiles)
    sys.stdout.write(f"trace: {folder.shown}/{profiler.FOLDER}/rank-0.pt.trace.json\n")
