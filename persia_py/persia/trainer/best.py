"""The checkpoints with the best metric of the valid part."""

import shutil
from pathlib import Path

from persia_core import checkpoint as _core


def prune(folder: Path, best: int, saved: int) -> None:
    """Delete best checkpoints that no save of the run needs.

    A save names the best one at its step, so that a resumed run needs the newest one that is not after the newest save.
    Those after it are made again.

    Args:
        folder: The folder of the best checkpoints, ``step-N`` each.
        best: The step of the best one.
        saved: The step of the newest save of the run.
    """
    steps = {int(each.name[5:]): each for each in folder.glob("step-*") if each.name[5:].isdigit()}
    named = max((step for step in steps if step <= saved), default=None)
    for step, path in steps.items():
        if step not in (best, named):
            shutil.rmtree(path, ignore_errors=True)
    if best in steps:
        _core.publish_latest(steps[best])
