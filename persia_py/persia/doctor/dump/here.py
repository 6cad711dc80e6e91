"""The data of this host in a dump: versions, configuration, machine, the folder of a run, the surrounding job."""

import contextlib
import json
import os
import shlex
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from persia.doctor import disk, environment, gpu, logs, run, versions
from persia.doctor.dump.archive import FILE, MARGIN, Archive
from persia.doctor.dump.facts import Facts
from persia.doctor.log_lines import Source, merged
from persia.runtime.config_files import CONFIG, EMBEDDING_CONFIG, GLOBAL_CONFIG, find_config, find_persia_yml
from persia.runtime.errors import CheckpointError, PersiaError
from persia.runtime.places import Url, below
from persia.runtime.settings import settings, variable

LINES = 1000
"""The number of last lines of each log that are kept."""
_METRICS_S = 3.0
_LAST = 2 * (FILE + MARGIN)
"""The number of bytes at the end of a file that are read: the archive keeps at most 1 MiB of them."""
_VERIFIED = 2 << 30
"""The maximum size of a checkpoint whose files are verified, in bytes."""
_RUN_FILES = ("summary.json", "run.json", "RUN")
_METRICS_LINES = 200


def learn_secrets(archive: Archive, folder: Path | None) -> None:
    """Record the secrets of the environment, of the surrounding job, and of its configuration.

    Call this function before any text is collected.
    """
    archive.redactor.learn_variables(os.environ)
    of_job = "the secret, to be replaced in texts"
    if (why := archive.attempt(of_job, lambda: archive.redactor.learn_token(settings.token_file), "")) != "":
        archive.skip(of_job, why)
    for source in _configs(folder).values():
        with contextlib.suppress(PersiaError, OSError):  # the error is noted when the file is collected
            archive.redactor.learn_config(source() or "")


def collect(archive: Archive, facts: Facts, folder: Path | None) -> None:
    """Collect the information that this host has.

    Args:
        archive: Receives the files.
        facts: Collects the content of the summary.
        folder: The folder of a run; None if there is no run.
    """
    _versions(archive, facts)
    _config(archive, folder)
    if folder is not None:
        archive.attempt("logs", lambda: of_logs(archive, facts, logs.of_run(folder, last=_LAST)), None)
    archive.collect("environment.txt", lambda: "".join(f"{name}={value}\n" for name, value in environment.variables()))
    archive.collect("system.txt", lambda: "".join(_system(folder)))
    _doctor(archive, facts, folder)
    _job(archive, facts)
    archive.collect("stacks.txt", _stacks)
    if folder is not None:
        archive.attempt("run", lambda: of_run(archive, facts, folder), None)


@contextlib.contextmanager
def without_container_paths(archive: Archive) -> Iterator[dict[str, str]]:
    """Ignore the variables whose configuration files exist only in the containers, and note this in the archive.

    The archive already has the files from the containers. If the containers could not be queried, the variables of all
    missing files are ignored. Otherwise any other missing file remains an error. The block gets the ignored variables.
    """
    named = {CONFIG: "persia.yml", EMBEDDING_CONFIG: "embedding_config.yml", GLOBAL_CONFIG: "global_config.yml"}
    given = {name: os.environ.get(name, "") for name in named}
    missing = {name: path for name, path in given.items() if path and not Path(path).is_file()}
    of_container = archive.entries.get("inside/environment.txt")
    ignored: dict[str, str] = {}
    for name, path in missing.items():
        inside = f"inside/config/{named[name]}"
        if of_container is None:
            why = f"{path} is no file on this host, and the containers could not be asked whether they have it"
        elif inside in archive.entries and f"{name}={path}" in of_container.content.decode().splitlines():
            why = f"{path} is a path in the containers, and was not read on this host; see {inside}"
        else:
            continue
        archive.skip(name, why)
        ignored[name] = os.environ.pop(name)
    try:
        yield ignored
    finally:
        os.environ.update(ignored)


def _versions(archive: Archive, facts: Facts) -> None:
    facts.versions = archive.attempt("versions", versions.environment, [])
    archive.collect("versions.txt", lambda: f"{environment.block()}\n")
    archive.collect("packages.txt", _packages)
    third_party = Path(variable("THIRD_PARTY_PATH") or "third_party")
    archive.collect("third_party.txt", lambda: _overrides(third_party))


def _packages() -> str:
    import importlib.metadata

    found = {str(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items(), key=lambda each: each[0].lower()))


def _overrides(folder: Path) -> str | None:
    """Return the overrides of packaged components with their hashes; None if there are none."""
    import hashlib

    files = [each for each in sorted(folder.glob("*")) if each.is_file()] if folder.is_dir() else []
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each}\n" for each in files if each.name != "README.md"]
    record = folder / "BUILD_INFO"
    return "".join([*lines, record.read_text() if record.is_file() else ""]) if lines else None


def _config(archive: Archive, folder: Path | None) -> None:
    for name, source in _configs(folder).items():
        archive.collect(name, source, strict=True)
    archive.collect("config/changed.txt", lambda: _changed(_own(folder)), strict=True)


def _configs(folder: Path | None) -> dict[str, Callable[[], str | None]]:
    """Return the configurations: for each name in the archive, a function that reads it."""
    return {
        "config/run.yml": lambda: _file(_own(folder)),
        "config/persia.yml": lambda: _file(find_persia_yml()),
        "config/embedding_config.yml": partial(_found, EMBEDDING_CONFIG, "embedding_config.yml"),
        "config/global_config.yml": partial(_found, GLOBAL_CONFIG, "global_config.yml"),
    }


def _own(folder: Path | None) -> Path | None:
    return None if folder is None else folder / "persia.yml"


def _found(named_by: str, name: str) -> str | None:
    return _file(find_config(named_by, name))


def _file(path: Path | None) -> str | None:
    """Return the text of a file, or the end of a large file; None if it does not exist."""
    if path is None or not path.is_file():
        return None
    with path.open("rb") as file:
        cut = max(0, path.stat().st_size - _LAST)
        file.seek(cut)
        if cut:
            file.readline(_LAST // 4)  # start at a line, unless lines are very long
        return file.read(_LAST).decode(errors="replace")


def _changed(own: Path | None) -> str | None:
    """Return the keys of a persia.yml that differ from their defaults, one per line."""
    from persia.config.document import open_document

    path = own if own is not None and own.is_file() else find_persia_yml()
    if path is None:
        return None
    return "".join(f"{line}\n" for line in _differing("", open_document(path).checked()))


def _differing(prefix: str, block: Any) -> Iterator[str]:
    for name, field in type(block).model_fields.items():
        value, key = getattr(block, name), f"{prefix}{field.alias or name}"
        default = field.get_default(call_default_factory=True)
        if hasattr(type(value), "model_fields"):
            if default is None:
                yield f"{key}: given"
            yield from _differing(f"{key}.", value)
        elif value != default:
            yield f"{key}: {json.dumps(value, default=str, ensure_ascii=False)}"


def _doctor(archive: Archive, facts: Facts, folder: Path | None) -> None:
    def report() -> str:
        own = _own(folder)
        path = find_persia_yml() or (own if own is not None and own.is_file() else None)
        lines: list[str] = []
        for check in run.checks(path):
            lines += run.lines(check)
            if check.status in ("fail", "warn"):
                facts.problems.append(check)
        return "".join(f"{line}\n" for line in lines)

    archive.collect("doctor.txt", report)


def _job(archive: Archive, facts: Facts) -> None:
    """Query the surrounding job for its status, and each process for its metrics."""
    from persia.doctor import job_status
    from persia.runtime.job import job_name

    url = settings.nats_url
    if url is None:
        archive.skip("status.json", "PERSIA_NATS_URL is not set; for a running job of persia up: . runs/NAME/job.env")
        return
    processes: list[job_status.Process] = []

    def status() -> str:
        found = job_status.status(url, job_name())
        processes.extend(found.processes)
        facts.status = f"{len(found.processes)} process{'' if len(found.processes) == 1 else 'es'}; " + (
            "; ".join(one.text for one in found.problems) or "no problem"
        )
        return found.to_json()

    archive.collect("status.json", status)
    for one in processes:
        if one.metrics:
            name = f"metrics/{one.service}-{one.index}.txt"
            archive.collect(name, partial(_page, f"http://{one.metrics}/metrics"))


def _page(url: str) -> str:
    with urlopen(url, timeout=_METRICS_S) as page:  # noqa: S310 - an address of the job
        return str(page.read().decode(errors="replace"))


def _stacks() -> str | None:
    from persia.debug.ranks import running, stacks_of

    found = running()
    return "".join(f"=== {entry.title}\n{stacks_of(entry)}\n" for entry in found) or None


def of_run(archive: Archive, facts: Facts, folder: Path) -> None:
    """Collect the folder of a run: its summary, the last calls of each rank, its checkpoints."""
    for name in _RUN_FILES:
        archive.collect(f"run/{name}", partial(_file, folder / name))
    archive.collect("run/metrics.jsonl", lambda: _tail(folder / "metrics.jsonl", _METRICS_LINES))
    for path in sorted(folder.glob("flight/*.json")):
        archive.collect(f"run/flight/{path.name}", partial(_file, path))
    for path in sorted({*folder.glob("flight/*")} - {*folder.glob("flight/*.json")}):
        archive.skip(f"run/flight/{path.name}", "not text: torch's own recording, which must be sent separately")
    for path in sorted(folder.glob("digest/*"))[-64:]:
        archive.collect(f"run/digest/{path.name}", partial(_tail, path, LINES))
    for path in sorted(folder.rglob("poison/*.json"))[-64:]:
        archive.collect(f"run/poison/{path.name}", partial(_without_data, path))
    archive.collect("checkpoints.txt", lambda: _checkpoints(folder, facts))
    summary: dict[str, Any] = archive.attempt("run/summary.json", lambda: _summary(folder), {})
    if "status" in summary:
        facts.status = f"run {summary.get('name', folder.name)}: {summary['status']}, step {summary.get('step', 0)}"
        facts.ends += [f"summary.json: {summary['error']}"] if summary.get("error") else []


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(_file(folder / "summary.json") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def of_logs(archive: Archive, facts: Facts, sources: list[Source]) -> None:
    """Add the last lines of each log, and collect facts from these lines for the summary."""
    kept = []
    for each in sources:
        name, lines = f"logs/{each.name}.log", deque[str](maxlen=LINES)
        archive.attempt(name, partial(lines.extend, each.lines), None)
        if lines or name not in archive.skipped:
            archive.add(name, "".join(f"{line}\n" for line in lines))
        kept.append(Source(each.name, lines, each.rank, each.since))
    for line in merged(kept):
        facts.read(line)


def _tail(path: Path, count: int) -> str | None:
    text = _file(path)
    return None if text is None else "".join(f"{line}\n" for line in text.removesuffix("\n").split("\n")[-count:])


def _without_data(path: Path) -> str:
    """Return the record of a failed batch without the values of its rows."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return json.dumps({name: value for name, value in found.items() if name != "meta"}, indent=1)


def _checkpoints(folder: Path, facts: Facts) -> str | None:
    """Return a line for each checkpoint of a run, and the result of verifying the newest one."""
    from persia.trainer.run_folder import find_run, is_run, saves_of
    from persia_core import checkpoint

    if is_run(folder):
        found_run = find_run(folder)
        places = [saves_of(found_run), found_run.best]
    else:
        root = below(settings.checkpoint_root, "") if settings.checkpoint_root else folder / "checkpoints"
        places = [root] if isinstance(root, Url) else [each for each in sorted(root.glob("*")) if each.is_dir()]
    found = [
        entry
        for place in places
        if isinstance(place, Url) or place.is_dir()
        for entry in checkpoint.listing(place, verify=False)  # _verified() verifies the newest one
    ]
    whole = [entry for entry in found if entry["problem"] is None]
    lines = [
        f"{each['path']}  step {each['step']}  {each['rows']:,} rows  {each['bytes']:,} bytes  {each['created_at']}"
        if each["problem"] is None
        else f"{each['path']}  BROKEN: {each['problem']}"
        for each in found
    ]
    if whole:
        newest = max(whole, key=lambda entry: entry["step"])
        verified = _verified(newest)
        lines.append(f"verify {newest['path']}: {verified}")
        facts.newest = f"{newest['path']}, step {newest['step']}, {newest['created_at']}: {verified}"
    return "".join(f"{line}\n" for line in lines) or None


def _verified(entry: dict[str, Any]) -> str:
    from persia_core.checkpoint import Checkpoint

    if entry["bytes"] > _VERIFIED:
        command = f"persia ckpt verify {shlex.quote(str(entry['path']))}"
        return f"not verified, it is larger than {_VERIFIED >> 30} GiB; {command}"
    try:
        Checkpoint(entry["path"]).verify()
    except CheckpointError as error:
        return f"DAMAGED, {error}"
    except PersiaError as error:
        return f"not verified, {error}"
    return "every file has its size and hash"


def _system(folder: Path | None) -> Iterator[str]:
    """Yield lines about processors, memory, disks and GPUs."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield f"processors: {os.cpu_count()}, usable {len(os.sched_getaffinity(0))}, load {os.getloadavg()}\n"
    yield f"memory: {disk.size(memory.total)}, available {disk.size(memory.available)}\n"
    yield f"swap: {disk.size(swap.total)}, used {disk.size(swap.used)}\n"
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        most = limit.read_text().strip()
        yield f"memory limit of this container: {disk.size(int(most)) if most.isdecimal() else 'none'}\n"
    places = [Path.cwd(), folder, *(Path(each) for each in (settings.checkpoint_root, settings.run_dir) if each)]
    for place in dict.fromkeys(each.absolute() for each in places if each is not None and each.is_dir()):
        usage = shutil.disk_usage(place)
        yield f"disk of {place}: {disk.size(usage.total)}, free {disk.size(usage.free)}\n"
    found = gpu.facts()
    yield f"GPUs: {'; '.join(found.smi or ()) or found.smi_error or 'none'}\n"
    yield "the largest processes:\n"
    seen = [each.info for each in psutil.process_iter(["pid", "name", "memory_info", "cpu_times"])]
    sized = sorted((each for each in seen if each["memory_info"]), key=lambda each: -each["memory_info"].rss)
    for each in sized[:10]:
        yield f"  {each['pid']:>8}  {disk.size(each['memory_info'].rss):>10}  {each['name']}\n"
