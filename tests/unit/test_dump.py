"""``persia dump``: the content of the archive, which has no secrets."""

import hashlib
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import yaml
from conftest import Verb
from regex_steps import Counted, Steps
from trainer_files import config_of, fit

from persia.doctor.dump import here, redact
from persia.doctor.dump.archive import MOST, Archive, write
from persia.doctor.dump.facts import Facts
from persia.doctor.dump.redact import HIDDEN, Redactor
from persia.doctor.log_lines import Source
from persia.runtime.tokens import Role, role_token

SECRETS = {
    "of the job": "0123456789abcdef0123456789abcdef-of-the-job",
    "in the environment": "env-s3cret-of-test",
    "in a URL": "pass-in-url-9",
    "in the configuration": "yaml-s3cret-4711",
    "in a log": "log-s3cret-4712",
    "of a header": "abcdefgh12345678",
    "of a cloud": "AKIAABCDEFGHIJKLMNOP",
}


def content(path: Path) -> dict[str, str]:
    """Return the files of an archive by name."""
    with tarfile.open(path) as tar:
        files = {each.name: tar.extractfile(each) for each in tar.getmembers()}
        return {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file is not None}


def assert_no_secret(path: Path) -> None:
    secret = SECRETS["of the job"]
    derived = {role: role_token(secret.encode(), role) for role in get_args(Role)}
    hidden = {**SECRETS, **derived}
    for name, text in content(path).items():
        for place, value in hidden.items():
            assert value not in text, f"the secret {place} is in {name}"


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that has failed, with secrets in its log, its configuration and the environment."""
    monkeypatch.chdir(tmp_path)
    fit(config_of(tmp_path, data={"epochs": 1}))
    run = tmp_path / "runs" / "one"
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"status": "failed", "error": f"ValueError: token={SECRETS['in a log']}"}
    (run / "summary.json").write_text(json.dumps(summary))
    with (run / "persia.yml").open("a") as file:
        file.write(f"\n# old: {{API_TOKEN: {SECRETS['in the configuration']}}}\n")
    (run / "logs" / "server-0.log").write_text(
        f"2026-11-25T10:00:00Z warn  persia-server 0: refused: password={SECRETS['in a log']}\n"
        f"2026-11-25T10:00:01Z info  persia-server 0: {SECRETS['of the job']} and {SECRETS['in the environment']}\n"
        f"2026-11-25T10:00:02Z info  persia-server 0: Authorization: Bearer {SECRETS['of a header']}\n"
        f"2026-11-25T10:00:03Z info  persia-server 0: {SECRETS['of a cloud']} {SECRETS['in the configuration']}\n"
        f"2026-11-25T10:00:04Z info  persia-server 0: {role_token(SECRETS['of the job'].encode(), 'trainer')}\n"
        "2026-11-25T10:00:05Z warn  persia-server 0: stale token=00000000000000aa/1/0/7\n"
    )
    (run / "logs" / "up.log").write_text("server-0 was killed by SIGKILL, see logs/server-0.log\n")
    (run / "flight").mkdir()
    (run / "flight" / "rank-0.json").write_text('{"reason": "no progress"}')
    poison = run / "checkpoints" / "poison"
    poison.mkdir()
    (poison / "step-3.json").write_text(json.dumps({"step": 3, "error": "ValueError", "meta": "user 4711 of the data"}))
    token = tmp_path / "token"
    token.write_text(SECRETS["of the job"])
    for name, value in {
        "PERSIA_TOKEN_FILE": str(token),
        "PERSIA_MY_SECRET": SECRETS["in the environment"],
        "PERSIA_LABELS_URL": f"postgres://me:{SECRETS['in a URL']}@db/labels",
        "PERSIA_NATS_URL": "",
    }.items():
        monkeypatch.setenv(name, value)
    return run


@pytest.mark.row("S4-58", "S4-60")
def test_a_dump_of_a_dead_run(dead: Path, verb: Verb) -> None:
    out, _ = verb("dump", "runs/one", "-o", "d.tar.gz")
    path = dead.parents[1] / "d.tar.gz"
    assert out.startswith("d.tar.gz: ") and stat.S_IMODE(path.stat().st_mode) == 0o600
    files = content(path)
    wanted = {"SUMMARY.md", "MANIFEST.json", "versions.txt", "packages.txt", "environment.txt", "system.txt"}
    wanted |= {"doctor.txt"}
    wanted |= {"config/run.yml", "config/persia.yml", "config/changed.txt", "checkpoints.txt", "run/summary.json"}
    wanted |= {"run/run.json", "run/metrics.jsonl", "run/flight/rank-0.json", "run/poison/step-3.json"}
    wanted |= {"logs/train.log", "logs/server-0.log", "logs/up.log"}
    assert wanted <= {*files}, wanted - {*files}
    assert_no_secret(path)
    assert "stale token=00000000000000aa/1/0/7" in files["logs/server-0.log"], "the name of a batch is no secret"
    assert "of the data" not in files["run/poison/step-3.json"]
    assert "every file has its size and hash" in files["checkpoints.txt"]
    assert "checkpoint.every: 5" in files["config/changed.txt"] and "train.clip_norm" not in files["config/changed.txt"]
    assert "memory: " in files["system.txt"] and "disk of " in files["system.txt"]

    manifest = json.loads(files["MANIFEST.json"])
    listed = {each["name"]: each for each in manifest["files"]}
    assert {*listed} == {*files} - {"MANIFEST.json"}
    for name, each in listed.items():
        assert hashlib.sha256(files[name].encode()).hexdigest() == each["sha256"], name
    assert listed["logs/server-0.log"]["redactions"] >= 6
    assert manifest["skipped"]["status.json"].startswith("PERSIA_NATS_URL is not set; for a running job")

    summary, step = files["SUMMARY.md"], json.loads(files["run/summary.json"])["step"]
    assert "# Persia: run runs/one" in summary and f"* Status: run one: failed, step {step}" in summary, summary
    assert "server-0 was killed by SIGKILL" in summary and f"ValueError: token={HIDDEN}" in summary
    assert "stale token=" in summary and f"checkpoints/step-{step}, step {step}" in summary
    assert "persia_core" in summary and "status.json: PERSIA_NATS_URL is not set" in summary


@pytest.mark.row("S4-58")
def test_a_preview_writes_nothing_and_a_file_is_not_replaced(
    dead: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {*dead.parents[1].iterdir()}
    out, _ = verb("dump", "runs/one", "--preview")
    assert "logs/server-0.log  (" in out and "status.json: PERSIA_NATS_URL is not set" in out
    assert {*dead.parents[1].iterdir()} == before
    (dead.parents[1] / "there").write_text("mine")
    monkeypatch.setattr(here, "learn_secrets", None)  # the name is checked before anything is collected
    assert "there: the file exists" in verb("dump", "-o", "there", code=2)[1]
    assert (dead.parents[1] / "there").read_text() == "mine"
    assert "runs/none: no such folder" in verb("dump", "runs/none", code=2)[1]


@pytest.mark.row("S4-58")
def test_a_source_that_fails_is_noted(dead: Path, verb: Verb) -> None:
    (dead / "persia.yml").write_text("data: [\n")
    (dead / "summary.json").write_text("{")
    for path in dead.glob("checkpoints/step-*/MANIFEST.json"):
        path.write_text("broken")
    verb("dump", "runs/one", "-o", "d.tar.gz")
    files = content(dead.parents[1] / "d.tar.gz")
    assert "config/changed.txt" in json.loads(files["MANIFEST.json"])["skipped"]
    assert "logs/server-0.log" in files and "run/summary.json" in files


@pytest.mark.row("S4-58")
def test_the_size_is_bounded() -> None:
    archive = Archive(Redactor())
    for number in range(20):
        lines = "".join(f"{os.urandom(50).hex()}\n" for _ in range(12_000))
        archive.add(f"logs/{number}.log", f"{lines}last line {number}\n")
    archive.add("SUMMARY.md", "the summary")
    packed = archive.packed("top")
    assert archive.size <= MOST and len(packed) < 20_000_000
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        names = tar.getnames()
    assert names[0] == "top/SUMMARY.md" and "top/MANIFEST.json" in names
    first = archive.entries["logs/0.log"]
    assert first.content.endswith(b"last line 0\n") and first.cut > 100_000, "the end is kept"
    assert first.content.index(b"\n") == 100, "from the start of a line"
    assert archive.skipped["logs/19.log"] == "the archive is full: it has at most 18 MiB"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:pw@db/x", f"postgres://{HIDDEN}@db/x"),
        ("nats://host:4222", "nats://host:4222"),
        ('"password": "abc"', f'"password": "{HIDDEN}"'),
        ("password=abc", f"password={HIDDEN}"),
        ("--token abc --jobs 3", f"--token {HIDDEN} --jobs 3"),
        ("token: two words", "token: two words"),
        ("token=00000000000000aa/1/0/7 x", "token=00000000000000aa/1/0/7 x"),
        ("PERSIA_TOKEN_FILE=/run/persia/token", "PERSIA_TOKEN_FILE=/run/persia/token"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2Q", HIDDEN),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nx", f"{HIDDEN}\nx"),
        ("loss 0.5, key figures", "loss 0.5, key figures"),
        (r'{"event":"cfg {\"password\": \"hunter2\"}"}', rf'{{"event":"cfg {{\"password\": \"{HIDDEN}\"}}"}}'),
        (r"{\"a\": \"{\\\"token\\\": \\\"b c\\\"}\"}", rf"{{\"a\": \"{{\\\"token\\\": \\\"{HIDDEN}\\\"}}\"}}"),
        ('password: "correct horse battery" x', f'password: "{HIDDEN}" x'),
        (r'password="a\"b c", next=1', f'password="{HIDDEN}", next=1'),
        ("password=b'abc'", f"password=b'{HIDDEN}'"),
        ("--password 'x y' z", f"--password '{HIDDEN}' z"),
        ('["--password", "X"]', f'["--password", "{HIDDEN}"]'),
        ("DB_PASS=a SMTP_PWD=b passed=3 PWD=/root", f"DB_PASS={HIDDEN} SMTP_PWD={HIDDEN} passed=3 PWD=/root"),
        ("AccountKey=abc==;x=1 ssh_key=abc", f"AccountKey={HIDDEN};x=1 ssh_key={HIDDEN}"),
        ("X-Amz-Signature=abc", f"X-Amz-Signature={HIDDEN}"),
        ("Cookie: a=b; c=d", f"Cookie: {HIDDEN}"),
        ('"token": {\n "name": "op_token"\n}', '"token": {\n "name": "op_token"\n}'),
        ('"tokens": [\n "a"\n]', '"tokens": [\n "a"\n]'),
        ("token={abc", f"token={HIDDEN}"),
    ],
)
def test_what_is_replaced(text: str, shown: str) -> None:
    assert Redactor().text(text) == shown
    assert Redactor().text(shown) == shown, "a second pass, as of a dump inside a container, changes nothing"


CONFIGURATION = """\
password: ab,cd;efghij
db:
  tokens:
  - first of list
  - "second of list"
  private_key: |
    line one
    line two
  secret: >-
    folded one
    and two
  api: {key: "q w e r t y"}
short_secret: ab,c  # why
other: kept
"""


@pytest.mark.row("S4-58")
@pytest.mark.parametrize("broken", ["", "bad: [\n"])
def test_secrets_of_a_configuration_are_replaced_in_it_and_in_logs(broken: str) -> None:
    redactor = Redactor()
    redactor.learn_config(CONFIGURATION + broken)
    shown = redactor.text(CONFIGURATION + broken, strict=True)
    log = redactor.text("x ab,cd;efghij y second of list z line one\\nline two q w e r t y folded one and two")
    for part in ("ab,c", "efgh", "of list", "line one", "line two", "folded", "q w e r t y"):
        assert part not in shown and part not in log, (part, shown, log)
    assert "other: kept" in shown and "short_secret: [redacted]" in shown


def test_a_variable_whose_value_starts_with_a_slash_is_a_secret_unless_it_is_a_file(tmp_path: Path) -> None:
    redactor = Redactor()
    redactor.learn_variables({"A_SECRET": "/Zm9vYmFy", "PERSIA_TLS_KEY": str(tmp_path), "PWD": "/some/place"})
    assert redactor.text(f"/Zm9vYmFy {tmp_path} /some/place") == f"{HIDDEN} {tmp_path} /some/place"


@pytest.mark.parametrize("part", ["token", '{"password": "', "[", '\\"password', "secret\n - a", " password"])
def test_the_time_is_linear(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is counted in steps of the patterns, YAML events times their depth, and searched text."""
    steps = Steps()

    def compiled(pattern: str) -> Counted:
        return Counted(re.compile(pattern), steps)

    def events(text: str, **options: Any) -> Iterator[Any]:
        depth = 0
        for event in yaml.parse(text, **options):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            steps.count += 1 + depth
            yield event

    for name, value in vars(redact).copy().items():
        if isinstance(value, re.Pattern):
            monkeypatch.setattr(redact, name, Counted(value, steps))
    monkeypatch.setattr(redact, "_PATTERNS", [Counted(each, steps) for each in redact._PATTERNS])
    split = lambda pattern, text, maxsplit: compiled(pattern).split(text, maxsplit)  # noqa: E731
    monkeypatch.setattr(redact, "re", SimpleNamespace(compile=compiled, escape=re.escape, split=split))
    monkeypatch.setattr(redact, "yaml", SimpleNamespace(**{**vars(yaml), "parse": events}))

    def taken(size: int) -> int:
        text, steps.count = part * (size // len(part)), 0
        redactor = Redactor()
        redactor.learn_config(text)
        redactor.text(text, strict=True)
        return steps.count + len(redactor._known) * len(text)

    small, large = taken(1_000), taken(4_000)
    assert large < 1.5 * 4 * small, (small, large)  # quadratic time would give a factor of 16


@pytest.mark.row("S4-58")
def test_sources_of_the_stack_that_fail_are_noted(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake docker returns nothing useful, and the run has a file that cannot be read."""
    folder = tmp_path / "docker"
    folder.mkdir()
    program = folder / "docker"
    program.write_text(
        '#!/bin/sh\ncase "$*" in "compose config --services") echo trainer ;; *"ps --all --quiet") echo id1 ;;\n'
        '"compose config"*|inspect*) echo "{" ;; *) echo "no such thing" >&2; exit 1 ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def broken() -> list[tuple[str, str]]:
        raise RuntimeError("planted")

    monkeypatch.setattr("persia.doctor.versions.environment", broken)
    verb("dump", "-o", "d.tar.gz")
    skipped = json.loads(content(tmp_path / "d.tar.gz")["MANIFEST.json"])["skipped"]
    assert {"stack/config.json", "stack/containers.txt", "logs", "inside", "versions"} <= {*skipped}, skipped


@pytest.mark.row("S4-58")
def test_a_log_that_cannot_be_read_is_noted_and_logs_come_before_recordings(tmp_path: Path) -> None:
    def unreadable() -> Iterator[str]:
        yield "one"
        raise OSError("planted")

    archive = Archive(Redactor())
    here.of_logs(archive, Facts(), [Source("a", unreadable()), Source("b", ["two"])])
    assert "planted" in archive.skipped["logs/a.log"] and archive.entries["logs/b.log"].content == b"two\n"
    assert archive.entries["logs/a.log"].content == b"one\n"


def test_a_half_archive_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError):
        write(tmp_path / "a", "no bytes")  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


@pytest.mark.row("S4-58")
def test_a_dump_of_the_stack(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake docker returns the content of files. The archive of the container is a real one."""
    folder = tmp_path / "docker"
    folder.mkdir()
    inner = Archive(Redactor())
    inner.add("status.json", '{"processes": []}')
    inner.add("SUMMARY.md", "* Status: 3 processes; no problem\n* Newest checkpoint: step-9\n")
    inner.add("config/persia.yml", "model: {}\n")
    inner.add("environment.txt", "PERSIA_CONFIG=/workspace/persia.yml\n")
    inner.skip("stacks.txt", "there is none")
    (folder / "inner").write_bytes(inner.packed("inner"))
    environment = {"AWS_SECRET_ACCESS_KEY": SECRETS["in the environment"], "PERSIA_JOB": "ads"}
    (folder / "persia.yml").write_text(f"data:\n  password: >-\n    {SECRETS['in the configuration']}\n")
    trainer = {
        "image": "i",
        "environment": {**environment, "PERSIA_CONFIG": "/workspace/persia.yml"},
        "command": ["mine", "--password", SECRETS["in a URL"]],
        "volumes": [{"type": "bind", "source": str(folder), "target": "/workspace"}],
    }
    config = {"name": "proj", "services": {"trainer": trainer}, "volumes": {"token": {"name": "proj_token"}}}
    (folder / "config.json").write_text(json.dumps(config))
    state = {"Status": "exited", "ExitCode": 137, "OOMKilled": True}
    state["Health"] = {"Status": "unhealthy", "Log": [{"ExitCode": 1, "Output": "not serving\n"}]}
    labels = {"com.docker.compose.service": "trainer", "com.docker.compose.container-number": "1"}
    inspected = {"Id": "id1", "Name": "/proj-trainer-1", "Config": {"Labels": labels}, "State": state}
    (folder / "inspect.json").write_text(json.dumps([inspected]))
    (folder / "logs").write_text(
        f"trainer-1  | 2026-11-25T10:00:00Z {SECRETS['of the job']} {SECRETS['in the environment']} "
        f"{SECRETS['in the configuration']} {SECRETS['in a URL']}\n"
        "trainer-1  | 2026-11-25T10:00:01Z error: no memory\n"
    )
    program = folder / "docker"
    program.write_text(f"""#!/bin/sh
case "$*" in
"compose ps --all --quiet") echo id1 ;;
"compose config --services") echo trainer ;;
"compose config"*) cat {folder}/config.json ;;
"inspect id1") cat {folder}/inspect.json ;;
"compose logs"*) cat {folder}/logs ;;
*"--entrypoint cat"*) echo {SECRETS["of the job"]} ;;
*" persia dump "*) cat {folder}/inner ;;
"events "*"label=com.docker.compose.oneoff=False"*) echo "2026 container oom proj-trainer-1" ;;
"compose images") echo "trainer persia/runtime" ;;
*) echo "unexpected: $*" >&2; exit 1 ;;
esac
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PERSIA_CONFIG", "/workspace/persia.yml")
    verb("dump", "-o", "d.tar.gz")
    assert os.environ["PERSIA_CONFIG"] == "/workspace/persia.yml"
    files = content(tmp_path / "d.tar.gz")
    skipped = json.loads(files["MANIFEST.json"])["skipped"]
    of_container = "/workspace/persia.yml is a path in the containers, and was not read on this host"
    assert skipped["PERSIA_CONFIG"] == f"{of_container}; see inside/config/persia.yml"
    assert not any("ConfigError" in text for text in [*skipped.values(), files["SUMMARY.md"], files["doctor.txt"]])
    _, errors = verb("dump", "--repro", "-o", "r.tar.gz", code=2)
    assert "--repro: PERSIA_CONFIG=/workspace/persia.yml is no file on this host, but a path in the con" in errors
    assert "docker compose run --rm --no-deps --no-TTY trainer persia dump --repro -o - > dump.tar.gz" in errors
    with monkeypatch.context() as patch:
        patch.setenv("PERSIA_CONFIG", "/home/me/pesria.yml")
        verb("dump", "-o", "mistyped.tar.gz")
        found = json.loads(content(tmp_path / "mistyped.tar.gz")["MANIFEST.json"])["skipped"]
        assert "PERSIA_CONFIG=/home/me/pesria.yml: no such file" in found["config/persia.yml"]
        assert "PERSIA_CONFIG" not in found, "it is no path in the containers"
        _, errors = verb("dump", "--repro", "-o", "r.tar.gz", code=2)
        assert "PERSIA_CONFIG=/home/me/pesria.yml: no such file" in errors
        (folder / "inner").rename(folder / "away")
        verb("dump", "-o", "unknown.tar.gz")
        found = json.loads(content(tmp_path / "unknown.tar.gz")["MANIFEST.json"])["skipped"]
        assert found["PERSIA_CONFIG"].startswith(
            "/home/me/pesria.yml is no file on this host, and the containers could"
        )
        (folder / "away").rename(folder / "inner")
    last_check = "trainer-1  unhealthy, last health check: exit code 1: not serving"
    assert last_check in files["stack/containers.txt"]
    assert_no_secret(tmp_path / "d.tar.gz")
    assert f'"AWS_SECRET_ACCESS_KEY": "{HIDDEN}"' in files["stack/config.json"] and "ads" in files["stack/config.json"]
    assert json.loads(files["stack/config.json"])["volumes"]["token"] == {"name": "proj_token"}
    assert "trainer-1  exited with exit code 137, out of memory" in files["stack/containers.txt"]
    assert "oom" in files["stack/events.txt"] and "error: no memory" in files["logs/trainer-1.log"]
    assert files["inside/status.json"] == '{"processes": []}'
    summary = files["SUMMARY.md"]
    assert "# Persia: stack proj in " in summary and "* Newest checkpoint: step-9" in summary
    assert "trainer-1: exited with exit code 137, out of memory" in summary and "error: no memory" in summary
    assert "inside/stacks.txt" in json.loads(files["MANIFEST.json"])["skipped"]
