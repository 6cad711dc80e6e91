"""Tests a release as users install it: its wheels in a bare environment without Rust, and its images."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from release_source import ROOT, ReleaseError

EXAMPLE = ROOT / "examples" / "dlrm"
QUICK = {"DLRM_EPOCHS": "1", "DLRM_BATCH_SIZE": "4096"}
"""Variables with which the demo takes a few seconds."""
AUC = 0.85
"""The minimum AUC of this demo; a random guess has 0.5."""
DEMO = ("torchmetrics",)
"""The packages that the demo needs in addition to persia."""
PROGRAMS = ("persia-embedding-sharded-server", "persia-embedding-sharded-middleware")
INHERITED = re.compile(r"PIP_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|(https?|no|all)_proxy|LANG|TMPDIR", re.IGNORECASE)
"""The variables that a bare environment keeps: how packages are downloaded."""
AGAIN = "remove the folder of the release, then repeat the command"
READ_LOG = "read the log of this step, whose path is printed above"

Run = Callable[..., str]
"""Runs a command, with ``cwd`` and ``env``; returns its output."""


class Bare:
    """A virtual environment with the wheels of a release. It has nothing of this clone, and no compiler on its PATH.

    Args:
        folder: The folder of the environment. An existing folder is replaced.
        run: Runs the commands.
        python: The interpreter.
    """

    def __init__(self, folder: Path, run: Run, python: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self._run = folder, run
        self.bin = folder / "venv" / "bin"
        run([python, "-m", "venv", folder / "venv"], cwd=folder)
        for program in ("cargo", "rustc", "cc"):
            if shutil.which(program, path=self.env()["PATH"]):
                raise ReleaseError(
                    f"{program} is on the PATH of the bare environment, {self.bin}: {python} -m venv has put it there",
                    "use another Python: rm -r .venv-release; make release PYTHON=PATH_OF_PYTHON",
                )

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables of a command in the environment."""
        kept = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
        return {**kept, "HOME": str(self.folder), "PATH": str(self.bin), "OMP_NUM_THREADS": "1", **(extra or {})}

    def run(self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Run a command of the environment and return its output."""
        return self._run([self.bin / words[0], *words[1:]], cwd=cwd or self.folder, env=self.env(env))

    def install(self, wheels: list[Path], *, borrow: Path | None) -> None:
        """Install wheels with their dependencies, in the versions of ``requirements/runtime.txt``.

        Args:
            wheels: The wheels of a release.
            borrow: The environment whose packages are used as dependencies. None: the dependencies are installed.
        """
        pip = ("python", "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--no-compile")
        if borrow is not None:
            self.run(*pip, "--no-deps", "--no-index", *wheels)
            code = "import sysconfig; print(sysconfig.get_path('purelib'))"
            own, lent = (
                self._run([python, "-c", code], env=self.env()).strip()
                for python in (self.bin / "python", borrow / "bin/python")
            )
            # Paths in a .pth file are searched last, and .pth files below them are not read.
            Path(own, "dependencies.pth").write_text(f"{lent}\n")
            return
        constraints = self.folder / "constraints.txt"
        constraints.write_text(locked((ROOT / "requirements" / "runtime.txt").read_text()))
        named = [f"{wheel}[serve]" if wheel.name.startswith("persia-") else str(wheel) for wheel in wheels]
        self.run(*pip, "--only-binary", "persia,persia-core,persia-server", "--constraint", constraints, *named, *DEMO)
        self.run("python", "-m", "pip", "check")

    def versions(self, version: str, revision: str) -> None:
        """Check the versions that the programs of the environment report."""
        check_versions(self.run("persia", "--version"), version, revision)
        code = "import persia, persia_core; print(persia.__file__, persia_core.__file__, sep='\\n')"
        for file in self.run("python", "-c", code).split():
            if not Path(file).is_relative_to(self.folder):
                raise ReleaseError(f"the bare environment imports {file}", "repeat the command without BORROW")
        for program in PROGRAMS:
            said = self.run(program, "--version")
            if f"{program} {version} " not in said:
                raise ReleaseError(f"{program} --version says {said.strip()!r}, expected {version}", AGAIN)

    def train(self) -> str:
        """Train the demo in one process, and on servers if there is a nats-server. Return a description."""
        work = self.folder / "dlrm"
        shutil.copytree(EXAMPLE, work, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        self.run("persia", "doctor", "--only", "versions", cwd=work)
        self.run("python", "train.py", cwd=work, env=QUICK)
        one = check_summary(work / "runs")
        nats = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
        if nats is None:
            return f"AUC {one:.3f} in one process; not on servers, because there is no nats-server here"
        (self.bin / "nats-server").symlink_to(nats)
        (self.folder / "up").mkdir()
        self.run("persia", "up", work / "stack.yml", cwd=self.folder / "up", env=QUICK)
        two = check_summary(self.folder / "up" / "runs")
        return f"AUC {one:.3f} in one process, {two:.3f} on servers"


def locked(requirements: str) -> str:
    """Return a lock file as constraints: without hashes, which pip would demand of local wheels too."""
    lines = re.findall(r"^([a-z0-9][^\s=]*==[^\\\n]*?)\s*\\?$", requirements, re.MULTILINE | re.IGNORECASE)
    return "".join(f"{line}\n" for line in lines)


def check_versions(said: str, version: str, revision: str) -> None:
    """Check the output of ``persia --version``.

    Raises:
        ReleaseError: The program has another version, or was built from another commit.
    """
    lines = said.splitlines()
    if f"persia {version}" not in lines or not any(line.startswith(f"persia_core {version} from ") for line in lines):
        raise ReleaseError(f"persia --version says {said.strip()!r}, expected version {version}", AGAIN)
    if f"revision {revision}" not in re.split(r", |\n", said):
        raise ReleaseError(f"persia --version says {said.strip()!r}, expected revision {revision}", AGAIN)


def check_summary(folder: Path) -> float:
    """Check that the run in a folder is finished and has learned enough, and return its AUC.

    Raises:
        ReleaseError: The run is not finished, or has learned too little.
    """
    found = sorted(folder.rglob("summary.json"))
    if not found:
        raise ReleaseError(f"the demo wrote no summary.json in {folder}", READ_LOG)
    summary: dict[str, Any] = json.loads(found[-1].read_text())
    auc = float({**summary, **summary.get("result", {})}.get("auc") or 0)
    if summary.get("status") != "finished" or auc < AUC:
        raise ReleaseError(f"{found[-1]}: status {summary.get('status')}, AUC {auc}, expected at least {AUC}", READ_LOG)
    return auc


IMAGES = {
    "server": "emb_server",
    "nats": "persia_nats_service",
    "runtime": "trainer",
    "serving": "serving",
    "monitor": "prometheus",
}
"""The images of a release, and the service that each is built for."""
FILES = ("docker-compose.yaml", "docker-compose.serving.yaml", "docker-compose.monitor.yaml")
"""The compose files of these services."""
LABEL = "org.opencontainers.image."
PYTHON_IMAGES = {"runtime", "serving"}


def labels(version: str, revision: str) -> dict[str, str]:
    """Return the labels of every image."""
    return {
        f"{LABEL}title": "Persia",
        f"{LABEL}version": version,
        f"{LABEL}revision": revision,
        f"{LABEL}licenses": "MIT OR Apache-2.0",
    }


def overlay(version: str, revision: str) -> str:
    """Return the compose file that adds labels and the revision to the builds."""
    build = {"labels": labels(version, revision), "args": {"PERSIA_REVISION": revision}}
    services = {service: {"build": build} for service in IMAGES.values()}
    return json.dumps({"version": "3.8", "services": services}, indent=1)


def inspect(image: str, run: Run) -> dict[str, Any]:
    """Return the data of ``docker image inspect`` about an image."""
    found: list[dict[str, Any]] = json.loads(run(["docker", "image", "inspect", image]))
    return found[0]


def check_image(name: str, image: str, version: str, revision: str, run: Run) -> None:
    """Check the labels of an image, its bill of materials, and the versions that its programs report.

    Raises:
        ReleaseError: One of them has another version.
    """
    found = inspect(image, run)["Config"]["Labels"] or {}
    for label, expected in labels(version, revision).items():
        if found.get(label) != expected:
            raise ReleaseError(f"{image} has the label {label}={found.get(label)}, expected {expected}", AGAIN)

    def inside(*words: str) -> str:
        return run(["docker", "run", "--rm", "--network", "none", "--entrypoint", words[0], image, *words[1:]])

    if name in PYTHON_IMAGES:
        check_versions(inside("persia", "--version"), version, revision)
    if name in {"server", "runtime"}:
        for program in PROGRAMS:
            if f"{program} {version} " not in inside(program, "--version"):
                raise ReleaseError(f"{program} in {image} is not version {version}", AGAIN)
    if name == "runtime":
        demo = " && ".join(
            [
                "cp -r /opt/persia/examples/dlrm /tmp/dlrm && cd /tmp/dlrm",
                "DLRM_EPOCHS=1 DLRM_BATCH_SIZE=4096 OMP_NUM_THREADS=1 python train.py --out /tmp/out >&2",
                "cat /tmp/out/*/summary.json",
            ]
        )
        summary = json.loads(inside("sh", "-euc", demo))
        if summary["status"] != "finished" or summary["auc"] < AUC:
            raise ReleaseError(f"the demo in {image} ended with {summary}, expected an AUC of at least {AUC}", READ_LOG)


MAKE_BUNDLE = """
cd /shared
persia data synth clicks.parquet --rows 4000 --ids 50,300 --dense 2
persia data inspect clicks.parquet -o persia.yml
persia train persia.yml --set data.epochs=1
persia export runs/LATEST -o bundle
persia predict runs/LATEST clicks.parquet -o scores.parquet --keep label
python - <<END
import json
import pyarrow.parquet as pq
wanted = pq.read_table("scores.parquet")
rows = pq.read_table("clicks.parquet").drop_columns(["label"]).slice(0, 200).to_pylist()
(scores,) = [name for name in wanted.column_names if name != "label"]
content = {"rows": rows, "scores": wanted[scores].to_pylist()[:200]}
json.dump(content, open("request.json", "w"), default=str)
END
"""
"""Makes a bundle in a volume, and computes the scores of 200 rows with ``persia predict``."""
ASK = """
import json, time, urllib.request
content = json.load(open("/shared/request.json"))
ask = urllib.request.Request("http://127.0.0.1:8000/score", json.dumps(content["rows"]).encode())
for _ in range(600):
    try:
        found = json.load(urllib.request.urlopen(ask))["scores"]
        break
    except OSError:
        time.sleep(0.1)
far = max(abs(one - other) for one, other in zip(found, content["scores"], strict=True))
print(json.dumps({"rows": len(found), "far": far}))
"""
"""Requests the scores of these rows from a served bundle, and prints the largest difference."""
FAR = 1e-6
"""The maximum difference of a score with f32 rows."""


def check_serving(runtime: str, serving: str, run: Run) -> None:
    """Make a bundle in one image, and serve it in another one. The containers have no network.

    Raises:
        ReleaseError: The scores differ.
    """
    volume = f"persia-release-{os.getpid()}"
    words = ["docker", "run", "--rm", "--network", "none", "--user", "0:0", "--volume", f"{volume}:/shared"]
    run(["docker", "volume", "create", volume])
    try:
        run([*words, "--entrypoint", "sh", runtime, "-euc", MAKE_BUNDLE])
        serve = f"persia serve /shared/bundle --http 127.0.0.1:8000 --grpc none >&2 & python -c '{ASK}'"
        found = json.loads(run([*words, "--entrypoint", "sh", serving, "-euc", serve]).splitlines()[-1])
    finally:
        run(["docker", "volume", "rm", volume])
    if found["rows"] != 200 or found["far"] > FAR:
        raise ReleaseError(f"{serving} serves scores that differ from those of {runtime}: {found}", READ_LOG)


def packages_of(image: str, run: Run) -> tuple[str, str]:
    """Return the bill of materials in an image, empty if it has none, and the list of its Debian packages."""
    entry = ["docker", "run", "--rm", "--network", "none", "--entrypoint"]
    bill = run([*entry, "sh", image, "-c", "cat /sbom.json 2>/dev/null || true"])
    return bill, run(
        [*entry, "dpkg-query", image, "--show", "--showformat", "${Package}\\t${Version}\\t${Architecture}\\n"]
    )


def find_python() -> str:
    """Return the interpreter from which the environment of this process was created."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
