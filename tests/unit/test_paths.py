"""PersiaML's import paths. Exit codes and settings are listed in one place each."""

import importlib
import subprocess
import sys

import pytest

from persia import errors
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import Settings, settings

PATHS = {
    "persia.ctx": [
        "BaseCtx",
        "DataCtx",
        "EmbeddingCtx",
        "InferCtx",
        "PreprocessMode",
        "TrainCtx",
        "cnt_ctx",
        "eval_ctx",
    ],
    "persia.data": ["DataLoader", "IterableDataset", "StreamingDataset"],
    "persia.distributed": ["DDPOption", "DistributedBaseOption", "get_default_distributed_option"],
    "persia.embedding": ["EmbeddingConfig", "get_default_embedding_config"],
    "persia.embedding.data": ["IDTypeFeature", "IDTypeFeatureWithSingleID", "Label", "NonIDTypeFeature", "PersiaBatch"],
    "persia.embedding.optim": ["SGD", "Adagrad", "Adam", "Optimizer"],
    "persia.env": ["get_local_rank", "get_rank", "get_replica_index", "get_replica_size", "get_world_size"],
    "persia.errors": ["PersiaError", "UsageError"],
    "persia.helper": ["PersiaServiceCtx", "ensure_persia_service"],
    "persia.launcher": ["main"],
    "persia.logger": ["get_default_logger", "get_logger", "setLogger"],
    "persia.service": ["get_embedding_worker_services"],
    "persia.utils": [
        "dump_yaml",
        "find_free_port",
        "load_yaml",
        "resolve_binary_execute_path",
        "run_command",
        "setup_seed",
    ],
}


@pytest.mark.parametrize("path", PATHS)
def test_the_paths_of_persiaml_work(path: str) -> None:
    module = importlib.import_module(path)
    assert [name for name in PATHS[path] if not hasattr(module, name)] == []


def test_the_launcher_runs_under_the_path_of_persiaml() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "persia.launcher", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "nn-worker" in done.stdout, done.stderr


def test_every_error_has_an_exit_code_of_the_list() -> None:
    classes = [getattr(errors, name) for name in errors.__all__]
    assert {ExitCode(each.exit_code) for each in classes} <= set(ExitCode)
    assert sorted(ExitCode) == [0, 1, 2, 3, 4, 5, 70, 75, 130]


@pytest.mark.parametrize(
    ("variable", "name", "value"),
    [
        ("PERSIA_JOB", "job", "ads"),
        ("PERSIA_NATS_URL", "nats_url", "nats://here:4222"),
        ("PERSIA_TOKEN_FILE", "token_file", "/run/secret"),
        ("PERSIA_RUN_DIR", "run_dir", "runs/ads"),
        ("PERSIA_CKPT_DIR", "checkpoint_root", "/checkpoints"),
        ("PERSIA_TLS_CA", "tls_ca", "ca.pem"),
        ("PERSIA_START_TIMEOUT", "start_timeout", 7.5),
        ("PERSIA_RPC_TIMEOUT", "rpc_timeout", 8.0),
        ("PERSIA_HANG_TIMEOUT", "hang_timeout", 0.0),
    ],
)
def test_a_setting_is_read_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, variable: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, f" {value} ")
    assert getattr(settings, name) == value
    monkeypatch.delenv(variable)
    assert getattr(settings, name) in (None, 60.0, 1800.0)


def test_a_setting_that_makes_no_sense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "soon")
    with pytest.raises(errors.UsageError, match="PERSIA_RPC_TIMEOUT='soon': expected seconds"):
        _ = settings.rpc_timeout
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.UsageError, match="^RANK is 2, but WORLD_SIZE is 2: ranks go from 0 to 1$") as caught:
        _ = Settings().place
    assert caught.value.hint == "correct RANK or WORLD_SIZE"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("REPLICA_INDEX", "3")
    monkeypatch.setenv("REPLICA_SIZE", "3")
    with pytest.raises(errors.UsageError, match="^REPLICA_INDEX is 3, but REPLICA_SIZE is 3: indexes go from 0 to 2$"):
        _ = Settings().place
