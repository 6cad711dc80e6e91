"""The rendezvous of ranks: NATS, interfaces, and the options of the process group."""

import io
import logging
import os
import socket
from concurrent.futures import Executor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from meeting import LONG, all_gather
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not explicitly

from persia.discovery import nats
from persia.distributed import FSDPOption, control_plane, network, options, rendezvous
from persia.errors import RunLostError, UnreachableError, UsageError
from persia.runtime import environment, flight


class FakeDiscovery:
    """A discovery of one job. NATS is unreachable for the first few queries."""

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.announced: list[dict[str, str]] = []

    def announce(self, service: str, index: int, replicas: int, address: str, extra: dict[str, str]) -> io.BytesIO:
        me = {"host": socket.gethostname(), "pid": str(os.getpid())}
        self.announced.append({"index": str(index), **me, "started": "1", **extra})
        return io.BytesIO()

    def find(self, service: str, timeout_s: float) -> list[dict[str, str]]:
        self.away -= 1
        if self.away >= 0:
            raise UnreachableError("NATS is away")
        return self.announced


def start(discovery: Any, rank: int) -> tuple[control_plane.Peers, Any]:
    place = rendezvous.Rendezvous(discovery, "nats://127.0.0.1:4222", rank, 2)
    try:
        place.announce("", place.open())
        return place.connect()
    finally:
        place.close()


def test_nats_may_be_away_while_ranks_meet(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_JOB", "j")
    discovery = FakeDiscovery(away=5)
    ranks = [pool.submit(start, discovery, rank) for rank in (0, 1)]
    met = [future.result(LONG)[0] for future in ranks]
    assert all_gather(pool, met, "step 1")[1].result(LONG) == [0, 10]
    for each in met:
        each.leave(None)


def test_nats_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_JOB", "j")
    monkeypatch.setenv("PERSIA_START_TIMEOUT", "0.2")
    with pytest.raises(UnreachableError, match="NATS is away"):
        start(FakeDiscovery(away=10**9), 1)


def test_a_rank_that_cannot_reach_the_store_leaves_the_others(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_JOB", "j")

    def store(host: str, port: int, timeout_s: float, descriptor: int | None) -> int:
        if descriptor is None:
            raise UnreachableError("no store")
        return descriptor

    monkeypatch.setattr(rendezvous, "_store", store)
    discovery = FakeDiscovery()
    first, second = (pool.submit(start, discovery, rank) for rank in (0, 1))
    with pytest.raises(UnreachableError, match="no store"):
        second.result(LONG)
    alone, descriptor = first.result(LONG)
    socket.socket(fileno=descriptor).close()
    with pytest.raises(RunLostError, match="rank 1 is gone: UnreachableError: no store"):
        alone.all_gather("step 1", 0)
    alone.leave(None)


def test_a_second_rank_0_stops_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_JOB", "j")
    discovery = FakeDiscovery()
    discovery.announce("persia-trainer", 0, 2, "", {"started": "0", "host": "another"})
    place: Any = rendezvous.Rendezvous(discovery, "nats://127.0.0.1:4222", 0, 2)  # type: ignore[arg-type]
    extra = place.open()
    with pytest.raises(UsageError, match="is already running"):
        place.announce("", extra)
    place.close()
    for address in extra.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(rendezvous._address(address))


def test_a_password_in_an_address_is_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous._shown("nats://user:secret@broker:4222") == "broker:4222"
    with pytest.raises(UsageError, match="expected nats://HOST:PORT") as caught:
        nats.services("http://user:secret@broker:4222")
    assert "secret" not in str(caught.value)


@pytest.mark.row("S0-19")
@pytest.mark.parametrize("variable", network.VARIABLES)
def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "eth9")
    with pytest.raises(UsageError, match=f"{variable}=eth9: interface eth9 does not exist; this host has .*lo"):
        network.check()
    monkeypatch.setenv(variable, "lo")
    network.check()


@pytest.mark.parametrize(("value", "good"), [("l", True), ("=l", False), ("=lo", True), ("^lo,e", True), ("^", True)])
def test_nccl_has_its_own_way_to_name_interfaces(monkeypatch: pytest.MonkeyPatch, value: str, good: bool) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [], "veth1": []})
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    if good:
        network.check()
    else:
        with pytest.raises(UsageError, match="NCCL_SOCKET_IFNAME"):
            network.check()


@pytest.mark.row("S0-19")
def test_fewer_gpus_than_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_NUM", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES='0' lists too few .*found 1, expected 2, .*GPU_NUM=2"):
        network.check()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of a launcher with --nproc-per-node 1
    network.check()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1")
    network.check()
    for repeated_or_hidden in ("0,0", "0,-1,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", repeated_or_hidden)
        with pytest.raises(UsageError, match="found 1, expected 2") as raised:
            network.check()
        assert "GPU_NUM or --nproc-per-node" in raised.value.hint
    from persia.doctor.network import interfaces

    found = interfaces()
    assert (found.name, found.why) == ("CUDA_VISIBLE_DEVICES", "training does not start")


def test_ddp_options_are_checked() -> None:
    with pytest.raises(UsageError, match="initialization_method='mpi'"):
        options.DDPOption("mpi")
    with pytest.raises(UsageError, match="backend='mpi'"):
        options.DDPOption(backend="mpi")
    assert options.get_default_distributed_option().backend == "gloo"
    assert options.get_default_distributed_option(0).backend == "nccl"
    with pytest.raises(UsageError, match=r"timeout_s=0\): expected seconds"):
        options.DDPOption(timeout_s=0)


@pytest.mark.row("S0-18", "S3-10")
def test_the_environment_chooses_the_backend_and_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    for name, device, backend in (("auto", None, "gloo"), ("auto", 0, "nccl"), ("gloo", 0, "gloo")):
        monkeypatch.setenv("PERSIA_DIST_BACKEND", name)
        option = options.get_default_distributed_option(device)
        with caplog.at_level(logging.INFO, "persia"):
            option.initialize(HashStore(), 0, 2, device)
        assert asked.pop() == backend
        assert f"over {backend} ({'no GPU' if device is None else 'GPU'})" in caplog.messages[-1]
    monkeypatch.setenv("PERSIA_DIST_BACKEND", "nccl")
    with pytest.raises(UsageError, match="nccl needs a GPU"):
        options.get_default_distributed_option(None).initialize(HashStore(), 0, 2, None)
    monkeypatch.setenv("PERSIA_DIST_BACKEND", "mpi")
    with pytest.raises(UsageError, match="PERSIA_DIST_BACKEND='mpi': expected auto, nccl, gloo"):
        options.get_default_distributed_option(None)


@pytest.mark.row("S3-10")
def test_the_environment_chooses_the_backend_of_shards_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(options, "_record_collectives", lambda: None)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **_: asked.append(backend))
    for given, name, device, backend in (
        (None, "auto", None, "gloo"),
        (None, "auto", 0, "nccl"),
        (None, "nccl", 0, "nccl"),
        ("nccl", "gloo", 0, "nccl"),
    ):
        monkeypatch.setenv("PERSIA_DIST_BACKEND", name)
        FSDPOption(given).initialize(HashStore(), 0, 2, device)
        assert asked.pop() == backend
    monkeypatch.setenv("PERSIA_DIST_BACKEND", "nccl")
    with pytest.raises(UsageError, match="nccl needs a GPU"):
        FSDPOption().initialize(HashStore(), 0, 2, None)
    monkeypatch.setenv("PERSIA_DIST_BACKEND", "gloo")
    with pytest.raises(UsageError, match="gloo does not gather the tensors of a GPU$") as caught:
        FSDPOption().initialize(HashStore(), 0, 2, 0)
    assert caught.value.hint.startswith("use nccl (FSDPOption(backend='nccl')")
    assert not asked


@pytest.mark.row("S3-12")
def test_with_nccl_the_flight_recorder_of_torch_is_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    for name in (*names, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)  # restored after the test
    monkeypatch.setenv("PERSIA_FLIGHT_DIR", str(tmp_path))
    monkeypatch.setattr(flight, "collectives", None)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **_: None)
    options.DDPOption(backend="gloo").initialize(HashStore(), 0, 2, None)
    assert not any(name in os.environ for name in names)
    options.DDPOption(backend="nccl").initialize(HashStore(), 0, 2, 0)
    assert [os.environ[name] for name in names] == ["2000", "1", "2000"]
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{tmp_path}/nccl-rank-"
    monkeypatch.setattr(flight, "collectives", lambda: '{"entries": []}')
    flight.dump("a test")
    assert (tmp_path / "nccl-rank-0.json").read_text() == '{"entries": []}'


@pytest.mark.row("S4-20", "S4-22")
def test_variables_that_nobody_reads_are_mapped_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    given = {"NCCL_TIMEOUT": "9", "NCCL_BLOCKING_WAIT": "1", "NCCL_TOPOLOGY_FILE": "/a.xml", "NCCL_TOPO_FILE": "/b.xml"}
    now = dict(given)
    environment.rename(now)
    assert {name: now[name] for name in now if name not in given} == {
        "PERSIA_DIST_TIMEOUT": "9",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    assert now["NCCL_TOPO_FILE"] == "/b.xml"
    assert {message.split(":")[0] for message in caplog.messages} == {
        "environment variable NCCL_BLOCKING_WAIT is deprecated",
        "environment variable NCCL_TIMEOUT has no effect",
        "environment variable NCCL_TOPOLOGY_FILE has no effect",
    }
    assert "NCCL_TOPO_FILE is set, so remove NCCL_TOPOLOGY_FILE" in caplog.text
    with pytest.raises(UsageError, match="NCCL_TOPO_FILE=/b.xml: no such file"):
        environment.check_files(now)


def test_ranks_may_wait_hours_for_one_that_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **options: asked.update(options))
    assert options.DDPOption(backend="gloo").limit_s is None
    monkeypatch.setenv("PERSIA_DIST_TIMEOUT", "5")
    for option, limit in ((options.DDPOption(backend="gloo"), 5), (FSDPOption("gloo", timeout_s=7), 7)):
        option.initialize(HashStore(), 0, 2, None)
        assert option.limit_s == limit
        # Peers apply the limit, with a clock that a debugger can stop.
        assert asked.pop("timeout") >= timedelta(hours=12)
