"""The stack in containers: whether it exists on this host, its image, and commands inside it."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from persia.doctor.check import Check
from persia.runtime.errors import UnreachableError
from persia.runtime.exit_codes import ExitCode

SERVICE = "trainer"
INSTALL = "install Docker with its compose plugin; to check the plugin: docker compose version"
"""The next step if Docker is not installed."""
FOLDER_OR_ENGINE = "run this in the folder of docker-compose.yaml; check the Docker engine: docker info"
"""The next step if ``docker compose`` fails."""
STACK_NEEDED = (
    "run this in the folder of docker-compose.yaml, with the Docker engine running (docker info) and the images built "
    "(docker compose build)"
)
"""The next step if nothing can run in containers here."""
_ASK_S = 20.0
"""Seconds within which the Docker engine must respond."""
_RUN_S = 300.0
"""The time limit of a check in the image, in seconds; the first import of PyTorch may take a minute."""

_DISTRIBUTIONS = (
    "import importlib.metadata, json; "
    "print(json.dumps({each.metadata['Name'].lower(): each.version for each in importlib.metadata.distributions()}))"
)


def ask(*words: str, seconds: float = _ASK_S, given: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run ``docker`` with some arguments, and return its output.

    Args:
        *words: The arguments.
        seconds: The time limit, in seconds.
        given: The standard input; None means empty.

    Raises:
        UnreachableError: docker is not installed, or does not respond in time.
    """
    try:
        done = subprocess.run(
            ["docker", *words], input=(given or "").encode(), capture_output=True, timeout=seconds, check=False
        )
        # `text=True` would convert carriage returns inside a line to line ends.
        said, errors = (each.decode(errors="replace") for each in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, said, errors)
    except FileNotFoundError as error:
        raise UnreachableError("docker is not on PATH", hint=INSTALL) from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"docker {words[0]} did not respond within {seconds:.0f} s", hint="check the Docker engine: docker info"
        ) from error


def next_step() -> str:
    """Return the next step if nothing can run in containers here."""
    return INSTALL if shutil.which("docker") is None else STACK_NEEDED


def unavailable() -> str | None:
    """Return why nothing can run in containers here; None if it can."""
    if shutil.which("docker") is None:
        return "docker is not on PATH"
    try:
        engine = ask("info", "--format", "{{.ServerVersion}}")
        if engine.returncode != 0:
            return f"cannot use the Docker engine: {last_line(engine)}"
        composed = ask("compose", "config", "--quiet")
        if composed.returncode != 0:
            return f"no stack in {Path.cwd()}: {last_line(composed)}"
    except UnreachableError as error:
        return str(error)
    name = image()
    if not name:
        return f"the stack in {Path.cwd()} has no service {SERVICE}"
    if ask("image", "inspect", name).returncode != 0:
        return f"the image {name} is not built: docker compose build {SERVICE}"
    return None


def last_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the last line of a command's output, or its exit code."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def settings() -> Mapping[str, Any]:
    """Return the trainer's settings, as ``docker compose config`` resolves them; empty if they do not exist."""
    done = ask("compose", "config", "--format", "json")
    if done.returncode != 0:
        return {}
    found: Mapping[str, Any] = json.loads(done.stdout).get("services", {}).get(SERVICE, {})
    return found


def image() -> str:
    """Return the name of the trainer's image; empty if it is unknown."""
    return str(settings().get("image", ""))


def run_words(*words: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs something in a new trainer container, without the rest of the stack."""
    return ["docker", "compose", "run", "--rm", "--no-deps", *options, SERVICE, *words]


def checks() -> Iterator[Check]:
    """Yield the checks of the image: its identity, its mounts, and the doctor inside it."""
    reason = unavailable()
    if reason is not None:
        remedy = next_step()
        why = "no container of the stack can be started from the current folder"
        yield Check("image", "fail", reason, why, remedy, ExitCode.UNREACHABLE)
        return
    yield from in_use(settings())
    words = run_words("persia", "doctor", "--only", "versions,gpu", "--json", options=["--no-TTY"])
    done = ask(*words[1:], seconds=_RUN_S)
    start = done.stdout.find("[")
    try:
        found = json.loads(done.stdout[start:]) if start >= 0 else None
    except ValueError:
        found = None
    if found is None:
        why = f"exit code {done.returncode}: {last_line(done)}"
        yield Check("image", "fail", "persia doctor does not run in the image", why, " ".join(words), ExitCode.FAILED)
        return
    for each in found:
        inner = Check(**{**each, "code": ExitCode(each["code"])})
        yield Check(f"image {inner.name}", inner.status, inner.found, inner.why, inner.next, inner.code)


def in_use(trainer: Mapping[str, Any]) -> Iterator[Check]:
    """Yield checks that show the settings of the trainer's containers: image, start-up hook, mounts and variables.

    Args:
        trainer: The settings of the service.
    """
    mounts = trainer.get("volumes", [])
    yield Check("image", "ok", str(trainer.get("image")))
    workspace = next((each["source"] for each in mounts if each.get("target") == "/workspace"), None)
    hook = None if workspace is None else Path(workspace, "startup-hook.sh")
    yield Check("startup hook", "ok", str(hook) if hook is not None and hook.is_file() else "none in CUR_DIR")
    yield Check("mounts", "ok", "; ".join(f"{each.get('source')} as {each.get('target')}" for each in mounts))
    missing = [each["source"] for each in mounts if each.get("type") == "bind" and not Path(each["source"]).exists()]
    if missing:
        why = "docker creates an empty folder there that belongs to root; the container may be unable to write to it"
        yield Check("mounts", "fail", f"do not exist: {', '.join(missing)}", why, f"mkdir -p {shlex.join(missing)}")
    names = sorted(name for name, value in trainer.get("environment", {}).items() if value is not None)
    yield Check("variables", "ok", ", ".join(names))


def differences() -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return the packages whose versions differ between this machine and the image, and those that are equal.

    Returns:
        Rows of name, version here, version in the image; ``-`` means not installed.

    Raises:
        UnreachableError: Nothing can run in the image.
    """
    import importlib.metadata

    if (reason := unavailable()) is not None:
        raise UnreachableError(f"--diff-env: {reason}", hint=next_step())
    words = run_words("python", "-c", _DISTRIBUTIONS, options=["--no-TTY"])
    done = ask(*words[1:], seconds=_RUN_S)
    if done.returncode != 0:
        raise UnreachableError(
            f"--diff-env: cannot list the packages of the image: {last_line(done)}",
            hint="check the image: persia doctor --image",
        )
    there: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    here = {str(each.metadata["Name"]).lower(): each.version for each in importlib.metadata.distributions()}
    return compared(here, there)


def compared(
    here: Mapping[str, str], there: Mapping[str, str]
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return the packages with different versions, and those with equal ones; see :func:`differences`."""
    different: list[tuple[str, str, str]] = []
    equal: list[tuple[str, str, str]] = []
    for name in sorted({*here, *there}):
        row = name, here.get(name, "-"), there.get(name, "-")
        (equal if row[1] == row[2] else different).append(row)
    # Packages that exist on both sides come first, because one side usually has more packages.
    return sorted(different, key=lambda row: ("-" in row[1:], row[0])), equal
