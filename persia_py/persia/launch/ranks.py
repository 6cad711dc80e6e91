"""Jobs on this host from a ``persia.yml`` with overrides, and tests of one batch with ranks or servers."""

import os
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from persia.checkpoint.object_store import ObjectStore
from persia.config import Config, load_config
from persia.config.show import to_yaml
from persia.launch import nn_worker
from persia.launch.job_config import MAX_REPLICAS, JobConfig, Sizes, is_persia_yml, read_job_config
from persia.launch.process import Process
from persia.launch.supervision import Events
from persia.launch.up import Commands, run_job, up_command
from persia.runtime import job
from persia.runtime.config_files import CONFIG, CONFIG_FOLDER, EMBEDDING_CONFIG
from persia.runtime.errors import ConfigError, PersiaError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.places import Place, Url, below
from persia.runtime.settings import settings
from persia.trainer import one_batch

_logger = get_logger("launch")


def check_devices(ranks: int) -> None:
    """Check, before anything starts, that each rank has a GPU, if ranks train on GPUs (``GPU_NUM`` above 0).

    Raises:
        UsageError: There are fewer GPUs than ranks, or more ranks than a job may have.
    """
    if ranks > MAX_REPLICAS:
        raise UsageError(f"--nproc {ranks}: a job on one host has at most {MAX_REPLICAS} ranks")
    wanted = os.environ.get("GPU_NUM", "").strip()
    if not wanted.isdecimal() or int(wanted) == 0:
        processors = len(os.sched_getaffinity(0))
        if ranks > processors:
            count = "1 processor" if processors == 1 else f"{processors} processors"
            _logger.warning("%d ranks share %s, which makes each step slower", ranks, count)
        return
    import torch

    there = torch.cuda.device_count()
    if ranks > there:
        raise UsageError(
            f"--nproc {ranks}: {ranks} GPUs requested, {there} visible; with GPU_NUM={wanted}, each rank needs a GPU",
            hint=f"--nproc {there}, or train on the CPU: GPU_NUM=0"
            if there
            else "persia doctor --only gpu; or train on the CPU: GPU_NUM=0",
        )


def train(config: Config, file: Path, ranks: int, *, name: str | None = None) -> int:
    """Train with several ranks on this host. Start NATS, a server, a middleware, data-compose and the ranks.

    With the block ``profile``, the profile of the run is shown at its end.

    Args:
        config: The configuration, including overrides.
        file: The file of the configuration.
        ranks: The number of ranks.
        name: The name of the run; an interrupted run of that name is resumed. None means ``run.name``, or the time.

    Returns:
        The exit code of the job.

    Raises:
        ConfigError: The name of the run is not a valid job name.
        UsageError: There are too many ranks or too few GPUs, or the run is finished or was trained in one process.
    """
    check_devices(ranks)
    command = _command(config, file, ranks)
    with one_batch.private_folder() as folder:
        job_config = _job(config, folder, Sizes(ranks=ranks, name=name), command)
        shown = f"{config.run.dir}/{job_config.job}"
        alone = command.replace(f" --nproc {ranks}", "", 1)
        commands = Commands(f"{command} --set run.name=NAME", f"{command} --resume {shlex.quote(shown)}", alone)
        return run_job(_with_env(job_config, _variables(config, file, ranks)), file, commands)


def up(file: Path, overrides: Sequence[str], sizes: Sizes) -> int:
    """Run the job of a ``persia.yml`` with overrides. See :func:`persia.launch.up.up`.

    Args:
        file: The ``persia.yml``.
        overrides: Changes of keys, each as ``KEY=VALUE``.
        sizes: The numbers of processes, and the name of the run.

    Raises:
        ConfigError: The file or an override is invalid.
        UsageError: The file is not a ``persia.yml``, or the run is finished or was trained in one process.
    """
    if not is_persia_yml(file):
        raise UsageError(f"--set: {file} is not a persia.yml", hint=f"change the values in {file}")
    config = load_config(file, overrides)
    changes = _set(_without_name(config))
    command, alone = f"{up_command(file, sizes)}{changes}", f"persia train {shlex.quote(str(file))}{changes}"
    with one_batch.private_folder() as folder:
        job_config = _job(config, folder, sizes, command)
        commands = Commands(f"{command} --name NAME", f"{command} --name {job_config.job}", alone)
        return run_job(_with_env(job_config, {CONFIG_FOLDER: str(config.folder)}), file, commands)


def _command(config: Config, file: Path, ranks: int) -> str:
    """Return the command that trains, without the name of the run."""
    return f"persia train {shlex.quote(str(file))} --nproc {ranks}{_set(_without_name(config))}"


def _without_name(config: Config) -> list[str]:
    """Return the overrides of a configuration except for the name of the run."""
    return [each for each in config.origin.overrides if not each.startswith("run.name=")]


def _set(overrides: Sequence[str]) -> str:
    return "".join(f" --set {shlex.quote(each)}" for each in overrides)


def _job(config: Config, folder: Path, sizes: Sizes, command: str) -> JobConfig:
    """Return the job for a configuration, read from a copy in a folder. Its messages name the user's command."""
    try:
        return read_job_config(write(config, folder), sizes, folder=config.folder)
    except ConfigError as error:
        error.hint = f"correct each error, then run: {command}"
        raise


def test(config: Config, file: Path, ranks: int) -> int:
    """Train on one batch with several ranks, in temporary folders. Each rank prints four ticks.

    Args:
        config: The configuration.
        file: The file of the configuration, for messages.
        ranks: The number of ranks.

    Returns:
        The exit code: 0 if all steps passed on all ranks.

    Raises:
        UsageError: There are too many ranks or too few GPUs.
        StorageError: The storage of the run cannot be written.
    """
    check_devices(ranks)
    one_batch.check_storage(config)
    with one_batch.private_folder() as folder:
        short = one_batch.shortened(config, folder)
        short = short.with_blocks(train=short.train.model_copy(update={"start_from": None}))
        command = f"persia train {shlex.quote(str(file))} --test --nproc {ranks}"
        job_config = _job(short, folder, Sizes(ranks=ranks, name="test"), command)
        variables = _variables(config, file, ranks) | {one_batch.VARIABLE: "stream"}
        return run_job(_with_env(job_config, variables).model_copy(update={"restarts": 0}), file)


def test_on_servers(config: Config, file: Path) -> int:
    """Train on one batch with the servers of the surrounding job, as its only rank.

    The rows on the servers are replaced. The checkpoint is written below ``PERSIA_CKPT_DIR``, a folder or a URL, and
    then removed.

    Args:
        config: The configuration, whose slots must equal those of the servers.
        file: The file of the configuration, for messages.

    Returns:
        The exit code; after a signal, that of :func:`persia.launch.supervision.stopped_by`.

    Raises:
        UsageError: ``PERSIA_CKPT_DIR`` is not set.
    """
    root = settings.checkpoint_root
    if root is None:
        raise UsageError(
            "persia train --test on servers: PERSIA_CKPT_DIR is not set",
            hint="set PERSIA_CKPT_DIR as in the other processes of the job, or test without servers: --local",
        )
    name = f"test-{secrets.token_hex(4)}"  # not the form of a job's run names, so no later run resumes from it
    with one_batch.private_folder() as folder:
        short = one_batch.shortened(config, folder)
        run = folder / "run"
        run.mkdir()
        (run / job.RUN).write_text(f"{name}\n")
        variables = _variables(config, file, 1) | {
            CONFIG: str(write(short, folder)),
            "PERSIA_RUN_DIR": str(run),
            one_batch.VARIABLE: "own",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
        }
        environment = {**os.environ, **variables}
        environment.pop(EMBEDDING_CONFIG, None)
        events = Events()
        words = [sys.executable, "-m", "persia.launch.rank_main"]
        try:
            with events.signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
                rank = Process("rank 0", words, env=environment, line=None, ended=events.ended)
                return nn_worker.supervise([rank], events, None)
        finally:  # a signal can interrupt the removal, for example if the store does not respond
            _remove(below(root, name))


def _remove(checkpoints: Place) -> None:
    """Remove the checkpoints of a test. If this fails, a warning is logged."""
    try:
        if isinstance(checkpoints, Url):
            ObjectStore(str(checkpoints.parent)).remove(checkpoints.name)
        else:
            shutil.rmtree(checkpoints)
    except FileNotFoundError:
        return
    except (PersiaError, OSError) as error:
        is_url = isinstance(checkpoints, Url)
        step = f"delete the objects below {checkpoints}/" if is_url else f"rm -r {shlex.quote(str(checkpoints))}"
        _logger.warning("the checkpoint of the test could not be removed: %s; next: %s", error, step)


def write(config: Config, folder: Path) -> Path:
    """Write a configuration with its overrides into a folder, and return the path of the file."""
    path = folder / "persia.yml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return path


def _variables(config: Config, file: Path, ranks: int) -> dict[str, str]:
    """Return the environment of the processes: the import path of the user's modules, and the GPUs."""
    variables = {CONFIG_FOLDER: str(config.folder), f"{one_batch.VARIABLE}_FILE": str(file)}
    gpus = os.environ.get("GPU_NUM", "").strip()
    return variables | ({"GPU_NUM": str(ranks)} if gpus.isdecimal() and int(gpus) else {})


def _with_env(config: JobConfig, variables: Mapping[str, str]) -> JobConfig:
    return config.model_copy(update={"env": {**config.env, **variables}})
