"""The archive of a dump: redacted texts, a manifest, and limits on their sizes."""

import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from persia.doctor.dump.redact import Redactor
from persia.runtime.errors import StorageError, UsageError

MANIFEST, SUMMARY = "MANIFEST.json", "SUMMARY.md"
MOST = 18 << 20
"""The maximum total size of all texts before compression, in bytes."""
_RESERVED = 1 << 20
"""The part of the total size that is reserved for the summary and the manifest, in bytes."""
FILE = 1 << 20
"""The maximum size of one text, in bytes; of a longer text only the end is kept."""
_LEAST = 4 << 10
"""The minimum space that is worth using for a text, in bytes."""
MARGIN = 64 << 10
"""The number of characters before the kept end of a text that are searched for the start of a multi-line secret."""


T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A file of the archive.

    Attributes:
        content: The redacted content.
        redactions: The number of secrets that were replaced.
        cut: The number of bytes that were removed at its start.
    """

    content: bytes
    redactions: int
    cut: int = 0


class Archive:
    """Collects files for an archive. If a source fails, the manifest notes the failure, and collection continues.

    Args:
        redactor: Replaces secrets before anything is stored.

    Attributes:
        entries: The files by name.
        skipped: The entries that are not in the archive, and why.
    """

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self.entries: dict[str, Entry] = {}
        self.skipped: dict[str, str] = {}

    @property
    def size(self) -> int:
        """The size of all files, in bytes."""
        return sum(len(entry.content) for entry in self.entries.values())

    def collect(self, name: str, source: Callable[[], str | None], *, strict: bool = False) -> str:
        """Add the text of a source, and return it redacted; empty if the source fails or has no text.

        Args:
            name: The name of the file.
            source: Returns the text; None if it has no text.
            strict: Whether the text is a configuration, see :meth:`Redactor.text`.
        """

        def added() -> str:
            text = source()
            if text is None:
                self.skip(name, "there is none")
                return ""
            return self.add(name, text, strict=strict)

        return self.attempt(name, added, "")

    def attempt(self, name: str, source: Callable[[], T], otherwise: T) -> T:
        """Return the result of a source; if it fails, note this in the manifest.

        Args:
            name: The name of the entry that is then missing in the archive.
            source: The function to call.
            otherwise: The result if the source fails.
        """
        try:
            return source()
        except Exception as error:  # any error, because parts of a broken job may fail in any way
            self.skip(name, f"{type(error).__name__}: {error}")
            return otherwise

    def add(self, name: str, text: str, *, strict: bool = False) -> str:
        """Add a text, and return it redacted. A large text loses its start; a full archive skips the text."""
        room = min(FILE, MOST - (0 if name in (SUMMARY, MANIFEST) else _RESERVED) - self.size)
        if room < _LEAST:
            self.skip(name, f"the archive is full: it has at most {MOST >> 20} MiB")
            return ""
        before = self.redactor.count
        dropped = max(0, len(text) - FILE - MARGIN)
        whole = self.redactor.text(text[dropped:], strict=strict).encode(errors="replace")
        kept = whole[-room:]
        if dropped or len(kept) < len(whole):  # continue at the start of a line
            kept = kept[kept.find(b"\n") + 1 :]
        cut = len(text[:dropped].encode(errors="replace")) + len(whole) - len(kept)
        self.entries[name] = Entry(kept, self.redactor.count - before, cut)
        return kept.decode(errors="replace")

    def add_raw(self, name: str, content: bytes) -> None:
        """Add a binary file unchanged, without redaction.

        Raises:
            StorageError: The file does not fit into the archive.
        """
        if self.size + len(content) > MOST - _RESERVED:
            size = f"{len(content):,} bytes"
            raise StorageError(
                f"{name} does not fit into the archive: {size}; an archive has at most {MOST >> 20} MiB",
                hint="leave out --repro",
            )
        self.entries[name] = Entry(content, 0)

    def skip(self, name: str, why: str) -> None:
        """Note that an entry is not in the archive."""
        self.skipped[name] = self.redactor.text(why).replace("\n", "; ")

    def manifest(self) -> str:
        """Return the manifest: each file with size, hash and redactions, and each skipped entry with the reason."""
        files = [
            {
                "name": name,
                "bytes": len(entry.content),
                "sha256": hashlib.sha256(entry.content).hexdigest(),
                "redactions": entry.redactions,
                **({"cut_bytes": entry.cut} if entry.cut else {}),
            }
            for name, entry in sorted(self.entries.items())
        ]
        return json.dumps({"files": files, "skipped": self.skipped}, indent=1, ensure_ascii=False) + "\n"

    def packed(self, top: str) -> bytes:
        """Return the archive as a gzipped tar file, with all files below the folder ``top``."""
        now = int(time.time())
        contents = {name: entry.content for name, entry in self.entries.items()}
        contents[MANIFEST] = self.manifest().encode()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name in sorted(contents, key=lambda each: (each != SUMMARY, each)):
                entry = tarfile.TarInfo(f"{top}/{name}")
                entry.size, entry.mode, entry.mtime = len(contents[name]), 0o600, now
                tar.addfile(entry, io.BytesIO(contents[name]))
        return packed.getvalue()


def check(path: Path) -> None:
    """Check that an archive can be written to this path, before anything is collected.

    Raises:
        UsageError: The file exists, or its folder does not.
    """
    found = "the file exists" if os.path.lexists(path) else "" if path.parent.is_dir() else "its folder does not exist"
    if found:
        raise UsageError(
            f"cannot write the archive to {path}: {found}", hint="specify another file: persia dump -o FILE"
        )


def write(path: Path, content: bytes) -> None:
    """Write an archive that only this user can read.

    Raises:
        UsageError: The file exists, or its folder does not.
        StorageError: The archive cannot be written. A partial file is removed.
    """
    check(path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write the archive to {path}: {error.strerror or error}",
        hint="specify another file, persia dump -o FILE, or write to standard output: persia dump -o - > FILE",
    )


def unpacked(content: bytes) -> dict[str, str]:
    """Return the files of an archive by name, without its top folder."""
    found: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        for entry in tar.getmembers():
            file = tar.extractfile(entry) if entry.isfile() else None
            if file is not None:
                found[entry.name.partition("/")[2]] = file.read().decode(errors="replace")
    return found
