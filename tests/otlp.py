"""An OTLP receiver for gRPC, which records the data that a collector of OpenTelemetry gets."""

import threading
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from typing_extensions import Self

PACKAGE = "persia.tests.otlp"
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "AnyValue": {"string_value": (1, "string"), "int_value": (3, "int64")},
    "KeyValue": {"key": (1, "string"), "value": (2, "AnyValue")},
    "Status": {"message": (2, "string"), "code": (3, "int32")},
    "Span": {
        "trace_id": (1, "bytes"),
        "span_id": (2, "bytes"),
        "parent_span_id": (4, "bytes"),
        "name": (5, "string"),
        "kind": (6, "int32"),
        "start_time_unix_nano": (7, "fixed64"),
        "end_time_unix_nano": (8, "fixed64"),
        "attributes": (9, "KeyValue*"),
        "status": (15, "Status"),
    },
    "ScopeSpans": {"spans": (2, "Span*")},
    "Resource": {"attributes": (1, "KeyValue*")},
    "ResourceSpans": {"resource": (1, "Resource"), "scope_spans": (2, "ScopeSpans*")},
    "Request": {"resource_spans": (1, "ResourceSpans*")},
}
"""The fields that are read, with the numbers that OTLP gives them; ``*`` is a list."""
TYPES = {
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
    "int32": Field.TYPE_INT32,
    "int64": Field.TYPE_INT64,
    "fixed64": Field.TYPE_FIXED64,
}
ERROR = 2
"""The code of a status that is an error."""
KINDS = {1: "internal", 2: "server", 3: "client"}


def request_type() -> Any:
    """Return the class of a request to export spans."""
    file = descriptor_pb2.FileDescriptorProto(name="persia_tests_otlp.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            one, repeated = kind.removesuffix("*"), kind.endswith("*")
            label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            own = one in MESSAGES
            added = message.field.add(
                name=field_name, number=number, label=label, type=Field.TYPE_MESSAGE if own else TYPES[one]
            )
            if own:
                added.type_name = f".{PACKAGE}.{one}"
            if name == "AnyValue":
                added.oneof_index = 0
        if name == "AnyValue":
            message.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Request"))


@dataclass(frozen=True)
class Span:
    """A span that was received.

    Attributes:
        resource: The attributes of the span's process.
        error: The message of the span's status, if the status is an error.
    """

    resource: dict[str, Any]
    trace: str
    id: str
    parent: str
    name: str
    kind: str
    start: int
    end: int
    attributes: dict[str, Any]
    error: str | None

    @property
    def service(self) -> str:
        """The service name of the span's process."""
        return str(self.resource["service.name"])


def _attributes(pairs: Any) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = None if kind is None else getattr(pair.value, kind)
    return found


@dataclass
class Receiver:
    """Keeps the spans that processes send; a context manager.

    Attributes:
        spans: The spans received so far.
        headers: The metadata of each call.
    """

    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        method = grpc.unary_unary_rpc_method_handler(
            self._export, request_deserializer=request_type().FromString, response_serializer=bytes
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    @property
    def url(self) -> str:
        """The address at which the receiver listens."""
        return f"http://127.0.0.1:{self.port}"

    def traces(self) -> dict[str, list[Span]]:
        """Return the spans by trace."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.trace, []).append(span)
        return found

    def _export(self, request: Any, context: grpc.ServicerContext) -> bytes:
        received = [
            Span(
                resource=_attributes(group.resource.attributes),
                trace=each.trace_id.hex(),
                id=each.span_id.hex(),
                parent=each.parent_span_id.hex(),
                name=each.name,
                kind=KINDS.get(each.kind, str(each.kind)),
                start=each.start_time_unix_nano,
                end=each.end_time_unix_nano,
                attributes=_attributes(each.attributes),
                error=each.status.message if each.status.code == ERROR else None,
            )
            for group in request.resource_spans
            for scope in group.scope_spans
            for each in scope.spans
        ]
        with self._lock:
            self.spans += received
            self.headers.append({str(key): value for key, value in context.invocation_metadata()})
        return b""
