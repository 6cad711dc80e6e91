"""Runs a whole job on this host inside a ``with`` block, for tests and notebooks."""

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
from typing_extensions import Self

from persia.discovery import nats
from persia.launch.local_job import Command, LocalJob, find_free_port, free_ports
from persia.launch.logs import Logs
from persia.launch.process import Process
from persia.launch.supervision import Events, stop
from persia.launch.yaml_files import dump_yaml
from persia.runtime.errors import ConfigError, PersiaError, UnreachableError
from persia.runtime.settings import settings

_POLL = 0.1
"""Seconds between two queries to NATS for servers and middlewares."""
_SCRIPT = """\
import pathlib
import cloudpickle
cloudpickle.loads(pathlib.Path({path!r}).read_bytes())()
"""


class PersiaServiceCtx:
    """Runs NATS, servers and middlewares for the duration of a ``with`` block, and functions in separate processes.

    Inside the block this process is part of the job: its ``TrainCtx`` uses the servers. The end of the block waits
    until ``nn_worker_func`` has returned, unless an exception leaves the block. In both cases, all processes are then
    stopped.

    Args:
        data_loader_func: A function that sends batches. It runs in one process for each replica.
        nn_worker_func: A function that trains. It runs in one process for each rank.
        embedding_config: The content of ``embedding_config.yml``.
        embedding_config_path: The path of that file, instead of its content.
        global_config: The content of ``global_config.yml``; None means the defaults.
        global_config_path: The path of that file, instead of its content.
        data_loader_replica_num: The number of data-compose replicas.
        nproc_per_node: The number of ranks.
        embedding_worker_replica_num: The number of middlewares.
        embedding_parameter_replica_num: The number of servers.
        embedding_worker_port: The port of the first middleware. The other middlewares use the following ports; if one
            of them is in use, free ports are chosen.
        embedding_parameter_server_port: The port of the first server. The other servers use the following ports; if one
            of them is in use, free ports are chosen.
        nats_server_port: The port of NATS; if it is in use, a free one is chosen.

    Raises:
        ConfigError: The embedding configuration is passed in neither or both ways, or the global one in both.
    """

    def __init__(
        self,
        data_loader_func: Callable[[], object] | None = None,
        nn_worker_func: Callable[[], object] | None = None,
        embedding_config: Mapping[str, Any] | None = None,
        embedding_config_path: str | os.PathLike[str] | None = None,
        global_config: Mapping[str, Any] | None = None,
        global_config_path: str | os.PathLike[str] | None = None,
        data_loader_replica_num: int = 1,
        nproc_per_node: int = 1,
        embedding_worker_replica_num: int = 1,
        embedding_parameter_replica_num: int = 1,
        embedding_worker_port: int = 7777,
        embedding_parameter_server_port: int = 8888,
        nats_server_port: int = 4222,
    ) -> None:
        if (embedding_config is None) == (embedding_config_path is None):
            found = "neither" if embedding_config is None else "both"
            raise ConfigError(
                f"expected either embedding_config or embedding_config_path, found {found}",
                hint="pass one of the two arguments",
            )
        if global_config is not None and global_config_path is not None:
            raise ConfigError(
                "global_config and global_config_path are both given", hint="pass one of them, or neither"
            )
        self._functions = {"nn-worker": nn_worker_func, "data-loader": data_loader_func}
        self._configs = {
            "embedding_config.yml": (embedding_config, embedding_config_path),
            "global_config.yml": (global_config, global_config_path),
        }
        self._replicas, self._ranks = data_loader_replica_num, nproc_per_node
        self._middlewares, self._servers = embedding_worker_replica_num, embedding_parameter_replica_num
        self._ports = (embedding_parameter_server_port, embedding_worker_port)
        self._nats_port = nats_server_port
        self._events = Events()
        self._processes: list[Process] = []
        self._before: dict[str, str | None] = {}
        self._folder: Path | None = None
        self._logs: Logs | None = None

    def __enter__(self) -> Self:
        """Start all processes, and wait until servers and middlewares have announced themselves.

        Raises:
            UnreachableError: A server or middleware has not announced itself within ``PERSIA_START_TIMEOUT`` seconds.
            PersiaError: A process ended.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="persia-"))
        self._logs = Logs(self._folder / "logs")
        try:
            self._start(self._folder)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for ``nn_worker_func``, unless an exception left the block, and stop all processes.

        Raises:
            PersiaError: ``nn_worker_func`` failed, or a process that it needs ended.
        """
        try:
            if value is None:
                self._wait()
        finally:
            self._close()

    def _start(self, folder: Path) -> None:
        embedding, general = (self._config(folder, name) for name in self._configs)
        assert embedding is not None  # noqa: S101  # __init__ requires it
        local = LocalJob(
            name="local",
            servers=self._servers,
            middlewares=self._middlewares,
            embedding_config=embedding,
            global_config=general,
            private_dir=folder,
            state_dir=folder,
            env={"PERSIA_RUN_DIR": str(folder / "run")},
            ports=(free_ports(self._ports[0], self._servers), free_ports(self._ports[1], self._middlewares)),
        )
        local.make_token()
        url = local.nats_url(self._run(local.nats(find_free_port(self._nats_port))))
        for index in range(self._servers):
            self._run(local.part("server", index, url))
        for index in range(self._middlewares):
            self._run(local.part("middleware", index, url))
        for index in range(self._replicas):
            options = ["--replica-index", str(index), "--replica-size", str(self._replicas)]
            self._call(folder, "data-loader", f"data-compose-{index}", options, local.client_env(url))
        self._call(folder, "nn-worker", "trainer", ["--nproc-per-node", str(self._ranks)], local.client_env(url))
        for name, text in local.settings(url).items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = text
        self._wait_announced(url)

    def _wait_announced(self, url: str) -> None:
        wanted = {"persia-server": self._servers, "persia-middleware": self._middlewares}
        deadline = time.monotonic() + settings.start_timeout
        while True:
            found = Counter(service.kind for service in nats.services(url))
            absent = [f"{kind} ({found[kind]} of {wanted[kind]})" for kind in wanted if found[kind] < wanted[kind]]
            if not absent:
                return
            self._check()
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"waited {settings.start_timeout:g} s (PERSIA_START_TIMEOUT), but not all processes have announced "
                    f"themselves to NATS: {', '.join(absent)}",
                    hint="see the lines of these processes above, or increase PERSIA_START_TIMEOUT",
                )
            time.sleep(_POLL)

    def _config(self, folder: Path, name: str) -> Path | None:
        content, given = self._configs[name]
        if given is not None:
            return Path(given).resolve()
        if content is None:
            return None
        dump_yaml(content, folder / name)
        return folder / name

    def _call(self, folder: Path, verb: str, name: str, options: list[str], variables: dict[str, str]) -> None:
        function = self._functions[verb]
        if function is None:
            return
        pickled, script = folder / f"{verb}.pickle", folder / f"{verb}.py"
        pickled.write_bytes(cloudpickle.dumps(function))
        script.write_text(_SCRIPT.format(path=str(pickled)))
        paths = os.pathsep.join(path for path in sys.path if path)  # makes the module of the function importable
        words = [sys.executable, "-m", "persia.launch.cli", verb, *options, str(script)]
        self._run(Command(name, words, {**variables, "PYTHONPATH": paths}))

    def _run(self, command: Command) -> Process:
        assert self._logs is not None  # noqa: S101  # set on entry
        line = self._logs.writer(command.name)
        process = Process(command.name, command.words, env=command.env, line=line, ended=self._events.ended)
        self._processes.append(process)
        return process

    def _wait(self) -> None:
        trainer = next((process for process in self._processes if process.name == "trainer"), None)
        self._check()
        while trainer is not None and trainer.running:
            self._events.next()
            self._check()

    def _check(self) -> None:
        for process in self._processes:
            if not process.running and (process.name != "trainer" or process.code != 0):
                raise PersiaError(f"{process.name} {process.outcome()}", hint=f"see the lines of {process.name} above")

    def _close(self) -> None:
        for process in reversed(self._processes):
            stop([process], self._events, say=lambda _: None)
        self._processes.clear()
        for name, text in self._before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
        self._before.clear()
        if self._logs is not None:
            self._logs.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def ensure_persia_service(*args: Any, **kwargs: Any) -> PersiaServiceCtx:
    """Return a :class:`PersiaServiceCtx` with these arguments."""
    return PersiaServiceCtx(*args, **kwargs)
