"""Evaluation, ``predict`` and bundles give equal scores, for unseen ids and missing values too."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bundle_files import LABELS, bundle_of, logits, table_of, write_run

import persia
from persia.runtime.errors import UsageError
from persia.serving import Bundle, parity
from persia.trainer import Trainer
from persia.trainer.metrics import binary, regression

FORMS = ["f32", "f16", "int8"]
SIZES = [1, 7, 100, 4096]
BATCH = 100
"""``data.batch_size`` of the run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, ``rows.parquet`` with 1,000 rows, and a bundle of each form."""
    folder = tmp_path_factory.mktemp("parity")
    run = write_run(folder)
    pq.write_table(table_of(1000, 2, unseen=True), folder / "rows.parquet")
    for form in FORMS:
        bundle_of(run, folder / form, rows=form)
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> pa.Table:
    return pq.read_table(folder / "rows.parquet")


@pytest.fixture(scope="module")
def predicted(folder: Path) -> dict[str, Any]:
    """The scores of ``predict``, the results of ``evaluate``, and the share of ids without a row."""
    with Trainer(persia.load_config(folder / "runs" / "one" / "persia.yml", folder=folder)) as trainer:
        trainer.resume(folder / "runs" / "one")
        predictions = trainer.predict(str(folder / "rows.parquet"))
        parts = [scores for _, scores in predictions]
        report = trainer.evaluate(str(folder / "rows.parquet"))
    scores = np.stack([np.concatenate([part[label] for part in parts]) for label in LABELS], 1)
    return {"scores": scores, "report": report, "without_row": predictions.without_row}


def test_exact_rows_give_the_scores_of_predict_bit_by_bit_in_the_same_batches(
    folder: Path, rows: pa.Table, predicted: dict[str, Any]
) -> None:
    with Bundle.open(folder / "f32") as bundle:
        found = bundle.scores_from(logits(bundle, rows, BATCH))
        looked = bundle.outputs_of(bundle.transform(rows), at_a_time=BATCH)
    assert found.tobytes() == predicted["scores"].tobytes()
    assert looked.unseen / looked.ids == predicted["without_row"] > 0.1
    assert len(np.unique(found[:, 0])) > 500, "scores that do not depend on the rows prove nothing"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_scores_are_within_the_bound_of_their_form_in_batches_of_any_size(
    folder: Path, rows: pa.Table, form: str, size: int
) -> None:
    with Bundle.open(folder / form) as bundle, Bundle.open(folder / "f32") as exact:
        found, wanted = logits(bundle, rows, size), logits(exact, rows, BATCH)
        assert bundle.manifest.parity.bound == parity.BOUNDS[form]
    far = parity.difference(found, wanted)
    assert far <= parity.BOUNDS[form]
    assert form == "f32" or far > parity.SAME, "rounded rows give other scores"


@pytest.mark.parametrize("form", FORMS)
def test_metrics_of_the_scores_are_those_of_evaluation(
    folder: Path, rows: pa.Table, predicted: dict[str, Any], form: str
) -> None:
    with Bundle.open(folder / form) as bundle:
        outputs = logits(bundle, rows, BATCH)
    labels = {name: np.asarray(rows[name], np.float32) for name in LABELS}
    loss = binary(outputs[:, 0], labels["clicked"], ["log_loss"], None, None).values["log_loss"]
    error = regression(outputs[:, 1], labels["spent"], ["mse"], None).values["mse"]
    report = predicted["report"]
    assert loss is not None and error is not None
    wanted = report.labels["clicked"].values["log_loss"]
    assert loss == wanted if form == "f32" else loss == pytest.approx(wanted, rel=parity.BOUNDS[form])
    assert error == pytest.approx(report.labels["spent"].values["mse"], rel=max(1e-6, parity.BOUNDS[form]))


def test_every_form_of_rows_gives_equal_scores(folder: Path, rows: pa.Table) -> None:
    with Bundle.open(folder / "f16") as bundle:
        names = [each.name for each in bundle.inputs]
        some = rows.select(names).slice(0, 200)
        records = some.to_pylist()
        wanted = bundle.score(some)
        assert wanted.shape == (200, 2) and wanted.dtype == np.float32
        as_json = json.dumps([{**each, "at": each["at"] and each["at"].isoformat()} for each in records])
        columns = {name: some[name].combine_chunks() for name in names}
        lists = {name: some[name].to_pylist() for name in names}
        for given in (records, as_json, columns, lists, some.to_batches()[0], bundle.transform(some)):
            assert bundle.score(given).tobytes() == wanted.tobytes()
        for at in (0, 7, 199):
            assert parity.difference(bundle.score([records[at]]), wanted[at : at + 1]) <= parity.SAME
        assert bundle.score([]).shape == (0, 2)


def test_a_row_without_values_is_scored_as_predict_does(folder: Path, rows: pa.Table) -> None:
    nothing = pa.table({name: pa.nulls(3, rows.schema.field(name).type) for name in rows.schema.names[:-2]})
    pq.write_table(nothing, folder / "nothing.parquet")
    with Trainer(persia.load_config(folder / "runs" / "one" / "persia.yml", folder=folder)) as trainer:
        ((_, wanted),) = trainer.resume(folder / "runs" / "one").predict(str(folder / "nothing.parquet"))
    with Bundle.open(folder / "f32") as bundle:
        found = bundle.score(nothing)
        assert found.tobytes() == np.stack([wanted[label] for label in LABELS], 1).tobytes()
        assert bundle.transform(nothing).report.counts["price"] == {"null": 3}


def test_threads_score_at_the_same_time(folder: Path, rows: pa.Table) -> None:
    with Bundle.open(folder / "int8") as bundle:
        parts = [rows.slice(start, 50) for start in range(0, 1000, 50)]
        wanted = [bundle.score(part).tobytes() for part in parts]
        with ThreadPoolExecutor(8) as threads:
            found = [each.tobytes() for each in threads.map(bundle.score, parts * 5)]
    assert found == wanted * 5


def test_unseen_ids_are_counted_by_feature(folder: Path, rows: pa.Table) -> None:
    with Bundle.open(folder / "f32") as bundle:
        counts = bundle.unseen(bundle.transform(rows))
    assert counts["user"][1] > 50 and counts["hour"][1] <= 1
    assert all(unseen <= ids for ids, unseen in counts.values())


def test_parity_rows_have_the_outputs_of_evaluation(folder: Path) -> None:
    for form in FORMS:
        with Bundle.open(folder / form) as bundle:
            found = bundle.manifest.parity
            table = pq.read_table(folder / form / found.file)
            outputs = np.stack([np.asarray(table[f"{parity.EVALUATION}{label}"]) for label in LABELS], 1)
            assert found.rows == len(table) > 150 and found.largest <= found.bound
            assert parity.difference(logits(bundle, table, BATCH), outputs) <= found.largest + parity.SAME
            assert table["user"][0].as_py() is None, "the row without values comes first"


def test_smaller_forms_are_smaller(folder: Path) -> None:
    sizes = {form: (folder / form / "table-000.rows").stat().st_size for form in FORMS}
    assert sizes["f32"] == 2 * sizes["f16"] == 2 * sizes["int8"], "4 weights of int8 and their scale take 8 bytes"


def test_a_closed_bundle_is_refused(folder: Path, rows: pa.Table) -> None:
    with Bundle.open(folder / "f32") as bundle:
        pass
    with pytest.raises(UsageError, match="closed"):
        bundle.score(rows)
