"""The command after ``persia debug run --``: a script, or a torchrun command whose script is run."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from persia.runtime.errors import UsageError

_LAUNCHERS = {"torch.distributed.run", "torch.distributed.launch"}


@dataclass(frozen=True)
class Script:
    """A script and its ranks.

    Attributes:
        words: ``FILE ARGUMENTS...`` or ``-m MODULE ARGUMENTS...``.
        ranks: The number of ranks on this host.
        node: The index of this host.
        nodes: The number of hosts.
        master: The host of rank 0; empty means this host.
        port: The port of torch's store on that host; 0 means a free port.
    """

    words: list[str]
    ranks: int
    node: int = 0
    nodes: int = 1
    master: str = ""
    port: int = 0


def script_of(words: Sequence[str], *, rank: int, ranks: int | None) -> Script:
    """Return the script in a command.

    Args:
        words: ``FILE ...`` or ``-m MODULE ...``, optionally after ``python``, ``torchrun ...`` or ``python -m
            torch.distributed.run ...``.
        rank: The rank that is debugged.
        ranks: The number of ranks; None means the number in the torchrun command, or ``GPU_NUM``, or the smallest
            number with which ``rank`` exists.

    Raises:
        UsageError: The command has no script, or an option of torchrun is not supported.
    """
    left = list(words)
    if left and re.fullmatch(r"python(\d(\.\d+)?)?", Path(left[0]).name):
        left = left[2:] if left[1:2] == ["-u"] else left[1:]
    if left and Path(left[0]).name == "torchrun":
        return _of_torchrun(left[1:], ranks)
    if left[:1] == ["-m"] and left[1:2] and left[1] in _LAUNCHERS:
        return _of_torchrun(left[2:], ranks)
    if left[:1] == ["-m"]:
        if len(left) == 1:
            raise UsageError("-m: the name of the module is missing")
    elif not left or not Path(left[0]).is_file():
        if not left:
            raise UsageError(
                "no script in the command" + (f": {shlex.join(words)}" if words else ""),
                hint="specify the script after --, such as: -- train.py ARGUMENTS",
            )
        raise UsageError(
            f"{left[0]}: no such file (working directory: {Path.cwd()})",
            hint="correct the path of the script after --, such as: -- train.py ARGUMENTS",
        )
    count = _gpus() or max(rank, 0) + 1 if ranks is None else ranks
    if count < 1:
        raise UsageError(f"--nproc {count}: must be at least 1")
    return Script(left, count)


def _gpus() -> int:
    text = os.environ.get("GPU_NUM", "").strip()
    return int(text) if text.isdecimal() else 0


def _of_torchrun(words: Sequence[str], ranks: int | None) -> Script:
    """Return the script and the ranks that torchrun would start."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(list(words))
    if options.no_python:
        raise UsageError("torchrun --no-python: expected a Python script, which a debugger can stop")
    if ranks is None and not str(options.nproc_per_node).isdecimal():
        raise UsageError(
            f"torchrun --nproc-per-node {options.nproc_per_node}: expected a number",
            hint="specify the number of ranks before --, such as: --nproc 2 -- torchrun train.py",
        )
    nodes = str(options.nnodes).partition(":")[0]
    count = int(options.nproc_per_node) if ranks is None else ranks
    own = ["-m"] if options.module else []
    alone = nodes == "1"
    return Script(
        [*own, options.training_script, *options.training_script_args],
        count,
        int(options.node_rank),
        int(nodes),
        "" if alone else str(options.master_addr),
        0 if alone else int(options.master_port),
    )
