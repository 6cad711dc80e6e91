"""``persia up``: starts, supervises and stops a whole job on this host."""

import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from persia.launch import nn_worker, threads
from persia.launch.job_config import JobConfig, Sizes, makes_token, read_job_config
from persia.launch.local_job import Command, LocalJob, private_folder
from persia.launch.logs import Logs
from persia.launch.process import Process
from persia.launch.supervision import SAVING_GRACE, Events, stop, stopped_by
from persia.runtime import files
from persia.runtime import job as jobs
from persia.runtime.errors import PersiaError, UsageError
from persia.runtime.exit_codes import AGAIN, ExitCode
from persia.runtime.logging import get_logger, next_step
from persia.trainer.profiling import profile_of, show_profile
from persia.trainer.run_folder import RunFolder, of_one_process

_logger = get_logger("up")

ENVIRONMENT = "job.env"
"""The file in the folder of a running job with the variables of its environment, for a shell."""
_NATS = "nats"
_PERMANENT = {
    *(ExitCode.FAILED, ExitCode.CONFIG, ExitCode.UNREACHABLE, ExitCode.CORRUPT, ExitCode.REFUSED),
    ExitCode.INTERRUPTED,
}
"""Exit codes after which a restart would not help."""
_TRAINER_GRACE = 15.0
"""The number of seconds that the trainer has to end and report the reason, after a process has failed permanently."""
_BACK_OFF = 1.0
"""Seconds between the end of a process and its restart."""


@dataclass(frozen=True)
class Commands:
    """The commands with which a user trains again, for messages.

    Attributes:
        new: The command for a new run, with NAME as a placeholder.
        again: The command that continues this interrupted run.
        alone: The command that trains in one process.
    """

    new: str
    again: str
    alone: str


def up(path: Path, sizes: Sizes | None = None) -> int:
    """Run the job that a file describes until its trainer ends, or until a signal.

    Args:
        path: A ``persia.yml``, or a file with the keys of :class:`persia.launch.job_config.JobConfig`.
        sizes: The numbers of processes, for a ``persia.yml``; None means the defaults.

    Returns:
        The trainer's exit code. After a signal: 0 if the run is finished or the job has no trainer, else that of
        :func:`persia.launch.supervision.stopped_by`.

    Raises:
        ConfigError: The file, or one that it names, is invalid.
        UsageError: A program was not found, ``sizes`` is given with a file that sets the numbers itself, or the run of
            a ``persia.yml`` is finished or was trained in one process.
    """
    config = read_job_config(path, sizes)
    command = up_command(path, sizes or Sizes())
    if config.config is None or Path(config.config) != path.resolve():
        new, again = f"`job: NAME` in {path}", command
    else:
        new, again = f"{command} --name NAME", f"{command} --name {config.job}"
    return run_job(config, path, Commands(new, again, f"persia train {shlex.quote(str(config.config))}"))


def up_command(path: Path, sizes: Sizes) -> str:
    """Return the command that starts a job, without the name of the run."""
    numbers = {"servers": sizes.servers, "middlewares": sizes.middlewares, "data-compose": sizes.data_compose}
    given = {**numbers, "ranks": sizes.ranks}
    options = "".join(f" --{name} {number}" for name, number in given.items() if number is not None)
    return f"persia up {shlex.quote(str(path))}{options}"


def run_job(config: JobConfig, path: Path, commands: Commands | None = None) -> int:
    """Run a job until its trainer ends, or until a signal. See :func:`up`.

    A recorded profile is shown at the end.

    Args:
        config: The job.
        path: The file of the job, for messages.
        commands: The commands with which the user trains again; None if the job cannot be continued, as after a test.

    Returns:
        The exit code of the job.

    Raises:
        UsageError: The run of this name is finished, or was trained in one process.
    """
    folder = Path(config.run_dir or Path("runs") / config.job).resolve()
    if config.trainer is not None and (summary := jobs.finished_summary(folder, of=config.job)) is not None:
        if config.config is not None:
            named = f": {commands.new}" if commands is not None else ""
            raise UsageError(
                f"{folder}: the run of this name is finished", hint=f"choose another name for the new run{named}"
            )
        nn_worker.report_finished(folder, summary, f"change `job` or `run_dir` in {path}")
        return 0
    if config.config is not None and of_one_process(folder):
        alone = f"persia train {shlex.quote(str(path))}" if commands is None else commands.alone
        raise UsageError(
            f"{folder}: the run of this name was trained in one process; a job would overwrite it",
            hint=f"continue it: {alone} --resume {shlex.quote(str(folder))}; or choose another name for the new run",
        )
    profile_before = profile_of(folder)
    with private_folder() as private_dir, Logs(folder / "logs") as logs:
        own = {"PERSIA_RUN_DIR": str(folder)} | ({} if makes_token(config) else {"PERSIA_TOKEN_FILE": config.token})
        local = LocalJob(
            name=config.job,
            servers=config.servers,
            middlewares=config.middlewares,
            config=Path(config.config) if config.config else None,
            embedding_config=Path(config.embedding_config) if config.embedding_config else None,
            global_config=Path(config.global_config) if config.global_config else None,
            private_dir=private_dir,
            state_dir=folder,
            env=own | config.env,
        )
        local.make_token()
        events = Events()
        with events.signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
            run = _Run(config, local, folder, events, logs)
            try:
                code = run.run()
            finally:
                run.stop()
        if code in (AGAIN, ExitCode.HUNG, ExitCode.INTERRUPTED) and commands is not None:
            run.say(f"next: {commands.again}")
    if code == 0 and profile_of(folder) != profile_before:
        try:
            show_profile(RunFolder(folder))
        except (PersiaError, OSError, ValueError) as error:
            _logger.warning("cannot show the profile: %s%s", error, next_step(error))
    return code


class _Run:
    """The processes of the job, in the order of their start.

    Attributes:
        say: A function that prints a line and logs it.
    """

    def __init__(self, config: JobConfig, local: LocalJob, folder: Path, events: Events, logs: Logs) -> None:
        self._config, self._local, self._folder = config, local, folder
        self._events, self._logs = events, logs
        self.say = logs.writer("up", stamped=True)
        self._processes: dict[str, Process] = {}
        self._commands: dict[str, Command] = {}
        self._restarts: dict[str, int] = {}
        # After a permanent failure: the exit code of the job, and the time at which to stop waiting for the trainer.
        self._failed: tuple[int, float] | None = None
        self._url = ""

    def run(self) -> int:
        """Start all processes, supervise them, and return the exit code of the job."""
        self._start_all()
        if self._config.trainer is None:
            self._say_environment()
        while True:
            event = self._events.next(self._timeout())
            if event is None and self._failed is not None:
                return self._failed[0]
            if isinstance(event, int):
                self.say(f"{signal.Signals(event).name}: ending the job")
                return self._interrupted(event)
            if isinstance(event, Process) and self._processes.get(event.name) is event:
                code = self._ended(event)
                if code is not None:
                    return code

    def stop(self) -> None:
        """Stop the running processes: trainer and data-compose first, NATS last."""
        for kind in ("trainer", "data-compose", "middleware", "server", _NATS):
            group = [process for name, process in self._processes.items() if name.startswith(kind)]
            stop(group, self._events, say=self.say)
        self._environment.unlink(missing_ok=True)

    def _start_all(self) -> None:
        self._start(self._local.nats())
        self._url = self._local.nats_url(self._processes[_NATS])
        self._write_environment()
        for index in range(self._config.servers):
            self._start(self._local.part("server", index, self._url))
        for index in range(self._config.middlewares):
            self._start(self._local.part("middleware", index, self._url))
        if self._config.data_compose is not None:
            replicas = self._config.data_compose.replicas
            shared = self._threads(replicas, "data script")
            for index in range(replicas):
                options = ["--replica-index", str(index), "--replica-size", str(replicas)]
                self._launch(f"data-compose-{index}", "data-loader", self._config.data_compose.entry, options, shared)
        if self._config.trainer is not None:
            options = ["--nproc-per-node", str(self._config.trainer.ranks), "--node-rank", "0", "--nnodes", "1"]
            shared = self._threads(self._config.trainer.ranks, "rank")
            self._launch("trainer", "nn-worker", self._config.trainer.entry, options, shared)

    def _threads(self, processes: int, name: str) -> dict[str, str]:
        return threads.variables(processes, name, self.say, self._local.client_env(self._url))

    def _launch(self, name: str, verb: str, entry: str | None, options: list[str], shared: dict[str, str]) -> None:
        words = [sys.executable, "-m", "persia.launch.cli", verb, *options, *([entry] if entry else [])]
        self._start(Command(name, words, self._local.client_env(self._url) | shared))

    def _start(self, command: Command) -> None:
        self._commands[command.name] = command
        self._processes[command.name] = Process(
            command.name,
            command.words,
            env=command.env,
            line=self._logs.writer(command.name, shown=command.name != _NATS),  # the log of NATS is rarely of interest
            ended=self._events.ended,
        )

    def _ended(self, process: Process) -> int | None:
        """Restart a process that ended, or return the exit code of the job."""
        code = process.code
        if process.name == "trainer" and (code == 0 or self._failed is not None):
            return code if code >= 0 else AGAIN
        self.say(f"{process.name} {process.outcome()}, see {self._logs.folder / process.name}.log")
        restarts = self._restarts.get(process.name, 0)
        if code in _PERMANENT or restarts >= self._config.restarts:
            final = code if code > 0 else AGAIN
            if process.name == "trainer" or "trainer" not in self._processes:
                return final
            self._failed = self._failed or (final, time.monotonic() + _TRAINER_GRACE)
            return None
        self._restarts[process.name] = restarts + 1
        self.say(f"restarting {process.name} ({restarts + 1} of {self._config.restarts})")
        time.sleep(_BACK_OFF)
        if process.name == _NATS:
            self._start(self._local.nats(int(self._url.rsplit(":", 1)[1])))
        else:
            self._start(self._commands[process.name])
        return None

    def _timeout(self) -> float | None:
        return None if self._failed is None else max(0.0, self._failed[1] - time.monotonic())

    def _interrupted(self, number: int) -> int:
        if self._config.trainer is None:
            return 0
        stop([self._processes["trainer"]], self._events, grace=SAVING_GRACE + 5, say=self.say)
        return 0 if jobs.finished_summary(self._folder, of=self._config.job) is not None else stopped_by(number)

    @property
    def _environment(self) -> Path:
        return self._folder / ENVIRONMENT

    def _write_environment(self) -> None:
        """Write the variables with which commands in another shell reach this job. None of them is secret."""
        variables = sorted(self._local.settings(self._url).items())
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables if name.startswith("PERSIA_")]
        files.write_whole(self._environment, "".join(lines).encode())
        if self._config.trainer is not None:
            self.say(f"for commands such as `persia status` in another shell: . {shlex.quote(str(self._environment))}")

    def _say_environment(self) -> None:
        self.say("the servers run until Ctrl-C; to use them, run in another shell:")
        variables = sorted(self._local.settings(self._url).items())
        for name, value in variables:
            if name.startswith("PERSIA_"):
                self.say(f"export {name}={shlex.quote(value)}")
        if others := [name for name, _ in variables if not name.startswith("PERSIA_")]:
            self.say(f"also set the variables of env, whose values may be secret: {', '.join(others)}")
