"""gRPC: the Open Inference Protocol, health, and reflection."""

import time
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from persia import __version__
from persia.proto import inference_pb2 as pb
from persia.proto import inference_pb2_grpc as services
from persia.serving import access, rest, tensors
from persia.serving.batching import Scores
from persia.serving.calls import HEALTH_CALLS, Admission
from persia.serving.limits import Limits
from persia.serving.refusals import InvalidError, RefusedError, UnknownError
from persia.serving.service import Service, inputs, output_names, outputs

_SERVICE = "inference.GRPCInferenceService"

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field that holds the elements of each datatype."""


class RpcServer:
    """The gRPC server.

    Attributes:
        port: The port on which it listens.
    """

    def __init__(self, service: Service, host: str, port: int) -> None:
        """Open the port.

        Raises:
            RuntimeError: The port cannot be opened.
        """
        limits = service.limits
        self._server = grpc.aio.server(interceptors=[Admission(service.expected, limits)], options=_options(limits))
        services.add_GRPCInferenceServiceServicer_to_server(_Inference(service), self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        files = access.certificate()
        if files is None:
            self.port = self._server.add_insecure_port(shown)
        else:
            contents = []
            for path in files:
                with open(path, "rb") as file:  # noqa: PTH123
                    contents.append(file.read())
            credentials = grpc.ssl_server_credentials([(contents[1], contents[0])])
            self.port = self._server.add_secure_port(shown, credentials)

    async def start(self) -> None:
        """Start serving requests."""
        for name in ("", _SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def leave(self) -> None:
        """Report that the server is no longer ready."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Stop accepting requests, and wait until running requests have their responses."""
        await self._server.stop(grace_s)


def _options(limits: Limits) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_send_message_length", limits.body_bytes),
        # the limit of each connection; further calls wait in the client
        ("grpc.max_concurrent_streams", limits.waiting + HEALTH_CALLS),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


class _Inference(services.GRPCInferenceServiceServicer):
    """The gRPC service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """Return whether the process responds."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """Return whether the process accepts requests."""
        return pb.ServerReadyResponse(ready=self._service.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """Return whether a model is ready for requests."""
        try:
            self._service.check_model(request.name, request.version)
        except UnknownError as error:
            await _abort(context, error)
        return pb.ModelReadyResponse(ready=self._service.ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Return name and version of the server."""
        return pb.ServerMetadataResponse(name="persia", version=__version__, extensions=[])

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Return inputs and outputs of the model."""
        try:
            self._service.check_model(request.name, request.version)
        except UnknownError as error:
            await _abort(context, error)
        model = self._service.model
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=self._service.name,
            versions=[model.identity],
            platform="persia_bundle",
            inputs=[tensor(**vars(each)) for each in inputs(model)],
            outputs=[tensor(**vars(each)) for each in outputs(model)],
        )

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Return the scores of rows."""
        began, service, outcome = time.monotonic(), self._service, "failed"
        try:
            service.check_model(request.model_name, request.model_version)
            size = request.ByteSize()
            service.batcher.reserve(size)
            decode = service.for_version(request.model_version, lambda model: _rows(request, model))
            scores = await service.score(decode, size, context.time_remaining())
            answer = _answer(service.name, request, scores)
            outcome = "ok"
            return answer
        except RefusedError as error:
            outcome = error.outcome
            await _abort(context, error)
        finally:
            service.answered("grpc", outcome, began)


def _rows(request: Any, model: Any) -> Any:
    """Return the rows of a request for a model."""
    tensors.check_outputs(each.name for each in request.outputs)
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InvalidError(f"raw_input_contents: found {len(raws)}, expected {len(request.inputs)}: one for each input")
    found = []
    for index, given in enumerate(request.inputs):
        if raws:
            if given.HasField("contents"):
                raise InvalidError(f"{given.name}: contents and raw_input_contents are both set; set one")
            found.append(tensors.from_raw(given.name, given.datatype, given.shape, raws[index]))
            continue
        field = _CONTENTS.get(given.datatype)
        if field is None:
            raise InvalidError(
                f"{given.name}: datatype {given.datatype!r}: expected one of {', '.join(_CONTENTS)}, or FP16 in "
                "raw_input_contents"
            )
        values = getattr(given.contents, field)
        others = [other.name for other, _ in given.contents.ListFields() if other.name != field]
        if others:
            raise InvalidError(
                f"{given.name}: datatype {given.datatype}: expected values in {field} alone, found values in "
                f"{', '.join(others)}"
            )
        found.append(tensors.from_values(given.name, given.datatype, given.shape, [*values]))
    return tensors.to_table(found, model.columns)


def _answer(name: str, request: Any, scores: Scores) -> Any:
    model = scores.model
    names = output_names(model)
    answer = pb.ModelInferResponse(model_name=name, model_version=model.identity, id=request.id)
    for output in [each.name for each in request.outputs] or names:
        if output not in names:
            raise UnknownError(f"no output {output!r}; the outputs are {', '.join(names)}")
        values = np.ascontiguousarray(scores.values[:, names.index(output)], dtype="<f4")
        answer.outputs.add(name=output, datatype="FP32", shape=[len(values)])
        answer.raw_output_contents.append(values.tobytes())
    if scores.unusual:
        answer.parameters["unusual"].string_param = rest.dumps(scores.unusual).decode()
    return answer


async def _abort(context: Any, error: RefusedError) -> None:
    if error.retry_after_s is not None:
        context.set_trailing_metadata((("retry-after", str(error.retry_after_s)),))
    await context.abort(error.code, str(error))
