"""The output of ``persia train``, ``eval``, ``predict`` and ``ckpt`` for runs, files and rows. Tests share one run."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from conftest import Verb
from trainer_files import write_clicks, write_config

import persia
from persia.trainer import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``clicks.parquet``, ``persia.yml``, its run ``one``, and new rows."""
    folder = tmp_path_factory.mktemp("verbs")
    table = pa.parquet.read_table(write_clicks(folder / "clicks.parquet", 1000))
    write_config(folder, data={"batch_size": 256})
    path = folder / "persia.yml"
    with Trainer(persia.load_config(path, ["data.epochs=1", "run.dir=" + str(folder / "runs")])) as trainer:
        for _ in trainer.fit():
            pass
    pa.parquet.write_table(table.slice(100, 200), folder / "new.parquet")
    pa.csv.write_csv(table.slice(100, 200), folder / "new.csv")
    return folder


@pytest.fixture
def verb(verb: Verb, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Run a verb in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return verb


def wrong_csv(folder: Path, row: int, name: str = "wrong.csv") -> Path:
    """Write ``new.csv`` with a text in ``dense0`` of a row (from 0). The file has an empty line, which is no row."""
    header, *lines = (folder / "new.csv").read_text().splitlines()
    columns = [each.strip('"') for each in header.split(",")]
    values = lines[row].split(",")
    values[columns.index("dense0")] = "n/a"
    lines[row] = ",".join(values)
    (folder / name).write_text("\n".join([header, "", *lines]) + "\n")
    return folder / name


# --- the rows that eval scores


def test_eval_says_what_it_has_judged(verb: Verb, folder: Path) -> None:
    out, errors = verb("eval", "runs/LATEST")
    assert "runs/one: checkpoints/step-4: the test set of clicks.parquet" in out and not errors
    out, _ = verb("eval", "runs/one/checkpoints", "new.parquet")
    assert "runs/one: checkpoints/step-4: new.parquet" in out
    assert "unusual values in 200 rows: none" in out
    found = json.loads(verb("eval", "runs/one", "--json")[0])
    assert found["part"] == "test" and found["files"] == [str(folder / "clicks.parquet")] and found["step"] == 4
    assert found["checkpoint"] == str(folder / "runs" / "one" / "checkpoints" / "step-4")


def test_eval_warns_of_a_file_that_was_trained_on(verb: Verb, folder: Path) -> None:
    (folder / "elsewhere").mkdir(exist_ok=True)
    shutil.copy(folder / "clicks.parquet", folder / "elsewhere" / "clicks.parquet")
    for path in ("clicks.parquet", "elsewhere/clicks.parquet"):
        _, errors = verb("eval", "runs/one", path)
        assert "runs/one was trained on " in errors and f"{path}: metrics of rows" in errors
    _, errors = verb("eval", "runs/one", "new.parquet")
    assert not errors


# --- text files


def test_text_files_have_the_types_of_training(verb: Verb) -> None:
    from_csv, from_parquet = (verb("eval", "runs/one", f"new.{kind}", "--json")[0] for kind in ("csv", "parquet"))
    one, other = json.loads(from_csv), json.loads(from_parquet)
    for key in ("labels", "loss", "unusual", "ids_without_row"):
        assert one[key] == other[key]
    for kind in ("csv", "parquet"):
        verb("predict", "runs/one", f"new.{kind}", "-o", f"{kind}.parquet", "--keep", "id0", "--force")
    assert pa.parquet.read_table("csv.parquet").equals(pa.parquet.read_table("parquet.parquet"))


def test_a_wrong_value_of_a_text_file_is_named_or_counted(verb: Verb, folder: Path) -> None:
    wrong_csv(folder, 148)
    verb("predict", "runs/one", "new.csv", "-o", "right.parquet")
    place = r"wrong.csv: row 149 (line 151), column 'dense0', read by features.dense0 ("
    for arguments in (("eval", "runs/one", "wrong.csv"), ("predict", "runs/one", "wrong.csv", "-o", "o.parquet")):
        _, errors = verb(*arguments, code=2)
        assert place in errors and "found 'n/a', but the type of the column is float" in errors
        assert "persia.yml:" in errors.partition(place)[2]
    assert not (folder / "o.parquet").exists()
    out, _ = verb("predict", "runs/one", "wrong.csv", "-o", "lenient.parquet", "--no-strict", "--force")
    assert "unusual values in 200 rows:\n  dense0: 1 of a wrong type\n" in out
    scores, whole = (pa.parquet.read_table(folder / name)["score"] for name in ("lenient.parquet", "right.parquet"))
    differing = [row for row in range(200) if scores[row] != whole[row]]
    assert differing == [148]


def test_a_text_file_without_rows(verb: Verb, folder: Path) -> None:
    (folder / "header.csv").write_text((folder / "new.csv").read_text().partition("\n")[0] + "\n")
    (folder / "nothing.csv").write_text("")
    messages = {"header.csv": "header.csv: the file has no rows, only a header", "nothing.csv": "the file is empty"}
    for name, message in messages.items():
        _, errors = verb("predict", "runs/one", name, "-o", "o.parquet", code=2)
        assert message in errors
        _, errors = verb("data", "inspect", name, code=2)
        assert message in errors


# --- predictions


def test_predict_counts_rows_and_unusual_values(verb: Verb, folder: Path) -> None:
    table = pa.parquet.read_table(folder / "new.parquet")
    ids = [f"new{row}" for row in range(200)]
    numbers = pa.array([None, *table["dense0"].to_pylist()[1:]], pa.float32())
    changed = table.set_column(table.column_names.index("id1"), "id1", pa.array(ids))
    changed = changed.set_column(table.column_names.index("dense0"), "dense0", numbers)
    pa.parquet.write_table(changed, folder / "changed.parquet")
    out, _ = verb("predict", "runs/one", "changed.parquet", "-o", "changed-scores.parquet")
    assert "runs/one: checkpoints/step-4\nunusual values in 200 rows:\n  dense0: 1 null\n" in out
    share = float(out.partition("% of the looked-up ids")[0].split()[-1])
    assert 50 < share < 100
    assert out.endswith("wrote changed-scores.parquet: 200 rows, score\n")


def test_a_column_to_keep_that_does_not_exist_is_named(verb: Verb) -> None:
    _, errors = verb("predict", "runs/one", "new.parquet", "-o", "o.parquet", "--keep", "ID_0", "--keep", "x", code=2)
    assert (
        "no column 'ID_0' (did you mean 'id0'?), read by --keep; no column 'x', read by --keep; its columns are id0"
        in errors
    )
    assert "its columns are id0, id1, dense0, dense1, label" in errors


# --- checkpoints of a run


def test_ckpt_takes_a_run(verb: Verb) -> None:
    listed = verb("ckpt", "list", "runs/one")[0]
    assert "step-4  step 4" in listed and verb("ckpt", "list", "runs/LATEST")[0] == listed
    for run in ("runs/one", "runs/LATEST"):
        out, errors = verb("ckpt", "verify", run)
        assert out.startswith("ok: runs/one/checkpoints/step-4: ") and errors == "runs/one: checkpoints/step-4\n"
        assert json.loads(verb("ckpt", "show", run, "--json")[0])["head"]["step"] == 4
        assert "id0  " in verb("ckpt", "rows", run)[0]
    verb("ckpt", "rows", "runs/one", "--table", "id0", "-o", "rows.parquet", "--force")
    assert {"id", "weights"} <= {*pa.parquet.read_table("rows.parquet").column_names}


def test_a_checkpoint_is_shown_by_its_tables(verb: Verb) -> None:
    """The shard files are counted. Their names and hashes are printed with ``--files`` and in the JSON."""
    manifest = json.loads(verb("ckpt", "show", "runs/one", "--json")[0])
    shown = verb("ckpt", "show", "runs/one")[0].splitlines()
    tables, rest = shown[:3], shown[3:]
    assert [line.split()[0] for line in tables] == ["id0", "id1", "level"]
    assert all(" rows  dim " in line and "  optimizer " in line and "  features " in line for line in tables)
    size = sum(file["bytes"] for file in manifest["files"])
    count = len(manifest["files"])
    assert rest == [f"runs/one/checkpoints/step-4: step 4, {count} files, {size:,} bytes"] and count > 100
    listed = verb("ckpt", "show", "runs/one", "--files")[0].splitlines()
    assert listed[:4] == shown
    assert [line.split()[0] for line in listed[4:]] == [file["name"] for file in manifest["files"]]
    assert all(file["blake3"] in line for file, line in zip(manifest["files"], listed[4:], strict=True))
    assert "mutually exclusive" in verb("ckpt", "show", "runs/one", "--files", "--json", code=2)[1]


# --- a run's files


def test_the_report_says_what_was_trained(folder: Path) -> None:
    page = (folder / "runs" / "one" / "report.html").read_text()
    rows = json.loads((folder / "runs" / "one" / "summary.json").read_text())["rows"]
    assert rows.keys() == {"train", "valid", "test"} and sum(rows.values()) == 1000
    for what, value in (
        ("model", "dcnv2"),
        ("files of train", str(folder / "clicks.parquet")),
        ("--set", f"data.epochs=1, run.dir={folder / 'runs'}"),
        *((f"rows of {part}", str(count)) for part, count in rows.items()),
    ):
        assert f"<td>{what}</td><td class=n>{value}</td>" in page, what
    facts = json.loads((folder / "runs" / "one" / "run.json").read_text())
    assert facts["model"] == "dcnv2" and facts["set"][0] == "data.epochs=1"


def test_a_finished_run_says_how_it_is_trained_on(verb: Verb) -> None:
    out, errors = verb("train", "persia.yml", "--resume")
    assert "resuming runs/one" in errors
    assert "runs/one: the run is finished: step 4, data.epochs 1; nothing was trained" in out
    assert "to continue training: persia train persia.yml --set data.epochs=2 --resume runs/one" in out


def test_a_missing_report_of_a_finished_run_is_written_by_resume(verb: Verb, folder: Path) -> None:
    report = folder / "runs" / "one" / "report.html"
    before = report.read_text()
    report.unlink()
    verb("train", "persia.yml", "--resume")
    assert report.read_text() == before


# --- the configuration


def test_config_check_reads_the_columns_of_the_data(verb: Verb, folder: Path) -> None:
    out, _ = verb("config", "check", "persia.yml")
    assert "ok: persia.yml: the columns of 1 data file fit" in out
    text = (folder / "persia.yml").read_text()
    (folder / "t3.yml").write_text(text.replace("  dense0:\n", "  dens0:\n"))
    line = text.splitlines().index("  dense0:") + 1
    _, errors = verb("config", "check", "t3.yml", code=2)
    assert f"no column 'dens0' (did you mean 'dense0' or 'dense1'?), read by features.dens0 (t3.yml:{line})" in errors
    (folder / "t3.yml").write_text(text.replace("  dense0:\n", "  dense0:\n    column: id1\n"))
    _, errors = verb("config", "check", "t3.yml", code=2)
    assert f"dense0 (t3.yml:{line}): column `id1` is Utf8, allowed: numbers" in errors
    (folder / "t3.yml").write_text(text.replace("clicks.parquet", "absent.parquet"))
    _, errors = verb("config", "check", "t3.yml")
    assert "warning: t3.yml: the columns of the data are not checked: " in errors and "no such file" in errors
    assert not verb("config", "check", "t3.yml", "--no-data")[1]


def test_a_mistake_of_an_override_is_named_by_it(verb: Verb) -> None:
    new = "features.x={type: id, dim: 4, column: id_0}"
    _, errors = verb("train", "persia.yml", "--set", new, "--set", "run.name=x", code=2)
    assert f"no column 'id_0' (did you mean 'id0'?), read by features.x (--set {new})" in errors


def test_usage_names_the_command(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/somewhere/persia/__main__.py", raising=False)
    assert "Usage: persia train" in verb("train", code=2)[1]
