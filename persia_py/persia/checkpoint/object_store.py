"""Replicas of checkpoints in an object store: S3 and compatible stores, and others that ``obstore`` supports.

A checkpoint is written to the folder that ranks and servers share, and uploaded from there. The manifest is uploaded
last, so a replica with a manifest is complete. Objects are never renamed.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from persia.runtime import job
from persia.runtime.errors import CheckpointError, ConfigError, PersiaError, StorageError
from persia.runtime.files import is_url
from persia.runtime.job import MANIFEST
from persia_core import checkpoint as _core

PART_BYTES = 16 << 20
"""The size of one part of an upload; S3 accepts up to 10,000 parts per file."""

PARTS_AT_A_TIME = 2
"""The number of parts of a file that are transferred concurrently."""

FILES_AT_A_TIME = 8
"""The number of files that are transferred concurrently."""

RETRY_S = 60
"""Seconds for which a request is retried if the server cannot be reached, or cannot answer."""


@dataclass(frozen=True)
class Replica:
    """A complete checkpoint in an object store, as its manifest describes it.

    Attributes:
        name: Its name below the URL.
        age: Generation and step of its cut: the larger, the newer.
        rows: The number of rows of all tables.
        size: Bytes of all files.
        created_at: When it was saved.
    """

    name: str
    age: tuple[int, int]
    rows: int
    size: int
    created_at: str


class ObjectStore:
    """The checkpoints below a URL, each under its own name.

    Args:
        url: Such as ``s3://bucket/prefix``. Credentials, region and endpoint come from the variables that Amazon's
            tools read (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``); an
            endpoint that begins with ``http://`` is used without TLS.

    Raises:
        ConfigError: It is not the URL of an object store.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if not is_url(url):
            raise ConfigError(f"{url!r}: want a URL such as s3://bucket/prefix")
        self._store  # noqa: B018  # refuses other URLs

    @cached_property
    def _store(self) -> Any:
        from obstore import exceptions
        from obstore.store import from_url

        options: dict[str, Any] = {}
        if self.url.startswith(("s3://", "s3a://")):  # other stores have no client options
            options["client_options"] = {"allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")}
            options["retry_config"] = {"retry_timeout": timedelta(seconds=RETRY_S)}
        try:
            return from_url(self.url, **options)
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"{self.url}: {_message(error)}; want a URL such as s3://bucket/prefix") from error

    def put(self, directory: Path, name: str) -> None:
        """Upload the checkpoint in ``directory``; an existing one of that name is deleted first.

        Raises:
            CheckpointError: There is no checkpoint.
            StorageError: It cannot be uploaded; the next upload of that name, or :meth:`prune`, deletes the remains.
        """
        import obstore

        opened = _core.Checkpoint(os.fspath(directory))
        with self._reporting(f"{name}: not uploaded from {directory}"):
            manifest = (directory / MANIFEST).read_bytes()
            held = self._read(f"{name}/{MANIFEST}")
            if held == manifest:
                return
            if held is not None:
                obstore.delete(self._store, f"{name}/{MANIFEST}")
            paths = [Path(opened.path_of(file["name"])) for file in opened.files]
            _all(lambda path: self._put(f"{name}/{path.name}", path), paths)
            obstore.put(self._store, f"{name}/{MANIFEST}", manifest)

    def _put(self, key: str, path: Path) -> None:
        import obstore

        obstore.put(self._store, key, path, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_A_TIME)

    def get(self, name: str, directory: Path) -> None:
        """Fetch and verify the checkpoint ``name`` into ``directory``, which must not exist; a failure leaves nothing.

        Raises:
            CheckpointError: There is none of that name, or it is damaged; the message names the file.
            StorageError: It cannot be fetched.
        """
        what = f"{name}: not fetched to {directory}"
        if directory.exists():
            raise StorageError(f"{self.url}/{what}: it exists already")
        with self._reporting(what):
            directory.parent.mkdir(parents=True, exist_ok=True)
            # The folder is one level deeper, so that its remains do not count as a checkpoint if this process is
            # killed.
            with tempfile.TemporaryDirectory(prefix=".copying-", dir=directory.parent) as unfinished:
                self._get(name, Path(unfinished, directory.name))
                Path(unfinished, directory.name).rename(directory)
            _sync(directory.parent)

    def _get(self, name: str, directory: Path) -> None:
        manifest = self._read(f"{name}/{MANIFEST}")
        if manifest is None:
            raise CheckpointError(f"{self.url}/{name}: no checkpoint: it has no {MANIFEST}")
        directory.mkdir()
        (directory / MANIFEST).write_bytes(manifest)
        try:
            opened = _core.Checkpoint(os.fspath(directory))
            paths = [directory / file["name"] for file in opened.files]
            _all(lambda path: self._get_file(f"{name}/{path.name}", path), paths)
            opened.verify()
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(os.fspath(directory), f"{self.url}/{name}")) from error
        _sync(directory / MANIFEST)
        _sync(directory)

    def _get_file(self, key: str, path: Path) -> None:
        import obstore

        try:
            content = obstore.get(self._store, key)
        except FileNotFoundError:
            return  # the verification reports missing files
        with path.open("wb") as into:
            for piece in content.stream(min_chunk_size=PART_BYTES):
                into.write(piece)
            into.flush()
            os.fsync(into.fileno())

    def whole(self) -> list[Replica]:
        """Return the replicas that have a manifest, the newest first.

        Raises:
            CheckpointError: The manifest of one is damaged.
            StorageError: They cannot be listed.
        """
        found: list[Replica] = []
        with self._reporting("not listed"), tempfile.TemporaryDirectory() as folder:
            for name in self._names():
                manifest = self._read(f"{name}/{MANIFEST}")
                if manifest is not None:
                    Path(folder, MANIFEST).write_bytes(manifest)
                    found.append(self._describe(name, folder))
        return sorted(found, key=lambda one: one.age, reverse=True)

    def _describe(self, name: str, folder: str) -> Replica:
        try:
            opened = _core.Checkpoint(folder)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(folder, f"{self.url}/{name}")) from error
        head = json.loads(opened.manifest)["head"]
        size = sum(file["bytes"] for file in opened.files)
        return Replica(name, (opened.generation, opened.step), sum(head["rows"].values()), size, head["created_at"])

    def prune(self, keep_last: int) -> list[str]:
        """Delete all but the newest replicas, and the remains of failed uploads of earlier checkpoints.

        Returns:
            The names of the deleted replicas.

        Raises:
            CheckpointError: A manifest is damaged, so that the newest replicas are unknown.
            StorageError: They cannot be listed or deleted.
        """
        whole = self.whole()
        old = [each.name for each in whole[keep_last:]]
        with self._reporting("older replicas are not deleted"):
            for name in old:
                self._delete(name)
            steps = [step for each in whole[:keep_last] if (step := _step(each.name)) is not None]
            for name in set(self._names()) - {each.name for each in whole}:
                if steps and (step := _step(name)) is not None and step < min(steps):
                    self._delete(name)
        return old

    def _delete(self, name: str) -> None:
        """The manifest first: a folder with a manifest counts as complete."""
        import obstore

        obstore.delete(self._store, f"{name}/{MANIFEST}")
        obstore.delete(self._store, [each["path"] for each in obstore.list(self._store, f"{name}/").collect()])

    def interrupted_run(self, of: str) -> str | None:
        """Return the newest run of job ``of`` with a replica below the URL that is not finished, if any.

        Raises:
            StorageError: The runs cannot be listed.
        """
        with self._reporting("runs are not listed"):
            for name in sorted((name for name in self._names() if job.is_run_of(name, of)), reverse=True):
                run = ObjectStore(f"{self.url}/{name}")
                if run.whole():
                    return name if run._read(job.FINISHED) is None else None
        return None

    def finish_run(self) -> None:
        """Mark the run whose replicas are below the URL as finished.

        Raises:
            StorageError: The mark cannot be written.
        """
        import obstore

        with self._reporting("not marked as finished"):
            obstore.put(self._store, job.FINISHED, b"")

    def _names(self) -> list[str]:
        import obstore

        return [Path(prefix).name for prefix in obstore.list_with_delimiter(self._store)["common_prefixes"]]

    def _read(self, key: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(self._store, key).bytes())
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Convert an error of the store to one that names the place and the failed operation."""
        from obstore import exceptions

        try:
            yield
        except PersiaError:
            raise
        except exceptions.BaseError as error:
            hint = ""
            if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
                hint = "; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they allow"
            raise StorageError(f"{self.url}/{what}: {_message(error)}{hint}") from error
        except OSError as error:
            raise StorageError(f"{self.url}/{what}: {_message(error)}") from error


def copy(source: str, destination: str) -> None:
    """Copy a checkpoint from a folder to an object store or back: one argument is the URL of the replica.

    Raises:
        ConfigError: Neither argument is a URL, or both are.
        CheckpointError: There is no checkpoint, or it is damaged; the message names the file.
        StorageError: It cannot be copied.
    """
    if is_url(source) == is_url(destination):
        raise ConfigError(f"copy {source} {destination}: want one folder and one URL such as s3://bucket/run/step-100")
    url, folder = (source, destination) if is_url(source) else (destination, source)
    place, _, name = url.rstrip("/").rpartition("/")
    if not name or place.endswith("/"):
        raise ConfigError(f"{url}: want the name of the checkpoint too, such as s3://bucket/run/step-100")
    if is_url(source):
        ObjectStore(place).get(name, Path(folder))
    else:
        _core.Checkpoint(folder).verify()
        ObjectStore(place).put(Path(folder), name)


def _all(work: Callable[[Path], None], paths: list[Path]) -> None:
    """Call ``work`` for every file, several at a time; the first error is raised after all have ended."""
    with ThreadPoolExecutor(FILES_AT_A_TIME) as threads:
        waiting = [threads.submit(work, path) for path in paths]
        try:
            for each in waiting:
                each.result()
        finally:
            threads.shutdown(cancel_futures=True)


def _step(name: str) -> int | None:
    found = re.fullmatch("step-([0-9]+)", name)
    return int(found[1]) if found else None


def _message(error: BaseException) -> str:
    """Return a library's message without its debug output."""
    return str(error).split("\n\nDebug source:", 1)[0].replace("\n", " ").strip()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
