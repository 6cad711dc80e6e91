"""``SUMMARY.md``: the text of a report, written from the facts of a dump."""

from collections.abc import Iterator

from persia.doctor.dump.archive import MANIFEST, Archive
from persia.doctor.dump.facts import Facts

_PROBLEMS = 12
_SKIPPED = 8


def text(archive: Archive, facts: Facts) -> str:
    """Return the summary in Markdown."""
    return "\n".join(_lines(archive, facts)) + "\n"


def _lines(archive: Archive, facts: Facts) -> Iterator[str]:
    yield f"# Persia: {facts.subject}"
    yield ""
    yield "<!-- Describe the problem here: what was done, what was expected, what happened, since when. -->"
    yield ""
    yield "## What is known"
    yield ""
    yield f"* Status: {facts.status or 'not known'}"
    yield f"* Newest checkpoint: {facts.newest or 'none was found'}"
    for line in facts.failed.lines():
        yield f"* {line}"
    yield from _block("How processes have ended", facts.ends)
    yield from _block("The last warnings and errors", facts.errors)
    problems = [
        f"{check.status} {check.name}: {check.found.splitlines()[0] if check.found else ''}"
        + (f" ({check.why.splitlines()[0]})" if check.why else "")
        for check in facts.problems
    ]
    yield from _block("What persia doctor finds", problems[:_PROBLEMS])
    yield from _block("Versions", [f"{name}  {value}" for name, value in facts.versions])
    yield ""
    yield "## The archive"
    yield ""
    redacted = sum(entry.redactions for entry in archive.entries.values())
    yield f"{len(archive.entries)} files, {archive.size:,} bytes. Replaced secrets: {redacted}, see {MANIFEST}."
    yield "Logs, configuration and paths may contain personal data: read them before the archive is published."
    if archive.skipped:
        yield ""
        yield "Not in it:"
        yield ""
        for name, why in [*archive.skipped.items()][:_SKIPPED]:
            yield f"* {name}: {why}"
        if len(archive.skipped) > _SKIPPED:
            yield f"* {len(archive.skipped) - _SKIPPED} more, see {MANIFEST}"


def _block(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"## {title}"
        yield ""
        yield "```"
        yield from lines
        yield "```"
