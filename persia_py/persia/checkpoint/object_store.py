"""Replicas of checkpoints in an object store: S3 and compatible stores, and others that ``obstore`` supports.

A checkpoint is written to the folder that ranks and servers share, and uploaded from this folder. The manifest is
uploaded last, so a replica with a manifest is complete. Objects are never renamed.
"""

import contextlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from persia.runtime.places import s3_endpoint
from persia_core import checkpoint as _core

PART_BYTES = 16 << 20
"""The size of one part of an upload; S3 accepts up to 10,000 parts per file."""

PARTS_AT_A_TIME = 2
"""The maximum number of parts of a file that are transferred concurrently."""

FILES_AT_A_TIME = 8
"""The maximum number of files that are transferred concurrently."""

RETRY_S = 60
"""Seconds for which a request to S3 is retried if the server cannot be reached, or cannot respond."""


@dataclass(frozen=True)
class Replica:
    """A complete checkpoint in an object store, as its manifest describes it.

    Attributes:
        name: Its name below the URL.
        age: Generation and step of its cut. A newer checkpoint has a larger value.
        rows: The number of rows of all tables.
        size: Bytes of all files.
        created_at: The time at which it was saved.
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
            tools read (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``). An
            endpoint that begins with ``http://`` is used without TLS.

    Raises:
        ConfigError: The argument is not the URL of an object store, or the environment lacks settings of the store.
    """

    def __init__(self, url: str) -> None:
        if not isinstance(url, str) or not is_url(url):
            raise ConfigError(
                f"{url!r} is not a URL, because it does not begin with a scheme and ://; expected a URL such as "
                "s3://bucket/prefix"
            )
        self.url = url.rstrip("/")
        self._store  # noqa: B018  # raises an error for other URLs

    @cached_property
    def _store(self) -> Any:
        from obstore import exceptions
        from obstore.store import from_url

        options: dict[str, Any] = {}
        if self.url.startswith(("s3://", "s3a://")):  # other stores have no client options
            endpoint = s3_endpoint()
            options["client_options"] = {"allow_http": (endpoint or "").startswith("http://")}
            options.update({} if endpoint is None else {"endpoint": endpoint})
            options["retry_config"] = {"retry_timeout": timedelta(seconds=RETRY_S)}
        try:
            return from_url(self.url, **options)
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigError(
                f"cannot use {self.url} as an object store: {_message(error)}",
                hint="use a URL such as s3://bucket/prefix, or set the environment variables that this store needs",
            ) from error

    def put(self, directory: Path, name: str, *, replace: bool = True) -> None:
        """Upload the checkpoint in ``directory``.

        Another checkpoint of that name is replaced. Its manifest is deleted first.

        Args:
            directory: The checkpoint.
            name: Its name below the URL.
            replace: Whether to replace another checkpoint of that name, such as one that the run wrote before it
                resumed.

        Raises:
            CheckpointError: The directory has no checkpoint, or another checkpoint of that name may not be replaced.
            StorageError: The checkpoint cannot be uploaded. The next upload of that name replaces its incomplete files,
                or :meth:`prune` deletes them.
        """
        import obstore

        opened = _core.Checkpoint(os.fspath(directory))
        with self._reporting(f"cannot upload {directory} to {self.url}/{name}"):
            manifest = (directory / MANIFEST).read_bytes()
            held = self._read(f"{name}/{MANIFEST}")
            if held == manifest:
                return
            if held is not None:
                if not replace:
                    what = f"{self.url}/{name} has another checkpoint, which would be deleted"
                    raise CheckpointError(f"cannot upload {directory}: {what}")
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
            CheckpointError: No checkpoint has that name, or it is damaged; the message names the file.
            StorageError: The checkpoint cannot be fetched, or ``directory`` exists.
        """
        what = f"cannot download {self.url}/{name} to {directory}"
        if directory.exists():
            raise StorageError(
                f"{what}: the destination already exists",
                hint=f"move or remove {directory}; with persia ckpt copy, you can choose another folder instead",
            )
        with self._reporting(what):
            directory.parent.mkdir(parents=True, exist_ok=True)
            # The temporary folder is one level deeper. If this process is killed, its remains therefore do not count as
            # a checkpoint.
            with tempfile.TemporaryDirectory(prefix=".copying-", dir=directory.parent) as unfinished:
                self._get(name, Path(unfinished, directory.name))
                Path(unfinished, directory.name).rename(directory)
            _sync(directory.parent)

    def _get(self, name: str, directory: Path) -> None:
        manifest = self._read(f"{name}/{MANIFEST}")
        if manifest is None:
            raise CheckpointError(f"{self.url}/{name} is not a checkpoint: it has no {MANIFEST}", hint=self._others)
        directory.mkdir()
        (directory / MANIFEST).write_bytes(manifest)
        try:
            opened = _core.Checkpoint(os.fspath(directory))
            paths = [directory / file["name"] for file in opened.files]
            staged = f"{name}/.saving-{json.loads(opened.manifest)['generation']}"
            _all(lambda path: self._get_file((f"{staged}/{path.name}", f"{name}/{path.name}"), path), paths)
            opened.verify()
        except CheckpointError as error:
            text = str(error).replace(os.fspath(directory), f"{self.url}/{name}")
            raise CheckpointError(text, hint=self._others) from error
        _sync(directory / MANIFEST)
        _sync(directory)

    @property
    def _others(self) -> str:
        """The next step after a checkpoint that does not exist or cannot be used."""
        return f"list the checkpoints there: persia ckpt list {shlex.quote(self.url)}"

    def _get_file(self, keys: Sequence[str], path: Path) -> None:
        """Fetch the first of these objects that exists. Servers and uploads write a file under different keys."""
        import obstore

        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                content = obstore.get(self._store, key)
                break
        else:
            return  # the verification reports missing files
        with path.open("wb") as into:
            for piece in content.stream(min_chunk_size=PART_BYTES):
                into.write(piece)
            into.flush()
            os.fsync(into.fileno())

    def whole(self) -> list[Replica]:
        """Return the replicas that have a manifest, the newest first.

        Raises:
            CheckpointError: The manifest of a replica is damaged.
            StorageError: The replicas cannot be listed.
        """
        found: list[Replica] = []
        for each in self.listing().values():
            if isinstance(each, CheckpointError):
                raise each
            found.append(each)
        return sorted(found, key=lambda one: one.age, reverse=True)

    def listing(self) -> dict[str, "Replica | CheckpointError"]:
        """Return the replicas that have a manifest, by name; for a damaged manifest, return the error.

        Raises:
            StorageError: The replicas cannot be listed.
        """
        found: dict[str, Replica | CheckpointError] = {}
        with self._reporting(f"cannot list the checkpoints below {self.url}"), tempfile.TemporaryDirectory() as folder:
            for name in self._names():
                manifest = self._read(f"{name}/{MANIFEST}")
                if manifest is not None:
                    Path(folder, MANIFEST).write_bytes(manifest)
                    found[name] = self._describe(name, folder)
        return found

    def _describe(self, name: str, folder: str) -> "Replica | CheckpointError":
        try:
            opened = _core.Checkpoint(folder)
        except CheckpointError as error:
            replica = f"{self.url}/{name}"
            hint = f"to leave this checkpoint out, move the objects below {replica} to another URL"
            return CheckpointError(str(error).replace(folder, replica), hint=hint)
        head = json.loads(opened.manifest)["head"]
        size = sum(file["bytes"] for file in opened.files)
        return Replica(name, (opened.generation, opened.step), sum(head["rows"].values()), size, head["created_at"])

    def prune(self, keep_last: int) -> list[str]:
        """Delete all but the newest replicas, and the remains of failed uploads of earlier checkpoints.

        Returns:
            The names of the deleted replicas.

        Raises:
            CheckpointError: A manifest is damaged, so the newest replicas are unknown.
            StorageError: The replicas cannot be listed or deleted.
        """
        whole = self.whole()
        old = [each.name for each in whole[keep_last:]]
        with self._reporting(f"cannot delete older checkpoints below {self.url}"):
            for name in old:
                self._delete(name)
            steps = [step for each in whole[:keep_last] if (step := _step(each.name)) is not None]
            for name in set(self._names()) - {each.name for each in whole}:
                if steps and (step := _step(name)) is not None and step < min(steps):
                    self._delete(name)
        return old

    def remove(self, name: str) -> None:
        """Delete everything below ``name``, such as the run of a test, manifests first.

        Raises:
            StorageError: The objects cannot be listed or deleted.
        """
        import obstore

        with self._reporting(f"cannot delete {self.url}/{name}"):
            paths = [each["path"] for each in obstore.list(self._store, f"{name}/").collect()]
            manifests = [path for path in paths if Path(path).name == MANIFEST]
            for some in (manifests, [path for path in paths if path not in manifests]):
                if some:
                    obstore.delete(self._store, some)

    def _delete(self, name: str) -> None:
        """Delete a checkpoint. Its manifest is deleted first, because a folder with a manifest counts as complete."""
        import obstore

        obstore.delete(self._store, f"{name}/{MANIFEST}")
        obstore.delete(self._store, [each["path"] for each in obstore.list(self._store, f"{name}/").collect()])

    def interrupted_run(self, of: str) -> str | None:
        """Return the newest run of job ``of`` that has a replica below the URL.

        Return None if there is no such run, or if it is finished.

        Raises:
            StorageError: The runs cannot be listed.
        """
        with self._reporting(f"cannot list the runs below {self.url}"):
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

        with self._reporting(f"cannot mark the run below {self.url} as finished"):
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
        """Convert an error of the store to one that begins with ``what``: the failed operation and its place."""
        from obstore import exceptions

        try:
            yield
        except PersiaError:
            raise
        except (exceptions.BaseError, OSError) as error:
            hint = None  # for an error of the disk; obstore's OSError for a missing object has no errno
            if isinstance(error, exceptions.BaseError) or error.errno is None:
                is_s3 = self.url.startswith(("s3://", "s3a://"))
                more = ", AWS_REGION and AWS_ENDPOINT_URL" if is_s3 else " and the credentials of the store"
                hint = f"check the URL, the network{more}"
                if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
                    keys = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" if is_s3 else "the credentials of the store"
                    hint = f"check {keys} and their permissions"
            raise StorageError(f"{what}: {_message(error)}", hint=hint) from error


def copy(source: str, destination: str, *, force: bool = False) -> None:
    """Copy a checkpoint from a folder to an object store or back: one argument is the URL of the replica.

    Args:
        source: The checkpoint.
        destination: The new checkpoint.
        force: Whether to replace another checkpoint at the URL.

    Raises:
        ConfigError: Neither argument is a URL, or both are.
        CheckpointError: There is no checkpoint, the checkpoint is damaged (the message names the file), or the URL has
            another checkpoint.
        StorageError: The checkpoint cannot be copied.
    """
    if is_url(source) == is_url(destination):
        raise ConfigError(
            f"copy {source} {destination}: expected one folder and one URL such as s3://bucket/run/step-100"
        )
    url, folder = (source, destination) if is_url(source) else (destination, source)
    place, _, name = url.rstrip("/").rpartition("/")
    if not name or place.endswith("/"):
        raise ConfigError(f"{url}: lacks the name of the checkpoint; expected a URL such as s3://bucket/run/step-100")
    if is_url(source):
        ObjectStore(place).get(name, Path(folder))
    else:
        _core.Checkpoint(folder).verify()
        try:
            ObjectStore(place).put(Path(folder), name, replace=force)
        except CheckpointError as error:
            again = f"persia ckpt copy {shlex.quote(folder)} {shlex.quote(url)} --force"
            error.hint = f"copy to a URL with another name, or replace the checkpoint there: {again}"
            raise


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
