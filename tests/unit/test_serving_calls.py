"""Limits of gRPC calls: calls with the token, and health calls, which any client may hold open."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving_process import Serving, serving, write_bundle
from test_serving_grpc import METADATA, SECRET, request

from persia.proto import inference_pb2 as pb
from persia.proto import inference_pb2_grpc as services
from persia.serving.calls import _HEALTH, HEALTH_CALLS

WAITING = 3
INFER = "/inference.GRPCInferenceService/ModelInfer"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serving")
    (folder / "token").write_text(SECRET)
    environment = {"PERSIA_TOKEN_FILE": str(folder / "token")}
    bundle = write_bundle(folder / "bundle", 2.0)
    with serving(bundle, folder / "log", environment, waiting=WAITING) as found:
        yield found


def connect(server: Serving) -> grpc.aio.Channel:
    """Open a separate connection, because the server limits the concurrent calls of one connection."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=options)


def with_channel(server: Serving, test: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    async def main() -> None:
        async with connect(server) as channel:
            await asyncio.wait_for(test(channel), DEADLINE_S)

    asyncio.run(main())


def silent(channel: grpc.aio.Channel, method: str, metadata: Any = ()) -> Any:
    """Begin a call that sends no message."""
    return channel.stream_unary(method)(metadata=metadata)


async def infers(channel: grpc.aio.Channel) -> grpc.StatusCode:
    call = services.GRPCInferenceServiceStub(channel).ModelInfer(request(), metadata=METADATA)
    code: grpc.StatusCode = await call.code()
    if code != grpc.StatusCode.OK:
        assert dict(await call.trailing_metadata())["retry-after"] == "1"
        assert f"{WAITING} calls are open" in await call.details()
    return code


async def check_health(channel: grpc.aio.Channel) -> None:
    stub, health = services.GRPCInferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await health.Check(health_pb2.HealthCheckRequest(service=""))).status == 1
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_silent_calls_without_the_token_take_no_place(server: Serving) -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        async with connect(server) as other, connect(server) as third:
            old = [silent(other, _HEALTH[n % len(_HEALTH)]) for n in range(6)]
            await asyncio.gather(*(call.wait_for_connection() for call in old))
            await check_health(other)  # the calls of this check are newer
            new = [silent(third, _HEALTH[n % len(_HEALTH)]) for n in range(HEALTH_CALLS)]
            ended = await asyncio.gather(*(call.code() for call in old))
            assert set(ended) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert "this one has waited longest" in await old[0].details()
            assert not any(call.done() for call in new)
            assert await infers(channel) == grpc.StatusCode.OK
            await check_health(channel)
            for call in new:
                call.cancel()

    with_channel(server, test)


def test_calls_with_the_token_are_bounded(server: Serving) -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        calls = [silent(channel, INFER, METADATA) for _ in range(WAITING)]
        while await infers(channel) == grpc.StatusCode.OK:
            # If the scoring call arrived first, the server refused one of the silent calls.
            calls = [silent(channel, INFER, METADATA) if call.done() else call for call in calls]
            await asyncio.sleep(0.01)
        await check_health(channel)
        calls[0].cancel()
        while await infers(channel) != grpc.StatusCode.OK:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()

    with_channel(server, test)


def test_a_call_about_health_has_a_message(server: Serving) -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        call = silent(channel, _HEALTH[0])
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

    with_channel(server, test)


def test_a_silent_call_about_health_ends(tmp_path: Path) -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        for method in _HEALTH:
            call = silent(channel, method)
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "no message arrived within 0.5 s" in await call.details()
        await check_health(channel)

    with serving(write_bundle(tmp_path / "bundle", 2.0), tmp_path / "log", timeout_s=0.5) as server:
        with_channel(server, test)
    assert "never retrieved" not in server.output and "Traceback" not in server.output
