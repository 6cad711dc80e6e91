"""Ranks connect over a private network only."""

import socket
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
from stack import MakeStack

from persia.distributed import private
from persia.doctor import network
from persia.errors import UsageError
from persia.runtime.settings import settings

PUBLIC, PUBLIC_6 = "11.22.33.44", "2a01:4f8::5"
Host = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return a function that gives this host other interfaces: ``host(eth0=["10.0.0.5"])``."""
    for name in ("PERSIA_ADVERTISE", "PERSIA_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", private.ALLOW):
        monkeypatch.delenv(name, raising=False)

    def use(**interfaces: list[str]) -> None:
        given = {
            name: [
                SimpleNamespace(family=socket.AF_INET6 if ":" in number else socket.AF_INET, address=number)
                for number in numbers
            ]
            for name, numbers in {"lo": ["127.0.0.1", "::1"], **interfaces}.items()
        }
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: given)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(given, SimpleNamespace(isup=True)))

    return use


@pytest.mark.parametrize(
    ("number", "public"),
    [
        (PUBLIC, True),
        (PUBLIC_6, True),
        ("[2a01:4f8::5]", True),
        ("::ffff:11.22.33.44", True),
        ("::ffff:10.0.0.1", False),
        *((private, False) for private in ("10.1.2.3", "172.31.0.1", "192.168.7.7", "100.64.0.9", "169.254.3.4")),
        *((private, False) for private in ("127.0.0.1", "::1", "fd12::1", "fe80::1%eth0", "localhost")),
    ],
)
def test_which_addresses_are_public(number: str, public: bool) -> None:
    assert private.is_public(number) is public


def test_a_public_address_is_refused_and_a_private_interface_is_proposed(host: Host) -> None:
    host(eth0=[PUBLIC], wg0=["10.9.0.1"])
    with pytest.raises(UsageError) as caught:
        private.check(PUBLIC, rank=1, backend="gloo")
    assert f"over a public network: the interface of the route to NATS has {PUBLIC}; connections between" in str(
        caught.value
    )
    assert "to the interface of a private network, here wg0 (10.9.0.1);" in str(caught.value.hint)
    private.check("10.9.0.1", rank=1, backend="gloo")


def test_without_a_private_interface_the_hint_says_what_is_needed(host: Host) -> None:
    host(eth0=[PUBLIC])
    with pytest.raises(UsageError) as caught:
        private.check(PUBLIC, rank=1, backend="gloo")
    assert "WireGuard" in str(caught.value.hint) and "PERSIA_ALLOW_PUBLIC=1" in str(caught.value.hint)


@pytest.mark.parametrize(("backend", "other"), [("gloo", "nccl"), ("nccl", "gloo")])
def test_the_interface_of_gloo_or_nccl_counts_too(
    host: Host, monkeypatch: pytest.MonkeyPatch, backend: str, other: str
) -> None:
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    host(eth0=[PUBLIC], eth1=["10.0.0.5"])
    private.check("10.0.0.5", rank=0, backend=backend)
    monkeypatch.setenv(variable, "eth0")
    with pytest.raises(UsageError, match=f"interface eth0 of {variable}=eth0 has {PUBLIC}"):
        private.check("10.0.0.5", rank=0, backend=backend)
    private.check("10.0.0.5", rank=0, backend=other)


def test_of_an_interface_with_ipv4_ranks_use_no_other_address(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    host(eth0=["10.0.0.5", PUBLIC_6])
    private.check("10.0.0.5", rank=0, backend="gloo")
    host(eth0=[PUBLIC_6])
    with pytest.raises(UsageError, match=PUBLIC_6):
        private.check("127.0.0.1", rank=0, backend="gloo")


def test_an_address_that_others_translate_lets_rank_0_listen_everywhere(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(eth0=["192.168.0.2"], eth1=[PUBLIC])
    monkeypatch.setattr(socket, "gethostname", lambda: "192.168.0.2")
    with pytest.raises(UsageError, match=f"interface eth1, where rank 0 listens, has {PUBLIC}"):
        private.check("10.77.0.1", rank=0, backend="gloo")
    private.check("10.77.0.1", rank=1, backend="gloo")
    with pytest.raises(UsageError, match=f"interface eth1, which NCCL may choose, has {PUBLIC}"):
        private.check("10.77.0.1", rank=1, backend="nccl")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_an_interface_with_a_public_address_beside_a_private_one_is_refused(host: Host, backend: str) -> None:
    """The ranks get the name of the interface, and the backend may use the interface's first address."""
    host(eth0=[PUBLIC, "10.0.0.5"])
    with pytest.raises(UsageError, match=f"interface eth0 has {PUBLIC}"):
        private.check("10.0.0.5", rank=1, backend=backend)


def test_nccl_may_use_the_other_family(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(eth0=["10.0.0.5", PUBLIC_6])
    private.check("10.0.0.5", rank=1, backend="nccl")
    monkeypatch.setenv("NCCL_SOCKET_FAMILY", "AF_INET6")
    with pytest.raises(UsageError, match=PUBLIC_6):
        private.check("10.0.0.5", rank=1, backend="nccl")
    private.check("10.0.0.5", rank=1, backend="gloo")


def test_it_can_be_allowed(host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    host(eth0=[PUBLIC])
    monkeypatch.setenv(private.ALLOW, "1")
    private.check(PUBLIC, rank=0, backend="gloo")
    assert f"{PUBLIC}; connections between ranks are not encrypted" in caplog.text
    assert "because PERSIA_ALLOW_PUBLIC=1 is set" in caplog.text


def test_the_doctor_says_it_before_a_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(eth0=[PUBLIC])
    for name, value in {"PERSIA_NATS_URL": "nats://127.0.0.1:4222", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert network.private_network().status == "ok"
    monkeypatch.setenv("PERSIA_ADVERTISE", PUBLIC)
    found = network.private_network()
    assert found.status == "fail" and f"PERSIA_ADVERTISE={PUBLIC} has {PUBLIC}" in found.found
    assert "WireGuard" in found.next
    monkeypatch.setattr(settings, "_place", None)  # as in a new process
    assert found in network.checks()
    monkeypatch.setenv(private.ALLOW, "1")
    assert network.private_network().status == "warn"


TRAINER = """
from persia.ctx import TrainCtx
from persia.embedding.optim import SGD
from conftest import TinyModel
import torch

model = TinyModel()
with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model):
    print("trains", flush=True)
"""


def test_a_rank_with_a_public_address_ends_before_anything_listens(make_stack: MakeStack) -> None:
    stack = make_stack()
    script = stack.folder / "train.py"
    script.write_text(TRAINER)
    trainer = stack.trainer(script, ranks=2, env={"PERSIA_ADVERTISE": PUBLIC})
    assert trainer.wait() == 2, trainer.output
    assert f"PERSIA_ADVERTISE={PUBLIC} has {PUBLIC}" in trainer.output and "trains" not in trainer.output
    alone = stack.trainer(script, env={"PERSIA_ADVERTISE": PUBLIC})
    assert alone.wait() == 0 and "trains" in alone.output, alone.output
