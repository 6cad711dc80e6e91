"""The reasons for which a request gets no scores. Each class has an HTTP status and a gRPC status."""

import grpc


class RefusedError(Exception):
    """A request that gets no scores.

    Attributes:
        status: The HTTP status.
        code: The gRPC status.
        outcome: The name of the outcome in the metrics.
        retry_after_s: Seconds after which the client should try again; None if that would not help.
    """

    status = 500
    code = grpc.StatusCode.INTERNAL
    outcome = "failed"
    retry_after_s: int | None = None


class InvalidError(RefusedError):
    """The request does not fit the model."""

    status = 400
    code = grpc.StatusCode.INVALID_ARGUMENT
    outcome = "invalid"


class UnauthorizedError(RefusedError):
    """The request has no valid token."""

    status = 401
    code = grpc.StatusCode.UNAUTHENTICATED
    outcome = "unauthorized"


class UnknownError(RefusedError):
    """The path, model or version does not exist."""

    status = 404
    code = grpc.StatusCode.NOT_FOUND
    outcome = "unknown"


class MethodError(RefusedError):
    """The path requires another method."""

    status = 405
    outcome = "invalid"


class TooLargeError(RefusedError):
    """The request has too many bytes or rows."""

    status = 413
    code = grpc.StatusCode.INVALID_ARGUMENT
    outcome = "too_large"


class EncodingError(RefusedError):
    """The body has an encoding that is not supported."""

    status = 415
    outcome = "invalid"


class BusyError(RefusedError):
    """The maximum number of requests is waiting."""

    status = 503
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    outcome = "busy"
    retry_after_s = 1


class StoppingError(RefusedError):
    """The server is stopping."""

    status = 503
    code = grpc.StatusCode.UNAVAILABLE
    outcome = "stopping"
    retry_after_s = 1


class LateError(RefusedError):
    """The request waited too long for its scores."""

    status = 503
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    outcome = "late"
    retry_after_s = 1


class FailedError(RefusedError):
    """The model failed. The log has the cause."""
