"""``persia train`` with its checkpoints in an object store: ``checkpoint.dir`` is a URL."""

from pathlib import Path

import pytest
from object_server import Server
from trainer_files import config_of, fit, summary

from persia.errors import ConfigError, StorageError
from persia.trainer import StepReport, Trainer
from persia.trainer.run_folder import find_checkpoint
from persia_core import checkpoint as core

URL = "s3://bucket/runs"


def test_a_run_resumes_and_is_evaluated_from_the_store(tmp_path: Path, store: Server) -> None:
    expected, _ = fit(config_of(tmp_path, run={"name": "undisturbed"}))
    config = config_of(tmp_path, checkpoint={"dir": URL})
    with Trainer(config) as trainer:
        for report in trainer.fit():
            if isinstance(report, StepReport) and report.step == 8:
                assert str(trainer.save()) == f"{URL}/one/step-8"
                break
    assert not (tmp_path / "runs" / "one" / "checkpoints").exists() and not Path("s3:").exists()
    assert core.latest(f"{URL}/one") == f"{URL}/one/step-8"
    with Trainer(config).resume() as again:
        reports = [*again.fit()]
    steps = [each.step for each in reports if isinstance(each, StepReport)]
    assert steps[0] > 8, "it resumes after step 8"
    found, wanted = ({**summary(each)["test"], "seconds": 0} for each in (again, expected))
    assert found == wanted
    newest = find_checkpoint(tmp_path / "runs" / "one")
    assert str(newest.checkpoint).startswith(f"{URL}/one/step-") and f"{URL}/one/step-" in str(newest)
    assert {key.split("/")[0] for key in store.keys("runs/")} == {"one"}
    with Trainer(config).resume() as evaluated:
        assert evaluated.evaluate().step == newest.step


def test_a_url_that_cannot_be_used_is_found_before_training(tmp_path: Path, store: Server) -> None:
    for keys, what in (
        ({"dir": "s4://bucket/runs"}, "checkpoint.dir.*s4://bucket/runs"),
        ({"dir": URL, "upload_to": "s3://bucket/other"}, "checkpoint.upload_to"),
    ):
        with pytest.raises(ConfigError, match=what):
            config_of(tmp_path, checkpoint=keys)
    with pytest.raises(ConfigError, match="run.dir"):
        config_of(tmp_path, run={"dir": URL})
    config = config_of(tmp_path, checkpoint={"dir": "s3://no-such-bucket/runs"})
    with pytest.raises(StorageError, match="Checkpoint storage validation failed.*NoSuchBucket"):
        fit(config)
    assert store.keys() == []
