"""Accesses a bucket of S3 or of a compatible store, with boto3. Errors name the next command and a missing permission.

Replicas of checkpoints are uploaded by :mod:`persia.checkpoint.object_store`, which knows other stores too. This module
provides what ``obstore`` lacks: multipart uploads that can be listed, continued and aborted.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from persia.runtime.errors import ConfigError, PersiaError, StorageError, UsageError
from persia.runtime.places import s3_endpoint

_PERMISSIONS = {
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject",
    "list_parts": "s3:ListMultipartUploadParts",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
}
"""The permission that a policy must grant for each operation."""
_OF_BUCKETS = ("s3:ListBucketMultipartUploads", "s3:ListBucket")
"""Permissions whose resource is the bucket, and not its objects."""
_READS = ("head_object", "get_object")
"""Operations that also get status 403 for an object that does not exist, if the permission to list objects is
missing."""
_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "InvalidClientTokenId")
"""Error codes for wrong or expired keys, which no permission can correct."""
_ATTEMPTS = 5
"""The number of times that a request is sent if the store does not respond, or reports an internal failure."""


class Bucket:
    """The objects below ``s3://bucket/prefix``.

    Args:
        url: The address. Credentials, region and endpoint are those of
            :class:`persia.checkpoint.object_store.ObjectStore`.
        again: The command that repeats the work, for messages.

    Raises:
        ConfigError: The address is not one of S3, or the settings of the store are invalid.
        UsageError: boto3 is not installed.
    """

    def __init__(self, url: str, again: str) -> None:
        scheme, _, rest = url.rstrip("/").partition("://")
        self.name, _, self.prefix = rest.partition("/")
        if scheme not in ("s3", "s3a") or not self.name:
            raise ConfigError(
                f"{url}: expected an S3 URL, such as s3://bucket/run",
                hint="correct the URL; to copy a checkpoint to another store: persia ckpt copy",
            )
        self.url, self.again = url.rstrip("/"), again
        self._client  # noqa: B018  # raises an error if boto3 is missing

    @cached_property
    def _client(self) -> Any:
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise UsageError(
                f"multipart uploads to {self.url} need boto3, which cannot be imported: {error}",
                hint=(
                    f"pip install 'persia[s3]', then run: {self.again}; to upload a checkpoint without boto3: "
                    "persia ckpt copy, which cannot continue an interrupted upload"
                ),
            ) from error
        endpoint = s3_endpoint()
        # As in obstore, the name of the bucket is in the path if an endpoint is given.
        style = {"addressing_style": "path"} if endpoint else {}
        config = Config(s3=style, retries={"max_attempts": _ATTEMPTS, "mode": "standard"})
        try:
            session = boto3.Session(region_name=os.environ.get("AWS_REGION"))  # boto3's default session keeps old keys
            return session.client("s3", endpoint_url=endpoint, config=config)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(
                f"cannot use the store of {self.url}: {error}",
                hint=f"check AWS_REGION and AWS_ENDPOINT_URL, then run: {self.again}",
            ) from error

    def key(self, name: str) -> str:
        """Return the key of an object below the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Call an operation of S3.

        Raises:
            StorageError: The operation is refused, or the store cannot be reached; the message names a missing
                permission.
        """
        with self._reporting(operation, arguments.get("Key")):
            answer: dict[str, Any] = getattr(self._client, operation)(Bucket=self.name, **arguments)
            return answer

    def pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing operation.

        Raises:
            StorageError: As in :meth:`call`.
        """
        with self._reporting(operation, arguments.get("Key")):
            yield from self._client.get_paginator(operation).paginate(Bucket=self.name, **arguments)

    def found(self, operation: str, **arguments: Any) -> dict[str, Any] | None:
        """Call an operation on an object or an upload; return None if it does not exist.

        Raises:
            StorageError: As in :meth:`call`.
        """
        try:
            return self.call(operation, **arguments)
        except StorageError as error:
            if code_of(error) in ("404", "NoSuchKey", "NoSuchUpload"):
                return None
            raise

    def read(self, key: str) -> bytes | None:
        """Return the content of a small object; None if it does not exist.

        Raises:
            StorageError: As in :meth:`call`.
        """
        answer = self.found("get_object", Key=key)
        if answer is None:
            return None
        with self._reporting("get_object", key):
            content: bytes = answer["Body"].read()
            return content

    @contextlib.contextmanager
    def _reporting(self, operation: str, key: str | None) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            raise self._refused(error, operation, key) from error
        except BotoCoreError as error:
            raise StorageError(
                f"{self.url}: {operation} failed: {error}",
                hint=(
                    "check the network, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, "
                    f"then run: {self.again}"
                ),
            ) from error

    def _refused(self, error: Any, operation: str, key: str | None) -> StorageError:
        """Return the error for a response of S3."""
        code, status = str(error.response["Error"]["Code"]), error.response["ResponseMetadata"]["HTTPStatusCode"]
        at = f"s3://{self.name}" if key is None else f"s3://{self.name}/{key}"
        said = str(error.response["Error"].get("Message", ""))
        what, hint = f"{operation} failed with {status} {code}", f"run again: {self.again}"
        if code == "NoSuchBucket":
            hint = f"create the bucket {self.name}, or correct the URL, then run: {self.again}"
        elif code in _KEYS:
            hint = (
                "the store does not accept the credentials, or they have expired: set AWS_ACCESS_KEY_ID, "
                f"AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, then run: {self.again}"
            )
        elif code == "RequestTimeTooSkewed":
            hint = f"correct the clock of this host, then run: {self.again}"
        elif status == 403:
            lacks = [_PERMISSIONS[operation], *(["s3:ListBucket"] if operation in _READS else [])]
            what = f"{' or '.join(lacks)} is not allowed ({status} {code} in {operation})"
            needed = " and ".join(map(self._resource, lacks))
            hint = f"allow {needed} for the credentials in use (AWS_ACCESS_KEY_ID or a role), then run: {self.again}"
        return StorageError(": ".join(part for part in (at, what, said) if part), hint=hint)

    def _resource(self, permission: str) -> str:
        """Return a permission, and the resource for which a policy grants it."""
        objects = "" if permission in _OF_BUCKETS else f"/{self.prefix}/*" if self.prefix else "/*"
        return f"{permission} on arn:aws:s3:::{self.name}{objects}"


def code_of(error: PersiaError) -> str:
    """Return the error code of the response of S3 that caused an error; empty if no response caused it."""
    from botocore.exceptions import ClientError

    cause = error.__cause__
    return str(cause.response["Error"]["Code"]) if isinstance(cause, ClientError) else ""
