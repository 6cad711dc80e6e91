"""An infer job as real processes on loopback: servers and middlewares that persia-launcher starts, without NATS."""

import os
import signal
import sys
from pathlib import Path

import yaml
from stack import Part, start

from persia.launch.local_job import Command, free_ports


class InferJob:
    """Servers and middlewares of one infer job, each of which can be started and killed separately.

    Args:
        folder: The folder for the configuration.
        checkpoint: The folder of the checkpoint that the servers serve.
        servers: The number of servers.
        middlewares: The number of middlewares.
        lists: Whether the configuration lists the servers.
    """

    def __init__(
        self, folder: Path, checkpoint: Path, *, servers: int = 2, middlewares: int = 1, lists: bool = True
    ) -> None:
        first = free_ports(None, servers + middlewares)
        addresses = [f"127.0.0.1:{first + offset}" for offset in range(servers + middlewares)]
        self.servers, self.middlewares = addresses[:servers], addresses[servers:]
        self.parts: dict[str, Part] = {}
        self._config = folder / "global_config_infer.yml"
        self.serve(checkpoint, lists=lists)

    def serve(self, checkpoint: Path, *, lists: bool = True) -> None:
        """Write the configuration for processes that are started afterwards."""
        infer = {"embedding_checkpoint": str(checkpoint), **({"servers": self.servers} if lists else {})}
        self._config.write_text(yaml.safe_dump({"common_config": {"job_type": "Infer", "infer_config": infer}}))

    def start(self) -> "InferJob":
        """Start all processes, without waiting."""
        for index in range(len(self.servers)):
            self.start_server(index)
        for index in range(len(self.middlewares)):
            self.start_middleware(index)
        return self

    def start_server(self, index: int) -> Part:
        """Start one server."""
        replica = ["--replica-index", str(index), "--replica-size", str(len(self.servers))]
        return self._start(f"server-{index}", "embedding-parameter-server", self.servers[index], *replica)

    def start_middleware(self, index: int = 0, *arguments: str) -> Part:
        """Start one middleware."""
        return self._start(f"middleware-{index}", "embedding-worker", self.middlewares[index], *arguments)

    def _start(self, name: str, command: str, address: str, *arguments: str) -> Part:
        port = address.rsplit(":", 1)[1]
        options = ["--port", port, "--global-config", str(self._config), *arguments]
        env = {key: value for key, value in os.environ.items() if not key.startswith("PERSIA_")}
        env |= {"LOG_FORMAT": "text", "PERSIA_METRICS_LISTEN": "off"}
        words = [sys.executable, "-m", "persia.launch.cli", command, *options]
        self.parts[name] = start(Command(name, words, env))
        return self.parts[name]

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, and wait until it has ended."""
        self.parts[name].process.signal(signal.SIGKILL)
        self.parts[name].wait()

    def close(self) -> None:
        """End all processes that still run."""
        for name, part in self.parts.items():
            if part.process.running:
                self.kill(name)

    def logs(self) -> str:
        """Return the output of every process, for the report of a failed test."""
        return "\n".join(f"--- {name}\n{part.output}" for name, part in self.parts.items())
