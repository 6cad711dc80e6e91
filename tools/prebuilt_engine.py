"""Copy the engine of the tests into services/engine. ``ENGINE=prebuilt`` builds the images with it.

Usage: tools/prebuilt_engine.py FOLDER

FOLDER contains what ``make test-build`` copies there: both servers, and the package ``persia_core``.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TO = ROOT / "services" / "engine"
SERVERS = ("persia-embedding-sharded-server", "persia-embedding-sharded-middleware")
EXTENSION = "persia_core.abi3.so"
FEATURES = "cuda"


def main() -> int:
    """Write all files that the stage `build` of services/Dockerfile writes into /out."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.stderr.write(__doc__ or "")
        return 2
    checked = Path(sys.argv[1])
    for path in TO.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "README.md":
            path.unlink()
    work = TO / "bin"
    work.mkdir()
    for name in SERVERS:
        strip(checked / name, work / name)
    strip(checked / "persia_core" / EXTENSION, work / "persia_core.so")
    version = wheel(checked / "persia_core", work / "persia_core.so")
    subprocess.run([ROOT / "tools" / "build_info.sh", work, f"{version} dev features={FEATURES}"], check=True)
    (work / "BUILD_INFO").rename(TO / "BUILD_INFO")
    (work / "persia_core.so").unlink()
    server = bill("--crate", SERVERS[0])
    (TO / "sbom-server.json").write_text(server)
    (TO / "sbom.json").write_text(bill("--add", str(TO / "sbom-server.json"), "--crate", f"persia-core:{FEATURES}"))
    return 0


def strip(file: Path, to: Path) -> None:
    """Copy a binary without its debugging information, but with its symbols, as in the release build."""
    subprocess.run(["strip", "--strip-debug", "-o", to, file], check=True)


def wheel(package: Path, extension: Path) -> str:
    """Write the wheel of ``persia_core``, and return its version. Its bytes depend only on the content of its files."""
    described = TO / "wheels"
    described.mkdir()
    words = ["maturin", "pep517", "write-dist-info", "--interpreter", sys.executable, "--metadata-directory"]
    subprocess.run([*words, str(described)], cwd=ROOT / "rust_core" / "core", check=True, stdout=subprocess.DEVNULL)
    info = next(described.glob("*.dist-info"))
    files = {
        f"persia_core/{path.name}": path
        for path in sorted(package.iterdir())
        if path.suffix in (".py", ".pyi", ".typed")
    }
    files |= {f"{info.name}/{path.relative_to(info)}": path for path in sorted(info.rglob("*")) if path.is_file()}
    files[f"persia_core/{EXTENSION}"] = extension
    tag = next(line.split()[1] for line in (info / "WHEEL").read_text().splitlines() if line.startswith("Tag:"))
    record = "".join(f"{name},{digest(path)},{path.stat().st_size}\n" for name, path in files.items())
    with zipfile.ZipFile(described / f"{info.name.removesuffix('.dist-info')}-{tag}.whl", "w") as archive:
        for name, path in files.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
        archive.writestr(zipfile.ZipInfo(f"{info.name}/RECORD"), f"{record}{info.name}/RECORD,,\n")
    shutil.rmtree(info)
    return info.name.removesuffix(".dist-info").split("-")[1]


def digest(path: Path) -> str:
    """Return the hash of a file in the form of a wheel's RECORD."""
    found = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest())
    return "sha256=" + found.decode().rstrip("=")


def bill(*arguments: str) -> str:
    """Return a bill of materials."""
    words = [sys.executable, str(ROOT / "tools" / "sbom.py"), *arguments]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
