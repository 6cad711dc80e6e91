"""The data of the stack in a dump, collected on the host and inside the containers."""

import json
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from persia.doctor import compose, containers, logs, run, stack
from persia.doctor.containers import Container
from persia.doctor.dump import archive as archives
from persia.doctor.dump.archive import Archive
from persia.doctor.dump.facts import Facts
from persia.doctor.dump.here import of_logs
from persia.runtime.config_files import CONFIG, EMBEDDING_CONFIG, GLOBAL_CONFIG
from persia.runtime.errors import UnreachableError

_INSIDE_S = 300.0
"""The time limit for the dump inside the trainer's image, in seconds; the first import of PyTorch may take a minute."""
_EVENTS = 500
_MONITOR = r"""
exec 3<>/dev/tcp/127.0.0.1/8222
printf 'GET /%s HTTP/1.0\r\n\r\n' "$1" >&3
cat <&3
"""
_WORKSPACE = "/workspace"
_SECRET_FILE = "/run/persia/token"  # noqa: S105 - where services/persia.env puts it


def collect(archive: Archive, facts: Facts) -> None:
    """Collect the state of the stack in this folder."""
    settings: dict[str, Any] = archive.attempt("stack/config.json", _settings, {})
    facts.subject = f"stack {settings.get('name', '')} in {Path.cwd()}"
    for service in (settings.get("services") or {}).values():
        archive.redactor.learn_variables(service.get("environment") or {})
        for path in _configs(service):
            text = archive.attempt(f"the secrets of {path}", partial(path.read_text, errors="replace"), "")
            archive.redactor.learn_config(text)
    _learn_secret(archive)
    if settings:
        archive.collect("stack/config.json", lambda: json.dumps(archive.redactor.settings(settings), indent=1))
    archive.collect("stack/images.txt", lambda: _said("compose", "images"))
    there: list[Container] = archive.attempt("stack/containers.txt", containers.containers, [])
    if there:
        lines = [f"{each.name}  {each.state}  {each.id[:12]}\n" for each in there]
        checked = [each for each in there if each.last_check]
        lines += [f"{each.name}  {each.health}, last health check: {each.last_check}\n" for each in checked]
        archive.add("stack/containers.txt", "".join(lines))
    facts.ends += [f"{each.name}: {each.state}" for each in there if each.status != "running"]
    project = f"label=com.docker.compose.project={settings.get('name', '')}"
    archive.collect("stack/events.txt", lambda: _events(project))
    archive.collect("stack/doctor.txt", lambda: _doctor(facts))
    _nats(archive, there)
    archive.attempt("logs", lambda: of_logs(archive, facts, logs.of_stack()), None)
    archive.attempt("inside", lambda: _inside(archive, facts), None)


def _settings() -> dict[str, Any]:
    found = json.loads(_said("compose", "config", "--format", "json"))
    return found if isinstance(found, dict) else {}


def _configs(service: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the configurations of a service on this host: files that its variables name, inside its mounts."""
    variables = service.get("environment") or {}
    for name in (CONFIG, EMBEDDING_CONFIG, GLOBAL_CONFIG):
        path = PurePosixPath(service.get("working_dir") or _WORKSPACE) / str(variables.get(name) or "persia.yml")
        for mount in service.get("volumes") or []:
            if mount.get("type") == "bind" and path.is_relative_to(mount["target"]):
                here = Path(mount["source"]) / path.relative_to(mount["target"])
                if here.is_file():
                    yield here


def _learn_secret(archive: Archive) -> None:
    """Record the secret of the stack, to replace it in the logs. The secret is read in a container."""
    words = ["run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "cat", compose.SERVICE, _SECRET_FILE]
    try:
        done = compose.ask("compose", *words, seconds=60)
    except UnreachableError as error:
        archive.skip("the secret of the stack, to be replaced in texts", str(error))
        return
    if done.returncode == 0 and done.stdout.strip():
        archive.redactor.learn_secret(done.stdout.strip().encode())
    else:
        archive.skip("the secret of the stack, to be replaced in texts", compose.last_line(done))


def _said(*words: str, given: str | None = None) -> str:
    done = compose.ask(*words, given=given)
    if done.returncode != 0:
        raise UnreachableError(
            f"docker {' '.join(words[:2])}: {compose.last_line(done)}", hint=compose.FOLDER_OR_ENGINE
        )
    return done.stdout


def _events(project: str) -> str:
    """Return the last events of the containers: starts, exits, health, out of memory."""
    kinds = [f"event={each}" for each in ("create", "start", "die", "oom", "kill", "stop", "restart", "destroy")]
    job = [project, "label=com.docker.compose.oneoff=False"]  # excludes `docker compose run`, such as this dump
    filters = [word for each in [*job, *kinds] for word in ("--filter", each)]
    lines = _said("events", "--since", "24h", "--until", "0s", *filters).splitlines()
    return "".join(f"{line}\n" for line in lines[-_EVENTS:])


def _doctor(facts: Facts) -> str:
    lines: list[str] = []
    for check in stack.checks():
        lines += run.lines(check)
        if check.status in ("fail", "warn"):
            facts.problems.append(check)
    return "".join(f"{line}\n" for line in lines)


def _nats(archive: Archive, there: Sequence[Container]) -> None:
    server = next((each for each in there if each.service == "persia_nats_service" and each.status == "running"), None)
    for page in ("varz", "connz", "subsz"):
        name = f"stack/nats-{page}.json"
        if server is None:
            archive.skip(name, "the container of NATS is not running")
            continue
        words = ["exec", "--interactive", server.id, "bash", "-s", "--", page]
        archive.collect(name, partial(_monitor, *words))


def _monitor(*words: str) -> str:
    """Return the body of a page of NATS's monitoring."""
    _, _, body = _said(*words, given=_MONITOR).replace("\r\n", "\n").partition("\n\n")
    return body


def _inside(archive: Archive, facts: Facts) -> None:
    """Make a dump in the trainer's image, which has access to the job and its volumes, and add its files."""
    words = compose.run_words("persia", "dump", "-o", "-", options=["--no-TTY"])
    said = ""
    try:
        done = subprocess.run(words, capture_output=True, timeout=_INSIDE_S, check=False, stdin=subprocess.DEVNULL)
        said = done.stderr.decode(errors="replace").strip()
        files = archives.unpacked(done.stdout)
    except (OSError, EOFError, tarfile.TarError, subprocess.TimeoutExpired) as error:
        archive.skip("inside", f"persia dump in the trainer's image: {error}; its errors: {said[-500:]}")
        return
    for name, text in files.items():
        if name == archives.MANIFEST:
            skipped: dict[str, str] = archive.attempt(f"inside/{name}", partial(_skipped, text), {})
            archive.skipped.update({f"inside/{each}": why for each, why in skipped.items()})
        elif name == archives.SUMMARY:
            facts.status = facts.status or _line(text, "Status:")
            facts.newest = facts.newest or _line(text, "Newest checkpoint:")
        else:
            archive.add(f"inside/{name}", text)


def _skipped(manifest: str) -> dict[str, str]:
    return {str(name): str(why) for name, why in json.loads(manifest)["skipped"].items()}


def _line(text: str, head: str) -> str:
    found = next((line for line in text.splitlines() if line.startswith(f"* {head}")), "")
    return found.partition(head)[2].strip()
