"""The location of checkpoints: a folder, or a URL such as ``s3://bucket/prefix``."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from persia.runtime.errors import UsageError
from persia.runtime.files import is_url, shown_url
from persia.runtime.settings import variable


@dataclass(frozen=True)
class Url(os.PathLike[str]):
    """A URL of an object store, with those operations of a path that do not access the store.

    ``pathlib`` would merge the two slashes after the scheme into one.

    Attributes:
        text: The URL, without a trailing slash.
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.rstrip("/"))

    def __truediv__(self, name: str) -> "Url":
        """Return the URL of ``name`` below this URL."""
        return Url(f"{self.text}/{name}")

    def __fspath__(self) -> str:
        """Return the URL, for functions of ``persia_core``."""
        return self.text

    def __str__(self) -> str:
        """Return the URL."""
        return self.text

    def absolute(self) -> "Url":
        """Return this URL."""
        return self

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the URL between slashes."""
        return tuple(self.text.split("/"))

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        """The URL above this URL."""
        return Url(self.text.rpartition("/")[0])


Place: TypeAlias = Path | Url
"""A folder, or a URL."""


SCHEMES = ("s3", "s3a")
"""The schemes of object stores to which checkpoints can be written."""


def check_scheme(url: Url) -> None:
    """Check that checkpoints can be written to a URL.

    Raises:
        UsageError: The URL has another scheme, no bucket, or an ``@``.
    """
    scheme, _, rest = url.text.partition("://")
    bucket = rest.split("/")[0]
    if scheme in SCHEMES and bucket and "@" not in rest:
        return
    if scheme in SCHEMES and bucket:
        raise UsageError(
            f"{shown_url(url.text)} cannot hold checkpoints: its URL contains a user or password, or another @",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead, and choose a prefix without @",
        )
    raise UsageError(
        f"{shown_url(url.text)} cannot hold checkpoints: expected a folder, or s3://BUCKET/PREFIX",
        hint="for another store with the protocol of S3, set AWS_ENDPOINT_URL to its address; replicas can be in other "
        "stores: Checkpoints(FOLDER, upload_to=URL)",
    )


def s3_endpoint() -> str | None:
    """Return the address of the store for ``s3://``: ``AWS_ENDPOINT_URL_S3``, else ``AWS_ENDPOINT_URL``.

    None means Amazon's.
    """
    return variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL")


def check_slashes(given: str | os.PathLike[str]) -> None:
    """Check that a path is not a URL that ``pathlib`` has changed: ``s3:/bucket/run``.

    Raises:
        UsageError: The path is such a URL; files would be written to a folder ``s3:``.
    """
    found = re.match(r"(s3a?|gs|az|abfss?|https?|hdfs|file):/(?!/)", os.fspath(given))
    if found is None:
        return
    whole = shown_url(f"{found[1]}://{os.fspath(given)[found.end() :]}")
    raise UsageError(
        f"{found[1]}:/{whole.partition('://')[2]} has one slash after the scheme; expected {whole}",
        hint=f"pathlib removes a slash of a URL: pass the URL as a string, {whole!r}",
    )


def place(given: str | os.PathLike[str]) -> Place:
    """Return the argument as a URL or a path.

    Raises:
        UsageError: As in :func:`check_slashes`.
    """
    check_slashes(given)
    return Url(os.fspath(given)) if is_url(given) else Path(given)


def below(root: str | os.PathLike[str] | None, given: str | os.PathLike[str]) -> Place:
    """Return ``given``; a relative path is taken below ``root``.

    Raises:
        UsageError: As in :func:`check_slashes`, for either argument.
    """
    check_slashes(given)
    if root is not None:
        check_slashes(root)
    if is_url(given) or root is None or Path(given).is_absolute():
        return place(given)
    if not is_url(root):
        return Path(root, given)
    name = Path(given).as_posix()
    return place(root) if name == "." else Url(os.fspath(root)) / name
