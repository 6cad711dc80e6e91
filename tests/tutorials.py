"""Run a page of the documentation as a reader would: its blocks in order, in an empty folder.

* A block whose first line is a comment with a file name, such as ``# train.py``, is that file.
* Another ``python`` block is a script, and an ``sh`` block is a script of bash. A script must exit with 0.
* A block without a language is the standard output of the script before it. ``…`` matches any characters of a line, and
  a line of ``…`` alone matches any lines. For example, ``AUC 0.81…`` allows 0.81 to 0.82.

A block that cannot be run is an error: another language, an output without a script, or a file that no script names.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FENCE = re.compile(r"^( *)```(.*)$")
NAMED = re.compile(r"# ([\w./-]+\.(?:py|ya?ml))(?:, .*)?\n")
TIMEOUT_S = 200


class PageError(AssertionError):
    """The blocks of a page do not work as the page describes."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its place in the page, its language, and its text."""

    place: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file, if the block is a file."""
        named = NAMED.match(self.text)
        return named[1] if named and self.language in {"python", "yaml"} else None

    @property
    def command(self) -> list[str] | None:
        """The command that runs the block, if the block is a script."""
        if self.file is not None:
            return None
        commands = {"python": [sys.executable, "-c"], "sh": ["bash", "-eu", "-o", "pipefail", "-c"]}
        return [*commands[self.language], self.text] if self.language in commands else None


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page.

    Raises:
        PageError: A block is not closed.
    """
    start, language, lines = 0, "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if start and fence and not fence[2]:
            yield Block(f"{page.name}:{start}", language, textwrap.dedent("".join(lines)))
            start, lines = 0, []
        elif start:
            lines.append(f"{line}\n")
        elif fence:
            start, language = number, fence[2].strip()
    if start:
        raise PageError(f"{page.name}:{start}: the block is not closed")


def run_page(page: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Run all blocks of a page in a folder.

    Raises:
        PageError: A block fails, its output differs from the documented one, or it cannot be run.
    """
    found = [*blocks(page)]
    if not any(block.command for block in found):
        raise PageError(f"{page.name}: no block that can be run")
    try:
        _run_blocks(page, found, folder, environment)
    finally:
        for process in psutil.process_iter():  # ends a server that a page has started in the background
            with contextlib.suppress(psutil.Error):
                if Path(process.cwd()) == folder:
                    process.kill()


def _run_blocks(page: Path, found: list[Block], folder: Path, environment: Mapping[str, str]) -> None:
    """Run the blocks of a page."""
    output = None
    for index, block in enumerate(found):
        if block.file is not None:
            rest = "".join(later.text for later in found[index + 1 :] if later.language in {"python", "sh"})
            if Path(block.file).stem not in rest:
                raise PageError(f"{block.place}: no block after it uses {block.file}")
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.command is not None:
            output = run(block, folder, environment)
        elif block.language or output is None:
            raise PageError(f"{block.place}: {block.language or 'an output'}: not a script, a file or its output")
        elif not matches(block.text, output):
            raise PageError(f"{block.place}: the page shows\n{block.text}\nthe script prints\n{output}")
        else:
            output = None


def run(block: Block, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a script and return its standard output.

    Raises:
        PageError: The script fails.
    """
    settings = {**environment, "COLUMNS": "120"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(block.command or [], cwd=folder, env=settings, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise PageError(f"{block.place}: exit code {process.returncode}\n{block.text}\n{output}\n{errors[-5000:]}")
    return str(output)


def matches(shown: str, printed: str) -> bool:
    """Whether an output equals the documented one, apart from trailing spaces."""
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line).replace("…", ".*?") + r"\n" for line in lines
    )
    text = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None
