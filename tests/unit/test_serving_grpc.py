"""gRPC requests to a serving process: the Open Inference Protocol, tokens, health, reflection."""

import struct
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from serving_process import Serving, serving, write_bundle
from test_serving_http import INPUTS, SCORES

from persia.proto import inference_pb2 as pb
from persia.proto import inference_pb2_grpc as services
from persia.runtime.tokens import role_token

SECRET = "s" * 32
TOKEN = role_token(SECRET.encode(), "serving")
METADATA = (("authorization", f"Bearer {TOKEN}"),)
FIELDS = {"INT64": "int64_contents", "BYTES": "bytes_contents", "FP32": "fp32_contents"}
CODES = {"INT64": "q", "FP32": "f"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serving")
    (folder / "token").write_text(SECRET)
    environment = {"PERSIA_TOKEN_FILE": str(folder / "token")}
    with serving(write_bundle(folder / "bundle", 2.0), folder / "log", environment) as found:
        yield found


@pytest.fixture(scope="module")
def channel(server: Serving) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return services.GRPCInferenceServiceStub(channel)


def request(inputs: list[dict[str, Any]] = INPUTS, *, raw: bool = False, **keys: Any) -> pb.ModelInferRequest:
    found = pb.ModelInferRequest(model_name="small", **keys)
    for each in inputs:
        tensor = found.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
        data = [value.encode() if isinstance(value, str) else value for value in each["data"]]
        if not raw:
            getattr(tensor.contents, FIELDS[each["datatype"]]).extend(data)
        elif each["datatype"] == "BYTES":
            found.raw_input_contents.append(b"".join(struct.pack("<I", len(value)) + value for value in data))
        else:
            found.raw_input_contents.append(struct.pack(f"<{len(data)}{CODES[each['datatype']]}", *data))
    return found


def refusal(call: Any, *arguments: Any, **named: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **named)
    found: Any = error.value
    return found.code(), found.details()


@pytest.mark.parametrize("raw", [False, True], ids=["contents", "raw"])
def test_scores_of_tensors_are_those_of_the_bundle_that_is_named(stub: Any, raw: bool) -> None:
    answer = stub.ModelInfer(request(raw=raw, id="7"), metadata=METADATA)
    assert (answer.model_name, answer.model_version, answer.id) == ("small", "small-2", "7")
    assert [*struct.unpack("<3f", answer.raw_output_contents[0])] == SCORES
    assert (answer.outputs[0].name, answer.outputs[0].datatype, [*answer.outputs[0].shape]) == ("score", "FP32", [3])


def test_an_invalid_request_is_refused_with_the_reason(stub: Any) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    code, details = refusal(stub.ModelInfer, request(INPUTS[:4]), metadata=METADATA)
    assert (code, details.split(";")[0]) == (invalid, "inputs are missing: price")
    both = request(raw=True)
    both.inputs[0].contents.int64_contents.append(1)
    message = "user: contents and raw_input_contents are both set; set one"
    assert refusal(stub.ModelInfer, both, metadata=METADATA) == (invalid, message)
    short = request(raw=True)
    short.raw_input_contents[0] = b"1234567"
    assert "user: the number of bytes is 7, expected 24" in refusal(stub.ModelInfer, short, metadata=METADATA)[1]
    text = request(raw=True)
    text.raw_input_contents[1] = b"\xff\xff\xff\xff" * 4
    assert "site: expected strings, each preceded by its length" in refusal(stub.ModelInfer, text, metadata=METADATA)[1]
    other = request(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="x")])
    code, details = refusal(stub.ModelInfer, other, metadata=METADATA)
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "no output 'x'; the outputs are score")
    twice = request(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="score")] * 2)
    assert refusal(stub.ModelInfer, twice, metadata=METADATA) == (invalid, "outputs: 'score' is listed twice")
    code, _ = refusal(stub.ModelInfer, request(model_version="small-9"), metadata=METADATA)
    assert code == grpc.StatusCode.NOT_FOUND


def test_metadata_and_health(stub: Any, channel: grpc.Channel) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest()).live  # without a token
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name="small"), metadata=METADATA).ready
    assert stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=METADATA).name == "persia"
    found = stub.ModelMetadata(pb.ModelMetadataRequest(name="small"), metadata=METADATA)
    assert [(each.name, each.datatype) for each in found.inputs] == [
        (each["name"], each["datatype"]) for each in INPUTS
    ]
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "inference.GRPCInferenceService"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == 1


def test_calls_without_the_token_are_refused(stub: Any, server: Serving) -> None:
    refused = grpc.StatusCode.UNAUTHENTICATED
    assert refusal(stub.ModelInfer, request())[0] == refused
    assert refusal(stub.ModelInfer, request(), metadata=(("authorization", f"Bearer {TOKEN[:-1]}x"),))[0] == refused
    assert refusal(stub.ModelMetadata, pb.ModelMetadataRequest(name="small"))[0] == refused
    status, headers, _ = server.client().score([{"user": 1}])
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert server.client().ask("GET", "/v2/models/small")[0] == 401
    assert server.client().ask("GET", "/v2/health/ready")[0] == 200
    assert server.client(TOKEN).score([{"user": 1}])[0] == 200


def test_calls_without_the_token_hold_no_place(channel: grpc.Channel) -> None:
    refused, health = grpc.StatusCode.UNAUTHENTICATED, health_pb2_grpc.HealthStub(channel)
    watch = health_pb2.HealthCheckRequest(service="")
    assert refusal(lambda: next(health.Watch(watch, timeout=20)))[0] == refused
    with_token = health.Watch(watch, metadata=METADATA, timeout=20)
    assert next(with_token).status == 1
    with_token.cancel()
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        """The empty stream of messages of a call."""
        over.wait(60)
        yield from ()

    try:
        silent: Any = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        assert refusal(silent, nothing(), timeout=20)[0] == refused
    finally:
        over.set()


def test_reflection_describes_the_service(channel: grpc.Channel) -> None:
    with_token = grpc.intercept_channel(channel, _Token())
    names = ProtoReflectionDescriptorDatabase(with_token).get_services()
    assert "inference.GRPCInferenceService" in names
    file = ProtoReflectionDescriptorDatabase(with_token).FindFileContainingSymbol("inference.GRPCInferenceService")
    assert "ModelInfer" in {method.name for method in file.service[0].method}


class _Token(grpc.StreamStreamClientInterceptor):  # type: ignore[misc,unused-ignore]
    """Adds the token to the calls of reflection."""

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=METADATA), requests)
