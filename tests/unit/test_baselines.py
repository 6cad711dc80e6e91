"""Other models on the rows of a run: their columns, and their scores."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from trainer_files import config_of, fit, summary

from persia.errors import ConfigError
from persia.trainer import baselines, lightgbm_baseline
from persia.trainer.batches import read_rows
from persia.trainer.parts import Parts


def test_columns_of_a_tree(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "id0": pa.array([5, 7, 5, None]),
            "id1": ["a", "b", "c", "a"],
            "dense0": pa.array([1.0, None, 3.0, 4.0], pa.float32()),
            "dense1": [0.5] * 4,
            "label": [0, 1, 0, 1],
        }
    )
    pa.parquet.write_table(rows, tmp_path / "clicks.parquet")
    features = {
        "id0": {"type": "id", "dim": 4, "if_null": "skip"},
        "id1": {"type": "id", "dim": 4},
        "pair": {"type": "cross", "features": ["id0", "id1"], "dim": 4},
        "dense0": {"type": "dense", "log1p": True},
        "level": {"type": "bucket", "column": "dense0", "boundaries": [2], "dim": 4},
    }
    config = config_of(tmp_path, features=features, data={"split": {"fractions": [1, 0, 0]}})
    transform = config.compiled.fit(rows)
    columns = lightgbm_baseline.Columns(config, transform)
    assert (columns.numbers, columns.slots, columns.left_out) == (["dense0"], ["id0", "id1"], ["pair"])
    part = Parts(config).train
    known = columns.read([*read_rows(part, transform, 2)])
    np.testing.assert_array_equal(known[:, 0], [1.0, np.nan, 3.0, 4.0])  # as in the file
    assert known[0, 1] == known[2, 1] != known[1, 1] and np.isnan(known[3, 1])
    assert known[0, 2] == known[3, 2] and len({*known[:, 2]}) == 3
    pa.parquet.write_table(rows.set_column(1, "id1", pa.array(["z", "b", "b", "b"])), tmp_path / "clicks.parquet")
    later = columns.read([*read_rows(Parts(config).train, transform, 4)])
    assert np.isnan(later[0, 2]) and later[1, 2] == known[1, 2]


def test_a_rival_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ConfigError, match="lightgbm: the package cannot be imported") as caught:
        baselines.find("lightgbm")
    assert caught.value.hint == "pip install lightgbm"


def test_lightgbm_is_judged_on_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    config = config_of(tmp_path)
    trainer, _ = fit(config)
    assert trainer.folder is not None
    baselines.find("lightgbm")(config, trainer.folder)
    found = summary(trainer)
    for part in ("valid", "test"):
        rival, own = found["baseline"][part]["label"], found[part]["labels"]["label"]
        assert rival["rows"] == own["rows"] and 0.55 < rival["auc"] < 0.9
    assert "test, label, lightgbm" in (trainer.folder.path / "report.html").read_text()
