"""Exports a checkpoint to S3 in parts with checksums. An interrupted export continues where it stopped.

The objects are those that :class:`persia.checkpoint.object_store.ObjectStore` writes. The manifest is written last, so
an export with a manifest is complete. ``persia ckpt copy`` and ``persia ckpt list`` can read an export.
"""

import base64
import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from persia.checkpoint.bucket import Bucket, code_of
from persia.runtime.errors import CheckpointError, ConfigError, StorageError
from persia.runtime.job import MANIFEST
from persia.runtime.logging import get_logger
from persia_core import checkpoint as _core

_logger = get_logger("checkpoint")

PART_BYTES = 16 << 20
"""The minimum size of a part. Files up to this size are uploaded in one request."""
MAX_PARTS = 10_000
"""The maximum number of parts that S3 accepts for an object."""
PARTS_AT_A_TIME = 4
"""The number of parts that are uploaded, and held in memory, at the same time."""
ALGORITHM = "SHA256"
"""The checksum of parts and objects, with which the store verifies received data."""
_UNUSABLE = ("NoSuchUpload", "InvalidRequest")
"""Error codes for an upload that no longer exists, or was started with another checksum."""


@dataclass
class Exported:
    """The result of an export.

    Attributes:
        files: The number of files of the checkpoint.
        bytes: The bytes of all files.
        files_before: The number of files that an earlier export had completed.
        parts: The number of parts that this export has sent; a file without parts counts as one.
        parts_before: The number of parts that an interrupted export had sent.
    """

    files: int = 0
    bytes: int = 0
    files_before: int = 0
    parts: int = 0
    parts_before: int = 0


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was not completed.

    Attributes:
        key: The key of the object.
        id: The id that S3 gave the upload.
        started: The time at which the upload started.
        sizes: The size of each received part, in bytes.
    """

    key: str
    id: str
    started: datetime
    sizes: list[int] = field(default_factory=list)


def export(folder: str, url: str, again: str, *, force: bool = False) -> Exported:
    """Upload a checkpoint. Parts that an interrupted export has uploaded are not sent again.

    Args:
        folder: The checkpoint.
        url: ``s3://bucket/prefix/NAME``, the new checkpoint.
        again: The command to run again, for messages.
        force: Whether to replace another checkpoint at the address.

    Raises:
        ConfigError: The address is not an S3 URL, or lacks the name of the checkpoint.
        UsageError: boto3 is not installed.
        CheckpointError: The folder has no checkpoint, the checkpoint is damaged, or another checkpoint is at the
            address.
        StorageError: A file of the checkpoint cannot be read, the store refuses a request, or the store received data
            that differs from the data sent. The parts sent so far stay in the store.
    """
    bucket = Bucket(url, again)
    if not bucket.prefix:
        raise ConfigError(f"{url}: lacks the name of the checkpoint; expected a URL such as s3://bucket/run/step-100")
    opened = _core.Checkpoint(folder)
    opened.verify()
    with _reading(Path(folder, MANIFEST)):
        manifest = Path(folder, MANIFEST).read_bytes()
    done = Exported(len(opened.files), sum(file["bytes"] for file in opened.files))
    before = bucket.read(bucket.key(MANIFEST))
    if before == manifest:
        done.files_before = done.files
        return done
    if before is not None:
        if not force:
            raise CheckpointError(
                f"cannot export {folder}: {url} has another checkpoint, which would be deleted",
                hint=f"export to a URL with another name, or replace the checkpoint there: {again} --force",
            )
        # Delete the manifest first. The other checkpoint then counts as incomplete while its files are replaced.
        bucket.call("delete_object", Key=bucket.key(MANIFEST))
    for file in opened.files:
        path = Path(opened.path_of(file["name"]))
        _Object(bucket, bucket.key(path.name), path, file["bytes"]).upload(done)
    _Object(bucket, bucket.key(MANIFEST), Path(folder, MANIFEST), len(manifest)).send("put_object", manifest)
    return done


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror or error}", hint="check the path, its owner and its disk"
        ) from error


def part_bytes(size: int) -> int:
    """Return the size of every part of a file except the last. It depends only on the size of the file."""
    return max(PART_BYTES, -(-size // MAX_PARTS))


@dataclass(frozen=True)
class _Digest:
    """The hashes of a part, or of a file that is sent in one part."""

    sha256: bytes
    md5: bytes

    @classmethod
    def of(cls, content: bytes) -> "_Digest":
        """Return the hashes of some content."""
        return cls(hashlib.sha256(content).digest(), hashlib.md5(content, usedforsecurity=False).digest())


@dataclass(frozen=True)
class _Object:
    """A file of the checkpoint and its object in the store."""

    bucket: Bucket
    key: str
    path: Path
    size: int

    def upload(self, done: Exported) -> None:
        """Upload the file, unless the object is complete."""
        head = self._head()
        if head is not None and self._is_same(head, [_Digest.of(self._part(number)) for number in self._numbers]):
            done.files_before += 1
            return
        if self.size <= PART_BYTES:
            self.send("put_object", self._part(1))
            done.parts += 1
            return
        for upload in self._interrupted():
            try:
                self._complete(upload.id, done, resumes=True)
                return
            except StorageError as error:
                if code_of(error) not in _UNUSABLE:
                    raise
                _logger.warning("%s: starting a new upload; the interrupted one cannot continue: %s", self.key, error)
        begun = self.bucket.call(
            "create_multipart_upload", Key=self.key, ChecksumAlgorithm=ALGORITHM, ChecksumType="COMPOSITE"
        )
        self._complete(str(begun["UploadId"]), done, resumes=False)

    @property
    def _numbers(self) -> range:
        """Return the numbers of the parts."""
        return range(1, max(1, -(-self.size // part_bytes(self.size))) + 1)

    def _part(self, number: int) -> bytes:
        size = part_bytes(self.size)
        with _reading(self.path), self.path.open("rb") as file:
            file.seek((number - 1) * size)
            return file.read(size)

    def _head(self) -> dict[str, Any] | None:
        """Return the size and checksum of the object; None if it does not exist."""
        return self.bucket.found("head_object", Key=self.key, ChecksumMode="ENABLED")

    def _is_same(self, head: dict[str, Any], parts: list[_Digest]) -> bool | None:
        """Whether an object has the content of the file; None if the store has neither a checksum nor an MD5 of it."""
        if head["ContentLength"] != self.size:
            return False
        etag, checksum = str(head["ETag"]).strip('"'), str(head.get("ChecksumSHA256") or "")
        sha, md5, ending = parts[0].sha256, parts[0].md5, ""
        if "-" in etag or checksum.endswith(f"-{len(parts)}"):  # the checksum is a hash of the hashes of the parts
            sha, md5 = _sha(*(part.sha256 for part in parts)), _md5(*(part.md5 for part in parts))
            ending = f"-{len(parts)}"
        if checksum:
            return checksum.removesuffix(ending) == _text(sha)
        return etag == f"{md5.hex()}{ending}" if re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) else None

    def _interrupted(self) -> list[Upload]:
        """Return the unfinished uploads of this object, newest first."""
        found = [each for each in _listed(self.bucket, self.key) if each.key == self.key]
        return sorted(found, key=lambda each: each.started, reverse=True)

    def _complete(self, upload: str, done: Exported, *, resumes: bool) -> None:
        """Send the parts that the store does not have, then complete the upload."""
        known = {part["PartNumber"]: part for part in _parts(self.bucket, self.key, upload)} if resumes else {}

        def send(number: int) -> tuple[dict[str, Any], _Digest, bool]:
            content = self._part(number)
            digest, part = _Digest.of(content), known.get(number)
            has = part is not None and _is_same_part(part, len(content), digest)
            answer = part if has else self.send("upload_part", content, UploadId=upload, PartNumber=number)
            etag = (answer or {})["ETag"]
            return {"PartNumber": number, "ETag": etag, "ChecksumSHA256": _text(digest.sha256)}, digest, has

        with ThreadPoolExecutor(PARTS_AT_A_TIME) as threads:
            waiting = [threads.submit(send, number) for number in self._numbers]
            try:
                sent = [each.result() for each in waiting]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        parts = {"Parts": [part for part, _, _ in sent]}
        self.bucket.call("complete_multipart_upload", Key=self.key, UploadId=upload, MultipartUpload=parts)
        head = self._head()
        if head is None or self._is_same(head, [digest for _, digest, _ in sent]) is False:
            self.bucket.call("delete_object", Key=self.key)
            what = (
                f"the object does not exist after the upload of {self.path}"
                if head is None
                else f"the uploaded object differs from {self.path} ({self.size:,} bytes), and was deleted: the store "
                f"has {_described(head)}"
            )
            raise StorageError(f"s3://{self.bucket.name}/{self.key}: {what}", hint=f"run again: {self.bucket.again}")
        kept = sum(has for _, _, has in sent)
        done.parts, done.parts_before = done.parts + len(sent) - kept, done.parts_before + kept

    def send(self, operation: str, content: bytes, **arguments: Any) -> dict[str, Any]:
        """Send content with its checksum, with which the store verifies it."""
        checksum = {"ChecksumAlgorithm": ALGORITHM, "ChecksumSHA256": _text(_sha(content))}
        return self.bucket.call(operation, Key=self.key, Body=content, **checksum, **arguments)


def uploads(url: str, again: str) -> list[Upload]:
    """Return the unfinished uploads below ``s3://bucket/prefix``, oldest first.

    Raises:
        ConfigError: The address is not an S3 URL.
        UsageError: boto3 is not installed.
        StorageError: The store refuses a request.
    """
    bucket = Bucket(url, again)
    found = []
    for each in _listed(bucket, f"{bucket.prefix}/" if bucket.prefix else ""):
        try:
            sizes = [int(part["Size"]) for part in _parts(bucket, each.key, each.id)]
        except StorageError as error:
            if code_of(error) == "NoSuchUpload":
                continue  # the upload has ended in the meantime
            raise
        found.append(Upload(each.key, each.id, each.started, sizes))
    return sorted(found, key=lambda each: each.started)


def abort(url: str, older: timedelta, again: str, say: Callable[[Upload], None]) -> list[Upload]:
    """Abort the uploads below ``s3://bucket/prefix`` that are at least ``older`` old. The store deletes their parts.

    Args:
        url: The address.
        older: The minimum age. A younger upload may still be in progress.
        again: The command to run again, for messages.
        say: Called with each aborted upload.

    Raises:
        ConfigError: The address is not an S3 URL.
        UsageError: boto3 is not installed.
        StorageError: The store refuses a request.
    """
    bucket, before = Bucket(url, again), datetime.now(timezone.utc) - older
    aborted = []
    for each in uploads(url, again):
        if each.started > before:
            continue
        if bucket.found("abort_multipart_upload", Key=each.key, UploadId=each.id) is not None:
            say(each)
            aborted.append(each)
    return aborted


def _listed(bucket: Bucket, prefix: str) -> Iterator[Upload]:
    for page in bucket.pages("list_multipart_uploads", Prefix=prefix):
        for each in page.get("Uploads", []):
            yield Upload(str(each["Key"]), str(each["UploadId"]), each["Initiated"])


def _parts(bucket: Bucket, key: str, upload: str) -> Iterator[dict[str, Any]]:
    for page in bucket.pages("list_parts", Key=key, UploadId=upload):
        yield from page.get("Parts", [])


def _is_same_part(part: dict[str, Any], size: int, digest: _Digest) -> bool:
    """Whether a part in the store has this content: by its checksum, or by its MD5 if the store lists no checksum."""
    if part["Size"] != size:
        return False
    if "ChecksumSHA256" in part:
        return bool(part["ChecksumSHA256"] == _text(digest.sha256))
    return bool(part["ETag"].strip('"') == digest.md5.hex())


def _described(head: dict[str, Any]) -> str:
    """Return the size and the checksums of an object, as part of a message."""
    checksum = head.get("ChecksumSHA256") or "none"
    return f"{head['ContentLength']:,} bytes, SHA256 {checksum}, ETag {head['ETag']}"


def _sha(*content: bytes) -> bytes:
    return hashlib.sha256(b"".join(content)).digest()


def _md5(*content: bytes) -> bytes:
    return hashlib.md5(b"".join(content), usedforsecurity=False).digest()


def _text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
