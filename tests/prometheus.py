"""Debian's Prometheus and push gateway for tests, from PATH, or from packages that are unpacked but not installed."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from waiting import wait_until

from persia.utils import find_free_port

PROGRAMS = ("prometheus", "promtool", "prometheus-pushgateway")
START_S = 60.0


def find(folder: Path) -> Path | None:
    """Return a folder with the programs; None if they are not on PATH and apt-get cannot download the packages."""
    found = [shutil.which(name) for name in PROGRAMS]
    if all(found):
        for name, path in zip(PROGRAMS, found, strict=True):
            (folder / name).symlink_to(str(path))
        return folder
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return None
    download = ["apt-get", "download", "prometheus", "prometheus-pushgateway"]
    if subprocess.run(download, cwd=folder, capture_output=True, check=False).returncode != 0:
        return None
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)
    return folder / "usr" / "bin"


class Program:
    """A running program with an HTTP API."""

    def __init__(self, words: list[str], port: int, log: Path) -> None:
        self.url, self._log = f"http://127.0.0.1:{port}", log
        with log.open("w") as file:
            self._process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent)
        wait_until(words[0], self._is_ready, START_S, evidence=log.read_text)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """Return ``data`` of a response of the API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current result of an expression."""
        return list(self.get("query", query=expression)["result"])

    def has(self, expression: str) -> bool:
        """Whether the result of an expression is a number and not NaN."""
        return any(each["value"][1] != "NaN" for each in self.query(expression))

    def firing(self) -> set[tuple[str, str]]:
        """Return name and instance of the alerts that fire."""
        found = self.get("alerts")["alerts"]
        return {
            (each["labels"]["alertname"], each["labels"].get("instance", ""))
            for each in found
            if each["state"] == "firing"
        }

    def waits_for_alert(self, name: str, timeout: float = 90.0) -> set[str]:
        """Wait until an alert fires, and return its instances."""
        fires = lambda: {instance for alert, instance in self.firing() if alert == name}  # noqa: E731
        return wait_until(f"{name} to fire", fires, timeout, interval=0.5, evidence=lambda: str(self.get("alerts")))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def prometheus(programs: Path, folder: Path, config: str) -> Program:
    """Start Prometheus with a configuration."""
    (folder / "prometheus.yml").write_text(config)
    port = find_free_port()
    words = [
        str(programs / "prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    return Program(words, port, folder / "prometheus.log")


def gateway(programs: Path, folder: Path) -> Program:
    """Start a push gateway."""
    port = find_free_port()
    words = [str(programs / "prometheus-pushgateway"), f"--web.listen-address=127.0.0.1:{port}"]
    return Program(words, port, folder / "gateway.log")
