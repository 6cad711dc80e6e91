"""Checks of ports on this host: whether a port is free, and which program uses it."""

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from persia.doctor.check import Check
from persia.launch.binaries import MIDDLEWARE, SERVER

_PROGRAMS = {"persia", "persia-launcher", SERVER, MIDDLEWARE}
"""The programs of Persia."""
_ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # noqa: S104 - the socket is closed immediately


@dataclass(frozen=True)
class User:
    """The process that listens on a port.

    Attributes:
        pid: Its process id; None if it is unknown, for example because the process belongs to another user.
        name: The name of its program; empty if it is unknown.
        words: Its command line.
        environment: Its environment; empty if it belongs to another user.
    """

    pid: int | None
    name: str = ""
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    def __str__(self) -> str:
        """Return the process as ``pid N (program)``."""
        if self.pid is None:
            return "a process that cannot be identified, such as one of another user"
        return f"pid {self.pid} ({self.name})" if self.name else f"pid {self.pid}"

    @property
    def is_persia(self) -> bool:
        """Whether the process runs a program of Persia."""
        modules = [after for before, after in zip(self.words, self.words[1:], strict=False) if before == "-m"]
        programs = {Path(word).name for word in self.words[:2]}
        return bool(programs & _PROGRAMS) or any(each.split(".")[0] == "persia" for each in modules)

    def has(self, name: str) -> bool:
        """Whether a variable has the same value in the environment of the process and in this one."""
        return (self.environment or {}).get(name, "").strip() == os.environ.get(name, "").strip()


def user_of(port: int) -> User:
    """Return the process that listens on a port of this host."""
    try:
        found = [one for one in psutil.net_connections(kind="tcp") if one.laddr and one.laddr.port == port]
    except psutil.AccessDenied:
        found = []
    listens = next((one for one in found if one.status == psutil.CONN_LISTEN), None)
    if listens is None or listens.pid is None:
        return User(None)
    try:
        process = psutil.Process(listens.pid)
        name, words = process.name(), tuple(process.cmdline())
    except psutil.Error:
        return User(listens.pid)
    try:
        return User(listens.pid, name, words, process.environ())
    except (psutil.Error, OSError):
        return User(listens.pid, name, words)


def free(name: str, port: int, origin: str, host: str = "") -> Check:
    """Check that a program can listen on a port of this host; otherwise name the process that uses the port.

    It is not an error if the service that ``origin`` configures is already running. Such a service is a program of
    Persia that listens on the port and has the same variable, or rank 0 of the same rendezvous.

    Args:
        name: The name of the check.
        port: The port.
        origin: The variable or the option that sets the port.
        host: The address to listen at; empty means all addresses.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or _ANY[family], port))
        except PermissionError as error:
            why = "ports below 1024 need root or CAP_NET_BIND_SERVICE" if port < 1024 else error.strerror or str(error)
            advice = f"set {origin} to {'a port above 1023' if port < 1024 else 'another port'}"
            return Check(name, "fail", f"port {port} cannot be bound", why, advice)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return _used(name, port, origin, user_of(port))
            why, advice = error.strerror or str(error), f"set {origin} to another address"
            if error.errno == errno.EADDRNOTAVAIL:
                why, advice = f"{why}: {host} is not an address of this host", f"{origin}=0.0.0.0:{port}"
            return Check(name, "fail", f"{host}:{port} cannot be bound", why, advice)
    return Check(name, "ok", f"port {port} is free")


def _used(name: str, port: int, origin: str, user: User) -> Check:
    """Return the check of a port in use by the intended service, another service of Persia, or another program."""
    found = f"port {port} is in use by {user}"
    if _is_own(origin, user):
        found += f", the process for which {origin} is set"
        return Check(name, "ok", found, f"a second process on this host needs another {origin}")
    why = "a second program cannot listen there"
    if user.is_persia:
        why += f"; the process is a program of Persia that has another {origin}"
    look = "" if user.pid is None else f"; to see what it is: ps -fp {user.pid}"
    return Check(name, "fail", found, why, f"set {origin} to another port{look}")


def _is_own(origin: str, user: User) -> bool:
    """Whether a process is the service that ``origin`` configures."""
    if origin == "MASTER_PORT":
        rank_0 = (user.environment or {}).get("RANK", "").strip() == "0"
        return rank_0 and user.has("MASTER_PORT") and user.has("MASTER_ADDR")
    return user.is_persia and bool(os.environ.get(origin, "").strip()) and user.has(origin)


def listening(name: str, value: str, what: str) -> Check:
    """Check that a service can listen at an address.

    Args:
        name: The variable.
        value: The value of the variable, ``HOST:PORT``.
        what: The name of the service, for messages.
    """
    try:
        parts = urlsplit(f"//{value}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if port is None:
        return Check(name, "fail", f"{name}={value}", "expected HOST:PORT, a port up to 65535", f"{name}=0.0.0.0:8888")
    if port == 0:
        return Check(name, "ok", f"{value}: {what} is chosen when the process starts")
    try:
        number = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0] if host else ""
    except OSError as error:
        return Check(
            name,
            "fail",
            f"{name}={value}",
            f"the name {host} has no address on this host: {error}",
            f"{name}=0.0.0.0:{port}",
        )
    return free(name, port, name, str(number))
