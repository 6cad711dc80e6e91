"""The entry point of the images and the launch scripts, run as in a container."""

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.clone

LAUNCH = ROOT / "launch"
SERVER, MIDDLEWARE = "persia-embedding-sharded-server", "persia-embedding-sharded-middleware"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    """A folder of binaries that replace the packaged ones and print their environment."""
    folder = tmp_path / "packaged"
    for name in (SERVER, MIDDLEWARE):
        script(
            folder / name, f'echo "packaged {name} index=$REPLICA_INDEX size=$REPLICA_SIZE data=$PERSIA_DATA_DIR $*"'
        )
    script(folder / "nats-server", 'echo "$NATS_PASSWORD" "$@"')
    script(folder / "hostname", "echo 10.0.0.7 10.1.0.7")
    return folder


@pytest.fixture
def run(tmp_path: Path, packaged: Path) -> Run:
    """Run a command through entrypoint.sh or ``entry``. ``dns`` is the container's name in Docker's DNS."""

    def call(
        *command: str, dns: str = "", check: bool = True, entry: str = "entrypoint.sh", **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        own = f'"-s dns hosts 10.0.0.7") [ -z "{dns}" ] || echo "10.0.0.7  {dns}"'
        script(packaged / "getent", f'case "$*" in {own} ;; "hosts data_compose") echo 10.0.0.8 ;; *) exit 2 ;; esac')
        environment = {
            "PATH": f"{LAUNCH}:{packaged}:{os.environ['PATH']}",
            "REPLICA_INDEX": "1",
            "REPLICA_SIZE": "3",
            "PERSIA_DATA_DIR": str(tmp_path / "data"),
            **variables,
        }
        result = subprocess.run(
            [str(LAUNCH / entry), *command], env=environment, capture_output=True, text=True, timeout=60
        )
        assert not check or result.returncode == 0, result.stderr
        return result

    return call


@pytest.mark.parametrize(
    ("launch", "binary"),
    [
        pytest.param("launch_middleware.sh", MIDDLEWARE, marks=pytest.mark.row("S0-07")),
        pytest.param("launch_server.sh", SERVER, marks=pytest.mark.row("S0-08")),
    ],
)
def test_third_party_wins(run: Run, tmp_path: Path, launch: str, binary: str) -> None:
    override = script(tmp_path / "third_party" / binary, 'echo "mine $*"')
    result = run(launch, "--option", THIRD_PARTY_PATH=str(override.parent))
    assert result.stdout == "mine --option\n"
    digest = hashlib.sha256(override.read_bytes()).hexdigest()
    assert result.stderr.splitlines()[0] == f"running {override}: override sha256={digest} build=unknown"
    (override.parent / "BUILD_INFO").write_text(f"{digest}  {binary} build=abc123 dev\n")
    assert "build=abc123 dev" in run(launch, THIRD_PARTY_PATH=f"{override.parent}/").stderr


@pytest.mark.row("S0-09")
@pytest.mark.parametrize("third_party", [None, "", "/does/not/exist", "empty"])
def test_without_overrides_the_packaged_binary_runs(
    run: Run, tmp_path: Path, packaged: Path, third_party: str | None
) -> None:
    (tmp_path / "empty").mkdir()
    variables = (
        {} if third_party is None else {"THIRD_PARTY_PATH": third_party.replace("empty", str(tmp_path / "empty"))}
    )
    result = run("launch_server.sh", **variables)
    assert result.stdout.startswith(f"packaged {SERVER} index=0 size=3 data={tmp_path}/data/0")
    assert re.match(rf"running {packaged}/{SERVER}: packaged sha256=[0-9a-f]{{64}} build=unknown\n", result.stderr)
    paths = run("sh", "-c", 'echo "$PATH|${PYTHONPATH-}"', **variables).stdout.strip()
    assert "::" not in paths
    assert not re.search(r"(^|\|):|:(\||$)", paths)


def test_an_override_that_cannot_be_executed_is_refused(run: Run, tmp_path: Path) -> None:
    override = script(tmp_path / "third_party" / SERVER, "echo mine")
    override.chmod(0o644)
    result = run("launch_server.sh", THIRD_PARTY_PATH=str(override.parent), check=False)
    assert result.returncode == 2
    assert f"chmod +x {SERVER}" in result.stderr


def test_serving_has_no_replica_index(run: Run, packaged: Path) -> None:
    script(packaged / "persia", 'echo "persia $*"')
    result = run("launch_serving.sh", "--threads", "2", REPLICA_INDEX="")
    assert result.stdout == "persia serve --threads 2\n"


@pytest.mark.row("S0-16")
def test_third_party_is_first_for_python(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "third_party"
    folder.mkdir()
    core = folder / "persia_core.so"
    core.write_bytes(b"not really")
    result = run("sh", "-c", 'echo "$PYTHONPATH"', THIRD_PARTY_PATH=str(folder), PYTHONPATH="/persia")
    assert result.stdout == f"{folder}:/persia\n"
    assert f"running {core}: override sha256={hashlib.sha256(b'not really').hexdigest()}" in result.stderr


@pytest.mark.row("S0-12")
@pytest.mark.parametrize(
    ("given", "dns", "index"),
    [
        ("1", "", "0"),
        ("3", "", "2"),
        ("{{.Task.Slot}}", "persia-middleware-2.persia_default", "1"),
        ("{{.Task.Slot}}", "persia_middleware_3.persia_default", "2"),
        ("{{.Task.Slot}}", "first-run-middleware-2.net", "1"),
    ],
)
def test_the_replica_is_found(run: Run, given: str, dns: str, index: str) -> None:
    assert f"index={index} size=3" in run("launch_middleware.sh", REPLICA_INDEX=given, dns=dns).stdout


@pytest.mark.row("S0-12")
@pytest.mark.parametrize(
    ("given", "dns", "said"),
    [
        ("4", "", "this is replica 4, but there are 3"),
        ("0", "", "cannot be determined from REPLICA_INDEX=0"),
        ("", "", "cannot be determined from REPLICA_INDEX"),
        ("one", "", "cannot be determined from REPLICA_INDEX=one"),
        ("{{.Task.Slot}}", "", "which Docker's DNS does not know"),
        ("{{.Task.Slot}}", "persia-emb_server-run-123456789012.net", "persia-emb_server-run-123456789012"),
        ("{{.Task.Slot}}", "host7.net", "the container's name, host7"),
        ("{{.Task.Slot}}", "7.net", "the container's name, 7"),
        ("{{.Task.Slot}}", "persia-emb_server-4.net", "this is replica 4, but there are 3"),
    ],
)
def test_a_wrong_replica_is_refused(run: Run, given: str, dns: str, said: str) -> None:
    result = run("launch_server.sh", REPLICA_INDEX=given, dns=dns, check=False)
    assert result.returncode == 2
    assert said in result.stderr
    assert "next:" in result.stderr


@pytest.mark.parametrize(("pod", "given", "index"), [("0", "", "0"), ("2", "", "2"), ("0", "3", "0"), ("", "3", "2")])
def test_a_pod_of_kubernetes_counts_from_0(run: Run, pod: str, given: str, index: str) -> None:
    assert f"index={index} size=3" in run("launch_server.sh", POD_INDEX=pod, REPLICA_INDEX=given).stdout
    assert f"index={index} size=3" in run("launch_middleware.sh", POD_INDEX=pod, REPLICA_INDEX=given).stdout


def test_a_wrong_index_of_a_pod_is_refused(run: Run) -> None:
    for pod, said in (("one", "from REPLICA_INDEX= and POD_INDEX=one"), ("3", "this is replica 4, but there are 3")):
        result = run("launch_server.sh", POD_INDEX=pod, REPLICA_INDEX="", check=False)
        assert result.returncode == 2 and said in result.stderr


@pytest.mark.parametrize("pod", ["", "one"])
def test_the_launcher_of_data_compose_in_a_pod_needs_an_index(run: Run, packaged: Path, pod: str) -> None:
    script(packaged / "persia-launcher", 'echo "$*"')
    command = ("persia-launcher", "data-loader", "--until-finished")
    assert run(*command, POD_INDEX="1", REPLICA_INDEX="").stdout == "data-loader --until-finished\n"
    refused = run(*command, POD_INDEX=pod, REPLICA_INDEX="", check=False)
    assert refused.returncode == 2 and f"from REPLICA_INDEX= and POD_INDEX={pod}\n" in refused.stderr
    # Outside pods, the option --replica-index gives the launcher its index.
    assert run(*command, REPLICA_INDEX="").stdout == "data-loader --until-finished\n"


def test_only_replicas_need_a_number(run: Run) -> None:
    result = run("sh", "-c", 'echo "${REPLICA_INDEX-unset}"', REPLICA_INDEX="{{.Task.Slot}}", dns="a-b-run-1234.net")
    assert result.stdout == "unset\n"


@pytest.mark.parametrize(
    ("given", "dns", "replicas"),
    [
        ("{{.Task.Slot}}", "persia-trainer-2.net", "3"),
        ("{{.Task.Slot}}", "persia-trainer-run-1a2b3c.net", "unset"),  # `compose run`, which starts no replica
        ("2", "", "unset"),
    ],
)
def test_replicas_of_compose_share_the_host(run: Run, given: str, dns: str, replicas: str) -> None:
    """A swarm replaces the template, and distributes the replicas over its nodes."""
    result = run("sh", "-c", 'echo "${PERSIA_HOST_REPLICAS-unset}"', REPLICA_INDEX=given, dns=dns)
    assert result.stdout == f"{replicas}\n"


def test_middleware_can_be_scaled_beyond_its_count(run: Run) -> None:
    assert "index=4 size=5" in run("launch_middleware.sh", REPLICA_INDEX="5").stdout


def test_the_token_is_made_once(run: Run, tmp_path: Path) -> None:
    token = tmp_path / "token"
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: run("cat", str(token), PERSIA_TOKEN_FILE=str(token)).stdout, range(8)))
    assert len(set(results)) == 1
    assert re.fullmatch(r"[0-9a-f]{64}", token.read_text())
    assert stat.S_IMODE(token.stat().st_mode) == 0o444
    assert [path.name for path in tmp_path.glob("token*")] == ["token"]


def test_in_the_folder_of_the_scripts_the_token_is_closed_to_other_users(run: Run, tmp_path: Path) -> None:
    token = tmp_path / ".persia" / "token"
    variables = {"PERSIA_TOKEN_FILE": str(token), "entry": "persiaml_entrypoint.sh"}
    first = run("bash", "-c", 'echo "$0 $PERSIA_TOKEN_FILE"', **variables)
    assert first.stdout == f"bash {token}\n"
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    secret = token.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", secret)
    assert run("cat", str(token), **variables).stdout == secret


def test_a_token_that_cannot_be_made_or_is_empty_is_named(run: Run, tmp_path: Path) -> None:
    result = run("true", PERSIA_TOKEN_FILE=str(tmp_path / "missing" / "token"), check=False)
    assert result.returncode == 5 and "is missing" in result.stderr
    (tmp_path / "token").touch()
    result = run("true", PERSIA_TOKEN_FILE=str(tmp_path / "token"), check=False)
    assert result.returncode == 5 and "is empty" in result.stderr


def test_nats_gets_a_quoted_password_of_its_role(run: Run, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of more than thirty-two bytes  \n")
    expected = hashlib.sha256(b"persia role nats a secret of more than thirty-two bytes").hexdigest()
    result = run("launch_nats.sh", PERSIA_TOKEN_FILE=str(token))
    assert result.stdout == f'"{expected}" --config /etc/nats.conf\n'
    assert expected not in result.stderr


def test_a_finished_run_is_shown_and_not_trained_again(run: Run, tmp_path: Path, packaged: Path) -> None:
    script(packaged / "persia-launcher", 'echo "launched $*"')
    assert (
        run("launch_persia.sh", "train.py", PERSIA_RUN_DIR=str(tmp_path)).stdout == "launched nn-worker -- train.py\n"
    )
    summary, config = tmp_path / "summary.json", tmp_path / "global_config.yml"
    ours = {"PERSIA_RUN_DIR": str(tmp_path), "PERSIA_GLOBAL_CONFIG": str(config)}

    def launched(**variables: str) -> bool:
        output = run("launch_persia.sh", **ours, **variables).stdout
        assert ("launched" in output) is ("this run is finished" not in output)
        assert ("launched" in output) is ("to train again, set another job name (PERSIA_JOB)" not in output)
        return "launched" in output

    for status, again in (("running", True), ("finished", False)):
        summary.write_text(f'{{\n "status": "{status}",\n "job": "one"\n}}\n')
        assert launched(PERSIA_JOB="one") is again
        for name in ("one  # ours", "'one'", '"one" # ours'):
            config.write_text(f"common_config:\n  metrics_config:\n    job_name: {name}\n")
            assert launched() is again
    # The run of another job is ignored. If the job's name is not known, the launcher checks it.
    assert launched(PERSIA_JOB="two")
    for text in ("    job_name: two\n", "    job_name: 'one\"\n", "    job_name: x\n    job_name: ne\n", "{}\n"):
        config.write_text(text)
        assert launched()
    config.unlink()
    assert launched()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, {"launch_persia.sh": " train.py", "launch_compose.sh": " data_compose.py"}),
        ({"PERSIA_CONFIG": "persia.yml"}, {"launch_persia.sh": "", "launch_compose.sh": ""}),
        (
            {"PERSIA_NN_WORKER_ENTRY": "mine.py", "PERSIA_DATALOADER_ENTRY": "mine.py"},
            {"launch_persia.sh": "", "launch_compose.sh": ""},
        ),
    ],
)
def test_the_script_without_one_in_the_command(
    run: Run, packaged: Path, variables: dict[str, str], words: dict[str, str]
) -> None:
    """The variable that names the script reaches the launcher. With PERSIA_CONFIG, no script is needed."""
    script(packaged / "persia-launcher", 'echo "$*"')
    for launch, word in words.items():
        verb = "nn-worker" if launch == "launch_persia.sh" else "data-loader"
        assert run(launch, **variables).stdout == f"{verb} --{word}\n"


@pytest.mark.row("S1-16")
def test_a_startup_hook_runs_before_training(
    run: Run, packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the hook fails, the container prints the hook's output and ends with its exit code."""
    script(packaged / "persia-launcher", "echo training")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    monkeypatch.chdir(workspace)
    hook = workspace / "startup-hook.sh"
    hook.write_text("echo preparing\n")  # not executable: copied files often are not
    assert run("launch_persia.sh").stdout == "preparing\ntraining\n"
    assert run("launch_compose.sh").stdout == "training\n", "of the trainer only"
    hook.write_text("echo preparing\nls /no/such/folder\necho not this\n")
    failed = run("launch_persia.sh", check=False)
    assert failed.stdout == "preparing\n" and failed.returncode == 2
    assert "/no/such/folder" in failed.stderr and f"{hook} ended with exit code 2" in failed.stderr
    assert "next: correct it" in failed.stderr
    hook.write_text("exit 42\n")
    assert run("launch_persia.sh", check=False).returncode == 42


def test_persia_yml_takes_the_place_of_the_default_of_the_slots(run: Run) -> None:
    show = ("sh", "-c", 'echo "${PERSIA_EMBEDDING_CONFIG-none} ${PERSIA_GLOBAL_CONFIG-none}"')
    slots, general = "/workspace/config/embedding_config.yml", "/workspace/config/global_config.yml"
    default = {"PERSIA_EMBEDDING_CONFIG": slots, "PERSIA_GLOBAL_CONFIG": general}
    assert run(*show, **default).stdout == f"{slots} {general}\n"
    assert run(*show, **default, PERSIA_CONFIG="persia.yml").stdout == "none none\n"
    chosen = {"PERSIA_EMBEDDING_CONFIG": "mine.yml", "PERSIA_GLOBAL_CONFIG": "mine.yml", "PERSIA_CONFIG": "persia.yml"}
    assert run(*show, **chosen).stdout == "mine.yml mine.yml\n"  # the launcher refuses the slots


@pytest.mark.parametrize(("status", "code"), [("running", 75), ("finished", 0)])
def test_a_stop_during_the_start(run: Run, tmp_path: Path, packaged: Path, status: str, code: int) -> None:
    (tmp_path / "summary.json").write_text(f'{{"status": "{status}", "job": "one"}}\n')
    # This sha256sum, which the entry point calls during the start, sends SIGTERM to the entry point.
    script(packaged / "sha256sum", 'kill -TERM "$PPID"')
    script(packaged / "persia-launcher", "exit 42")
    result = run("launch_server.sh", PERSIA_RUN_DIR=str(tmp_path), PERSIA_JOB="one", check=False)
    assert result.returncode == code


def test_no_command_is_refused(run: Run) -> None:
    result = run(check=False)
    assert result.returncode == 2 and "no command" in result.stderr


def test_pytest_runs_in_the_folder_of_the_tests(run: Run, packaged: Path) -> None:
    script(packaged / "pytest", "exit 0")
    result = run("pytest", "-k", "a name", PERSIA_RUN_DIR="/runs", check=False)
    assert "collecting tests" in result.stderr
    assert "/opt/persia" in result.stdout + result.stderr  # the message names a file that only the image has


def test_launch_scripts_are_short() -> None:
    scripts = sorted(LAUNCH.glob("*.sh"))
    assert len([path for path in scripts if path.name.startswith("launch_")]) == 7
    for path in scripts:
        assert len(path.read_text().splitlines()) <= 50, path
