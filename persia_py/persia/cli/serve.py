"""``persia serve``: answer requests for scores from a bundle."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    bundle: Annotated[
        Path | None,
        typer.Argument(
            metavar="BUNDLE",
            envvar="PERSIA_BUNDLE",
            show_default=False,
            help="A bundle, a link to one, or a folder of versions (1/, 2/, ...), whose highest is served.",
        ),
    ] = None,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="PERSIA_SERVE_HTTP", help="Address for HTTP.")
    ] = "127.0.0.1:8000",
    grpc: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="PERSIA_SERVE_GRPC", help="Address for gRPC; none: no gRPC.")
    ] = "127.0.0.1:8001",
    name: Annotated[
        str | None, typer.Option(envvar="PERSIA_SERVE_NAME", help="Name of the model. Default: that of the folder.")
    ] = None,
    batch_rows: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="PERSIA_SERVE_BATCH_ROWS",
            help="Maximum number of rows that are scored together. A larger request is scored alone.",
        ),
    ] = 1_024,
    batch_delay_ms: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            envvar="PERSIA_SERVE_BATCH_DELAY_MS",
            help="Milliseconds that a batch waits for more rows.",
        ),
    ] = 0.0,
    waiting: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="PERSIA_SERVE_WAITING",
            help="Maximum number of waiting requests. Further requests get status 503.",
        ),
    ] = 1_024,
    max_rows: Annotated[
        int, typer.Option(min=1, envvar="PERSIA_SERVE_MAX_ROWS", help="Maximum number of rows of a request.")
    ] = 10_000,
    max_body_mb: Annotated[
        int, typer.Option(min=1, max=1024, envvar="PERSIA_SERVE_MAX_BODY_MB", help="Maximum size of a request in MiB.")
    ] = 8,
    timeout_s: Annotated[
        float,
        typer.Option(
            min=0.1,
            envvar="PERSIA_SERVE_TIMEOUT",
            help="Seconds in which a request must arrive, and for which it may then wait for its batch.",
        ),
    ] = 10.0,
    drain_s: Annotated[
        float,
        typer.Option(
            min=0,
            envvar="PERSIA_SERVE_DRAIN",
            help="Seconds after SIGTERM in which the server is not ready, but still answers.",
        ),
    ] = 0.0,
    threads: Annotated[
        int, typer.Option(min=1, envvar="PERSIA_SERVE_THREADS", help="Number of threads that score a batch.")
    ] = 1,
    show_token: Annotated[
        bool, typer.Option("--show-token", help="Print the token that clients send, and exit.")
    ] = False,
    health: Annotated[
        bool, typer.Option("--health", help="Exit with code 0 if the server at --http is ready, otherwise with 1.")
    ] = False,
) -> None:
    """Serve a bundle over POST /score, and the Open Inference Protocol over HTTP and gRPC."""
    from persia.runtime.errors import UsageError
    from persia.runtime.interruptible import interruptible

    if show_token:
        typer.echo(_token())
        return
    if health:
        raise typer.Exit(0 if _is_ready(http) else 1)
    if bundle is None:
        raise UsageError(
            "no BUNDLE is given, and PERSIA_BUNDLE is not set",
            hint="export a run: persia export runs/LATEST -o bundle; then: persia serve bundle",
        )
    with interruptible():
        try:
            from persia.serving.limits import Limits
            from persia.serving.server import Options
            from persia.serving.server import serve as run
        except ModuleNotFoundError as missing:
            raise UsageError(
                f"persia serve needs the package {missing.name}, which is not installed",
                hint="pip install 'persia[serve]'",
            ) from missing
        import torch

        from persia.serving.bundled import load
    torch.set_num_threads(threads)
    limits = Limits(
        body_bytes=max_body_mb << 20,
        request_rows=max_rows,
        waiting=waiting,
        waiting_bytes=max(Limits.waiting_bytes, max_body_mb << 20),
        batch_rows=batch_rows,
        batch_delay_s=batch_delay_ms / 1e3,
        timeout_s=timeout_s,
        drain_s=drain_s,
    )
    options = Options(http, None if grpc == "none" else grpc, name, limits)
    raise typer.Exit(run(bundle, options, load))


def _token() -> str:
    """Return the token that clients must send.

    Raises:
        UsageError: There is no token file.
    """
    from persia.runtime import tokens
    from persia.runtime.errors import UsageError

    token = tokens.token("serving")
    if token is None:
        raise UsageError("--show-token: there is no token, because PERSIA_TOKEN_FILE is not set; clients need none")
    return token


def _is_ready(http: str) -> bool:
    """Whether the server on this host at an address is ready. Its certificate is not verified."""
    import ssl
    from contextlib import closing
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    from persia.runtime.settings import settings

    host, _, port = http.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))  # noqa: S104
    try:
        if settings.tls_certificate is None:
            connection = HTTPConnection(host, int(port), timeout=4)
        else:
            connection = HTTPSConnection(host, int(port), timeout=4, context=ssl._create_unverified_context())  # noqa: S323
        with closing(connection):
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
    except (OSError, ValueError, HTTPException):
        return False
