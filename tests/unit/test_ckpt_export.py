"""``persia ckpt export``: uploads to S3 in parts with checksums, and interrupted ones. A real program serves S3."""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Verb
from object_server import Server

from persia.checkpoint import multipart
from persia.checkpoint.bucket import Bucket
from persia.checkpoint.object_store import ObjectStore, copy
from persia.ctx import TrainCtx
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import CheckpointError, StorageError, UsageError
from persia.runtime.job import MANIFEST

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed here")

URL = "s3://bucket/runs/census"
ADDRESS = f"{URL}/step-10"
SMALL = 5 << 20
"""The smallest size that S3 accepts for a part."""


@pytest.fixture(autouse=True)
def environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.empty()
    settings = {"ACCESS_KEY_ID": "somebody", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    for name, value in {**settings, "ENDPOINT_URL": server.address}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(multipart, "PART_BYTES", SMALL)


def test_the_endpoint_of_s3_overrides_that_of_all_services(
    saved: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amazon's own tools read both variables."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.address)
    ObjectStore(URL).put(saved, "step-10")
    multipart.export(str(saved), f"{URL}/step-11", "again")
    assert server.keys("runs/census/step-11/") == server.keys("runs/census/step-10/") != []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose dense model has three parts and a few bytes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "embedding_config.yml").write_text("slots_config:\n  a: {dim: 4}\n")
    torch.manual_seed(0)
    model = torch.nn.Linear(1 << 11, (3 * SMALL >> 13) + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERSIA_EMBEDDING_CONFIG", str(folder / "embedding_config.yml"))
        with TrainCtx(
            SGD(0.1),
            torch.optim.SGD(model.parameters(), 0.1),
            model=model,
            embedding_config=EmbeddingConfig((-0.1, 0.1)),
        ) as ctx:
            ctx.dump_checkpoint(str(folder / "step-10"))
    return folder / "step-10"


def client() -> Any:
    return Bucket(URL, "again")._client


def pending(url: str = URL) -> list[multipart.Upload]:
    return multipart.uploads(url, "again")


def sent(server: Server) -> list[str]:
    """Return the numbers of the parts that have been sent to the server."""
    return re.findall(r"PUT /\S*partNumber=(\d+)", server.log.read_text())


@contextlib.contextmanager
def broken_after(parts: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the process be interrupted when it sends the part after the given ones."""
    send, count = multipart._Object.send, 0

    def limited(self: multipart._Object, operation: str, content: bytes, **arguments: Any) -> dict[str, Any]:
        nonlocal count
        if operation == "upload_part":
            count += 1
            if count > parts:
                raise KeyboardInterrupt
        return send(self, operation, content, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(multipart._Object, "send", limited)
        patch.setattr(multipart, "PARTS_AT_A_TIME", 1)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.row("S4-28")
def test_an_export_is_a_replica_whose_parts_have_checksums(
    saved: Path, server: Server, tmp_path: Path, verb: Verb
) -> None:
    before = len(sent(server))
    out, _ = verb("ckpt", "export", str(saved), ADDRESS)
    files = [each.name for each in saved.iterdir() if each.name != MANIFEST]
    assert f"{len(files)} files" in out and len(sent(server)) - before == 4
    assert [each.name for each in ObjectStore(URL).whole()] == ["step-10"]
    copy(ADDRESS, str(tmp_path / "back"))
    for name in (*files, MANIFEST):
        assert (tmp_path / "back" / name).read_bytes() == (saved / name).read_bytes()
    head = client().head_object(Bucket="bucket", Key="runs/census/step-10/dense.pt", ChecksumMode="ENABLED")
    assert head["ETag"].strip('"').endswith("-4"), "of four parts"
    assert pending() == []
    out, _ = verb("ckpt", "export", str(saved), ADDRESS)
    assert "the store already had all of them, so none was sent" in out and len(sent(server)) - before == 4


@pytest.mark.row("S4-28")
def test_every_request_with_content_has_its_checksum(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Bucket.call
    operations = []

    def noted(self: Bucket, operation: str, **arguments: Any) -> dict[str, Any]:
        if (body := arguments.get("Body")) is not None:
            assert arguments["ChecksumSHA256"] == base64.b64encode(hashlib.sha256(body).digest()).decode()
            operations.append(operation)
        return call(self, operation, **arguments)

    monkeypatch.setattr(Bucket, "call", noted)
    multipart.export(str(saved), ADDRESS, "again")
    assert operations.count("upload_part") == 4 and operations[-1] == "put_object"


@pytest.mark.row("S4-28")
def test_an_object_that_differs_from_its_file_is_deleted(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike S3, the server of the tests does not verify the checksums of parts."""
    call = Bucket.call

    def corrupts(self: Bucket, operation: str, **arguments: Any) -> dict[str, Any]:
        if arguments.get("PartNumber") == 2:
            arguments["Body"] = bytes([arguments["Body"][0] ^ 1]) + arguments["Body"][1:]
        return call(self, operation, **arguments)

    with (
        monkeypatch.context() as patch,
        pytest.raises(
            StorageError,
            match=r"dense\.pt: the uploaded object differs from .*, and was deleted: the store has .* bytes",
        ),
    ):
        patch.setattr(Bucket, "call", corrupts)
        multipart.export(str(saved), ADDRESS, "again")
    assert ObjectStore(URL).whole() == []
    assert client().list_objects_v2(Bucket="bucket", Prefix="runs/census/step-10/dense").get("Contents") is None


@pytest.mark.row("S4-28")
def test_an_interrupted_export_continues(
    saved: Path, server: Server, tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broken_after(2, monkeypatch):
        multipart.export(str(saved), ADDRESS, "again")
    assert ObjectStore(URL).whole() == [], "it is no checkpoint before its manifest is there"
    (upload,) = pending()
    assert upload.key.endswith("/dense.pt") and upload.sizes == [SMALL, SMALL]
    before = len(sent(server))
    out, _ = verb("ckpt", "export", str(saved), ADDRESS)
    assert len(sent(server)) - before == 2, "the other two of four"
    assert ", parts 2" in out, out
    copy(ADDRESS, str(tmp_path / "back"))
    assert (tmp_path / "back" / "dense.pt").read_bytes() == (saved / "dense.pt").read_bytes()
    assert pending() == []


@pytest.mark.row("S4-28")
def test_parts_of_another_content_are_sent_again(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has a part of the same size from an interrupted upload of another checkpoint."""
    key = "runs/census/step-10/dense.pt"
    begun = client().create_multipart_upload(Bucket="bucket", Key=key, ChecksumAlgorithm="SHA256")
    for number in (1, 2):
        content = (saved / "dense.pt").read_bytes()[:SMALL] if number == 1 else os.urandom(SMALL)
        client().upload_part(Bucket="bucket", Key=key, UploadId=begun["UploadId"], PartNumber=number, Body=content)
    done = multipart.export(str(saved), ADDRESS, "again")
    assert done.parts_before == 1, "the first one"
    copy(ADDRESS, str(tmp_path / "back"))
    assert (tmp_path / "back" / "dense.pt").read_bytes() == (saved / "dense.pt").read_bytes()


def test_an_upload_that_has_ended_meanwhile_is_begun_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with broken_after(1, monkeypatch):
        multipart.export(str(saved), ADDRESS, "again")
    (upload,) = pending()
    interrupted = multipart._Object._interrupted

    def ended(self: multipart._Object) -> list[multipart.Upload]:
        found = interrupted(self)
        client().abort_multipart_upload(Bucket="bucket", Key=upload.key, UploadId=upload.id)
        return found

    monkeypatch.setattr(multipart._Object, "_interrupted", ended)
    assert multipart.export(str(saved), ADDRESS, "again").parts_before == 0
    assert "starting a new upload; the interrupted one cannot continue" in caplog.text
    assert [each.name for each in ObjectStore(URL).whole()] == ["step-10"]


@pytest.mark.row("S4-28")
def test_an_object_that_is_damaged_is_not_taken_for_complete(saved: Path, tmp_path: Path) -> None:
    multipart.export(str(saved), ADDRESS, "again")
    small = next(each for each in saved.iterdir() if each.name not in (MANIFEST, "dense.pt"))
    client().delete_object(Bucket="bucket", Key=f"runs/census/step-10/{MANIFEST}")
    for path in (small, saved / "dense.pt"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        client().put_object(Bucket="bucket", Key=f"runs/census/step-10/{path.name}", Body=bytes(content))
    done = multipart.export(str(saved), ADDRESS, "again")
    assert done.files_before == done.files - 2
    copy(ADDRESS, str(tmp_path / "back"))


@pytest.mark.parametrize("command", ["export", "copy"])
def test_another_checkpoint_is_replaced_with_force_only(saved: Path, tmp_path: Path, verb: Verb, command: str) -> None:
    key = f"runs/census/step-10/{MANIFEST}"
    client().put_object(Bucket="bucket", Key=key, Body=b"{}")
    errors = verb("ckpt", command, str(saved), ADDRESS, code=4)[1]
    assert f" {saved}: {ADDRESS} has another checkpoint, which would be deleted" in errors
    assert f"persia ckpt {command} {saved} {ADDRESS} --force" in errors
    assert client().get_object(Bucket="bucket", Key=key)["Body"].read() == b"{}", "it is unchanged"
    assert len(client().list_objects_v2(Bucket="bucket")["Contents"]) == 1, "nothing is sent"
    verb("ckpt", command, str(saved), ADDRESS, "--force")
    verb("ckpt", command, str(saved), ADDRESS)  # the same checkpoint, so nothing is replaced
    copy(ADDRESS, str(tmp_path / "back"))


def test_an_upload_of_a_run_replaces_the_one_before_its_resume(saved: Path) -> None:
    client().put_object(Bucket="bucket", Key=f"runs/census/step-10/{MANIFEST}", Body=b"{}")
    ObjectStore(URL).put(saved, "step-10")
    assert [each.name for each in ObjectStore(URL).whole()] == ["step-10"]


@pytest.mark.row("S4-28")
def test_uploads_that_were_not_completed_are_listed_and_aborted(
    saved: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broken_after(2, monkeypatch):
        multipart.export(str(saved), ADDRESS, "again")
    client().create_multipart_upload(Bucket="bucket", Key="runs/census2/other")
    out, _ = verb("ckpt", "export", "--list-uploads", URL)
    assert f"s3://bucket/runs/census/step-10/dense.pt  2 parts  {2 * SMALL:,} bytes  begun 20" in out
    assert "census2" not in out and f"unfinished uploads: 1, {2 * SMALL:,} bytes" in out
    assert f"persia ckpt export --abort-uploads {URL}" in out
    listed = multipart._listed
    with monkeypatch.context() as patch:  # the server reports 2010 as the start of every upload
        now = datetime.now(timezone.utc)
        patch.setattr(multipart, "_listed", lambda *given: (replace(each, started=now) for each in listed(*given)))
        out, _ = verb("ckpt", "export", "--abort-uploads", URL)
        assert "ok: aborted uploads that began at least 1d ago: 0 (" in out and len(pending()) == 1, "it has just begun"
    out, _ = verb("ckpt", "export", "--abort-uploads", URL)
    assert "dense.pt" in out and "ok: aborted uploads that began at least 1d ago: 1 (" in out and pending() == []
    assert len(pending("s3://bucket")) == 1, "that of another prefix"
    assert len(multipart.abort("s3://bucket", timedelta(0), "again", lambda _: None)) == 1
    assert "unfinished uploads: 0, " in verb("ckpt", "export", "--list-uploads", URL)[0]


def test_a_damaged_checkpoint_is_not_exported(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "damaged")
    content = bytearray((saved / "dense.pt").read_bytes())
    content[1000] ^= 1
    (tmp_path / "damaged" / "dense.pt").write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"dense\.pt"):
        multipart.export(str(tmp_path / "damaged"), ADDRESS, "again")
    assert client().list_objects_v2(Bucket="bucket").get("Contents") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{saved}", "gs://bucket/one"], "gs://bucket/one: expected an S3 URL"),
        (["{saved}", "s3://bucket"], "s3://bucket: lacks the name of the checkpoint"),
        (["{saved}", "folder"], "folder: expected an S3 URL"),
        (["{saved}"], "expected a checkpoint and the URL of the new one"),
        (["--list-uploads", "s3://bucket", "s3://other"], "expected one URL"),
        (["--list-uploads", "--abort-uploads", "s3://bucket"], "mutually exclusive"),
        (["--abort-uploads", "s3://bucket", "--older", "1y"], "--older 1y: expected an integer"),
        (["none", ADDRESS], "none"),
    ],
)
def test_mistakes_of_the_verb(saved: Path, verb: Verb, words: list[str], message: str) -> None:
    code = 4 if words[0] == "none" else 2
    errors = verb("ckpt", "export", *(each.format(saved=saved) for each in words), code=code)[1]
    assert message in errors, errors


def test_without_boto3_the_extra_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(UsageError, match="boto3, which cannot be imported") as caught:
        multipart.export(str(saved), ADDRESS, "again")
    assert "persia[s3]" in caught.value.hint and "persia ckpt copy" in caught.value.hint


def test_a_missing_bucket_and_a_store_that_does_not_answer(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="404 NoSuchBucket") as caught:
        multipart.uploads("s3://nowhere/run", "persia again")
    assert "create the bucket nowhere" in caught.value.hint and "persia again" in caught.value.hint
    monkeypatch.setattr("persia.checkpoint.bucket._ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:9") as caught:
        multipart.uploads(URL, "persia again")
    assert "AWS_ENDPOINT_URL" in caught.value.hint


# --- Permissions: in these tests, the server checks the policies of users


def request(server: Server, method: str, path: str, body: bytes = b"") -> None:
    with contextlib.closing(http.client.HTTPConnection(server.address.removeprefix("http://"))) as connection:
        connection.request(method, path, body, {"Content-Type": "text/plain"})
        answer = connection.getresponse()
        assert answer.status == http.HTTPStatus.OK, answer.read()
        answer.read()


@pytest.fixture
def allowed(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that gives this process a user with only some permissions."""
    made: list[str] = []

    def allow(*actions: str) -> None:
        request(server, "POST", "/moto-api/reset-auth", b"1000000")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        users = boto3.Session().client("iam", endpoint_url=server.address, region_name="us-east-1")
        name = f"user-{len(made)}"
        made.append(name)
        users.create_user(UserName=name)
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}
        users.put_user_policy(UserName=name, PolicyName="some", PolicyDocument=json.dumps(policy))
        key = users.create_access_key(UserName=name)["AccessKey"]
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        request(server, "POST", "/moto-api/reset-auth", b"0")

    yield allow
    request(server, "POST", "/moto-api/reset-auth", b"1000000")


ALL = [
    *("s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket", "s3:HeadObject"),
    *("s3:ListMultipartUploadParts", "s3:ListBucketMultipartUploads", "s3:AbortMultipartUpload"),
]


@pytest.mark.row("S4-28")
@pytest.mark.parametrize(
    ("lacks", "resource"),
    [
        ("s3:PutObject", "arn:aws:s3:::bucket/runs/census/step-10/*"),
        ("s3:GetObject", "arn:aws:s3:::bucket/runs/census/step-10/*"),
        ("s3:ListBucketMultipartUploads", "arn:aws:s3:::bucket"),
        ("s3:ListMultipartUploadParts", "arn:aws:s3:::bucket/runs/census/step-10/*"),
    ],
)
def test_a_permission_that_lacks_is_named_with_the_next_command(
    saved: Path, allowed: Any, verb: Verb, lacks: str, resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "s3:ListMultipartUploadParts":
        with broken_after(1, monkeypatch):
            multipart.export(str(saved), ADDRESS, "again")
    allowed(*(each for each in ALL if each != lacks))
    errors = verb("ckpt", "export", str(saved), ADDRESS, code=1)[1]
    assert f"{lacks} is not allowed (403 AccessDenied" in errors or f"{lacks} or s3:ListBucket is not" in errors, errors
    assert f"{lacks} on {resource}" in errors and f"persia ckpt export {saved} {ADDRESS}" in errors, errors


@pytest.mark.row("S4-28")
def test_all_permissions_are_enough_and_aborting_needs_its_own(
    saved: Path, allowed: Any, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed(*(each for each in ALL if each != "s3:AbortMultipartUpload"))
    with broken_after(1, monkeypatch):
        multipart.export(str(saved), ADDRESS, "again")
    errors = verb("ckpt", "export", "--abort-uploads", URL, "--older", "0m", code=1)[1]
    assert "s3:AbortMultipartUpload is not allowed (403" in errors, errors
    assert f"persia ckpt export --abort-uploads {URL} --older 0m" in errors
    assert ", parts 1" in verb("ckpt", "export", str(saved), ADDRESS)[0]


@pytest.mark.row("S4-28")
def test_keys_that_are_unknown_are_named(
    saved: Path, allowed: Any, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed(*ALL)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN000000000")
    errors = verb("ckpt", "export", str(saved), ADDRESS, code=1)[1]
    assert "the store does not accept the credentials, or they have expired: set AWS_ACCESS_KEY_ID" in errors, errors
