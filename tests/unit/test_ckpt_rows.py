"""Rows of a checkpoint to Parquet and back: equal rows, one message for all mistakes, no partial files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Batches, Configure
from small_collection import TABLES, bits, collection, fresh, rows, step
from test_training import SLOTS, make, train
from trainer_files import config_of
from typer.testing import CliRunner, Result

from persia.checkpoint import rows_export, rows_import
from persia.checkpoint.rows_import import import_rows
from persia.cli.main import app
from persia.ctx import Checkpoints, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad, Adam
from persia.errors import CheckpointError, ConfigError, DataError, PersiaError, StorageError, UsageError
from persia.features import hash_text
from persia.nn import EmbeddingCollection, TableConfig
from persia.runtime import contexts
from persia.trainer import Trainer


def persia(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def said(*words: str | Path) -> str:
    done = persia(*words)
    assert done.exit_code == 0, done.output or done.exception
    return done.output


def refused(*words: str | Path) -> PersiaError:
    error = persia(*words).exception
    assert isinstance(error, PersiaError), error
    return error


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a checkpoint of two tables, and their rows."""
    model, dense_optimizer = fresh()
    tables = collection(Adagrad(0.1))
    for number in range(10):
        step(model, tables, dense_optimizer, number)
    tables.save(tmp_path / "saved", model=model.state_dict())
    return tmp_path / "saved", rows(tables)


def write(path: Path, ids: Any, weights: Any, names: tuple[str, str] = ("id", "weights")) -> Path:
    pq.write_table(pa.table([ids, weights], names=[*names]), path)
    return path


def vectors(count: int, dim: int = 4) -> pa.Array:
    values = np.arange(count * dim, dtype=np.float32) / 8
    return pa.FixedSizeListArray.from_arrays(pa.array(values), dim)


def read(path: Path) -> dict[int, list[float]]:
    table = pq.read_table(path)
    return dict(zip(table["id"].to_pylist(), table["weights"].to_pylist(), strict=True))


def test_exported_and_imported_rows_are_equal(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_export, "GROUP_BYTES", 500)  # several row groups
    monkeypatch.setattr(rows_import, "BATCH_BYTES", 500)
    folder, expected = saved
    for table in "ab":
        out = tmp_path / f"{table}.parquet"
        assert "rows of table" in said("ckpt", "rows", folder, "--table", table, "-o", out)
        found = read(out)
        here = {number for number in range(200) if expected[table][number].any()}
        assert found.keys() == here and len(here) > 20
        assert pq.ParquetFile(out).num_row_groups > 3
        for number in here:
            assert found[number] == expected[table][number].tolist()
    made = said("ckpt", "import", tmp_path / "a.parquet", tmp_path / "b.parquet", "--table", "a", "--table", "b",
                "-o", tmp_path / "made")  # fmt: skip
    assert "rows of table a, without optimizer state" in made and "of table b" in made
    assert said("ckpt", "verify", tmp_path / "made").startswith("ok: ")
    tables = collection(Adam(0.01))
    loaded = tables.load(tmp_path / "made")
    assert loaded.step == 0 and loaded.imported and loaded.seed is None
    for name, tensor in rows(tables).items():
        assert torch.equal(tensor, expected[name])
    for table in "ab":
        said("ckpt", "rows", tmp_path / "made", "--table", table, "-o", tmp_path / f"{table}2.parquet")
        assert (tmp_path / f"{table}.parquet").stat().st_size > 0
        assert pq.read_table(tmp_path / f"{table}2.parquet").equals(pq.read_table(tmp_path / f"{table}.parquet"))


def test_training_from_imported_rows_begins_with_the_initial_state(tmp_path: Path) -> None:
    """Training gives bit-identical rows from an untrained table and from its exported and imported rows."""
    optimizer = Adagrad(0.1, initial_accumulator_value=0.3)
    ids = np.arange(200, dtype=np.uint64)
    zeros = np.zeros((200, 4), np.float32)
    for table in "ab":
        write(
            tmp_path / f"{table}.parquet", pa.array(ids), pa.FixedSizeListArray.from_arrays(pa.array(zeros.ravel()), 4)
        )
    import_rows([(tmp_path / "a.parquet", "a"), (tmp_path / "b.parquet", "b")], tmp_path / "made")
    results = []
    for imported in (True, False):
        model, dense_optimizer = fresh()
        tables = EmbeddingCollection(TABLES, optimizer, EmbeddingConfig((0.0, 0.0)))
        if imported:
            tables.load(tmp_path / "made")
        for number in range(10):
            step(model, tables, dense_optimizer, number)
        results.append(bits(tables, model))
        tables.close()
    assert results[0] == results[1]


def test_state_is_exported_where_it_is_asked_for(saved: tuple[Path, object], tmp_path: Path) -> None:
    said("ckpt", "rows", saved[0], "--table", "a", "-o", tmp_path / "a.parquet", "--state")
    schema = pq.read_schema(tmp_path / "a.parquet")
    assert schema.names == ["id", "weights", "last_used", "state"]
    assert schema.field("weights").type.list_size == schema.field("state").type.list_size == 4
    about = json.loads(schema.metadata[b"persia"])
    assert about == {"table": "a", "step": 10, "optimizer": "adagrad"}
    table = pq.read_table(tmp_path / "a.parquet")
    assert set(table["last_used"].to_pylist()) <= set(range(1, 11))
    assert min(min(row) for row in table["state"].to_pylist()) >= 0.0099


def test_tables_are_listed(saved: tuple[Path, object]) -> None:
    first, second = said("ckpt", "rows", saved[0]).splitlines()
    assert first.startswith("a  ") and "dim 4" in first and "optimizer adagrad" in first and "features a" in first
    assert second.startswith("b  ")


def test_an_export_is_refused_before_it_writes(saved: tuple[Path, object], tmp_path: Path) -> None:
    folder, out = saved[0], tmp_path / "out.parquet"
    assert "its tables are a, b" in str(refused("ckpt", "rows", folder, "--table", "c", "-o", out))
    assert "--table is missing" in str(refused("ckpt", "rows", folder, "-o", out))
    assert "-o a.parquet" in str(refused("ckpt", "rows", folder, "--table", "a"))
    assert "which ends in .parquet" in str(
        refused("ckpt", "rows", folder, "--table", "a", "-o", out.with_suffix(".csv"))
    )
    assert isinstance(refused("ckpt", "rows", tmp_path / "none", "--table", "a", "-o", out), CheckpointError)
    absent = refused("ckpt", "rows", folder, "--table", "a", "-o", tmp_path / "none" / "a.parquet")
    assert isinstance(absent, StorageError) and "none/a.parquet" in str(absent)
    out.write_text("mine")
    assert "--force" in str(refused("ckpt", "rows", folder, "--table", "a", "-o", out))
    assert out.read_text() == "mine"
    said("ckpt", "rows", folder, "--table", "a", "-o", out, "--force")
    assert len(read(out)) > 20


def test_an_export_of_a_damaged_checkpoint_leaves_nothing(saved: tuple[Path, object], tmp_path: Path) -> None:
    shard = sorted(saved[0].glob("shard-*.arrow"))[-1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    error = refused("ckpt", "rows", saved[0], "--table", "a", "-o", tmp_path / "a.parquet")
    assert isinstance(error, CheckpointError) and shard.name in str(error)
    assert not list(tmp_path.glob("*a.parquet*"))


def test_ids_are_those_of_features(tmp_path: Path) -> None:
    texts = ["Anna", "Bob", ""]
    plain = write(tmp_path / "plain.parquet", pa.array(texts), vectors(3))
    big = [2**64 - 1, 0, 7]
    numbers = write(tmp_path / "numbers.parquet", pa.array(big, pa.uint64()), vectors(3))
    coded = write(tmp_path / "coded.parquet", pa.array(texts).dictionary_encode(), vectors(3))

    def ids_of(path: Path, *options: str) -> list[int]:
        made, out = tmp_path / "made", tmp_path / "out.parquet"
        said("ckpt", "import", path, "--table", "t", "-o", made, "--force", *options)
        said("ckpt", "rows", made, "--table", "t", "-o", out, "--force")
        by_vector = {vector[0]: number for number, vector in read(out).items()}
        return [by_vector[row / 2] for row in range(3)]

    assert ids_of(plain) == ids_of(coded) == [hash_text(text) for text in texts]
    assert ids_of(plain, "--lower", "--prefix", "u:") == [hash_text(f"u:{text.lower()}") for text in texts]
    assert ids_of(numbers) == big
    assert ids_of(numbers, "--prefix", "n") == [hash_text(f"n{number}") for number in big]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("lists", [pa.list_, pa.large_list])
def test_vectors_may_be_lists_of_any_float(tmp_path: Path, kind: pa.DataType, lists: Any) -> None:
    values = np.array([[0.5, 0.25], [1.0, 2.0]], kind.to_pandas_dtype())
    weights = pa.array(list(values), lists(kind))
    write(tmp_path / "v.parquet", pa.array([3, 4]), weights, ("user", "vector"))
    said("ckpt", "import", tmp_path / "v.parquet", "--table", "t", "-o", tmp_path / "made", "--id-column", "user",
         "--weights-column", "vector")  # fmt: skip
    said("ckpt", "rows", tmp_path / "made", "--table", "t", "-o", tmp_path / "out.parquet")
    assert read(tmp_path / "out.parquet") == {3: [0.5, 0.25], 4: [1.0, 2.0]}


def test_rows_that_are_no_rows_are_named_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_import, "BATCH_BYTES", 32)  # four rows at a time
    good = [1.0, 2.0]
    weights: list[Any] = [good] * 40
    weights[5], weights[9], weights[13], weights[14] = [1.0], None, [None, 1.0], [1.0, 2.0, 3.0]
    weights[20], weights[31], weights[38] = [float("nan"), 0.0], [0.0, float("inf")], [1e39, 0.0]
    ids: list[Any] = [*range(40)]
    ids[2] = ids[27] = None
    write(tmp_path / "v.parquet", pa.array(ids), pa.array(weights, pa.list_(pa.float64())))
    error = refused("ckpt", "import", tmp_path / "v.parquet", "--table", "t", "-o", tmp_path / "made")
    assert isinstance(error, DataError)
    for text in (
        "column 'id' is null in 2 rows: 3, 28",
        "column 'weights' is null, or has a null, in 2 rows: 10, 14",
        "differs in length from the first vector (2) in 2 rows: 6 (length 1), 15 (length 3)",
        "has NaN, infinity, or a number outside the range of float32 in 3 rows: 21, 32, 39",
        "Correct or remove these rows",
    ):
        assert text in str(error), error
    assert not (tmp_path / "made").exists()


def test_repeated_ids_are_named(tmp_path: Path) -> None:
    write(tmp_path / "v.parquet", pa.array([*range(100), 7, 7, 50]), vectors(103))
    error = refused("ckpt", "import", tmp_path / "v.parquet", "--table", "t", "-o", tmp_path / "made")
    assert isinstance(error, DataError)
    assert "table t: 3 rows have the id of an earlier row: row 101 has the id 7 of row 8, row 102 has" in str(error)
    assert not (tmp_path / "made").exists()


def test_files_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    def error(path: Path, *more: str | Path) -> str:
        return str(refused("ckpt", "import", path, "--table", "t", "-o", tmp_path / "made", *more))

    text = tmp_path / "text.parquet"
    text.write_text("no Parquet")
    assert "not a readable Parquet file" in error(text)
    assert "no such file" in error(tmp_path / "none.parquet")
    assert "found a folder" in error(tmp_path)
    assert "no rows" in error(
        write(tmp_path / "e.parquet", pa.array([], pa.int64()), pa.array([], pa.list_(pa.float32())))
    )
    empty = pa.array([None, []], pa.list_(pa.float32()))
    assert "the vector of row 2 is empty" in error(write(tmp_path / "v.parquet", pa.array([1, 2]), empty))
    good = write(tmp_path / "good.parquet", pa.array([1, 2]), vectors(2), ("user", "vector"))
    assert "no column 'id'; its columns are user, vector; choose one with --id-column" in error(good)
    assert "--weights-column" in error(good, "--id-column", "user")
    assert "has type double, expected an integer or string type" in error(
        write(tmp_path / "f.parquet", pa.array([1.0, 2.0]), vectors(2))
    )
    assert "expected a list of floats" in error(write(tmp_path / "i.parquet", pa.array([1, 2]), pa.array([1.0, 2.0])))
    assert "number of files: 2, of --table options: 1" in error(good, good)
    twice: list[str | Path] = ["ckpt", "import", good, good, "--table", "t", "--table", "t", "-o", tmp_path / "made"]
    assert "specify a separate table for each file" in str(refused(*twice))
    assert not (tmp_path / "made").exists()


def test_an_import_replaces_nothing_unasked(tmp_path: Path) -> None:
    source = write(tmp_path / "v.parquet", pa.array([1, 2]), vectors(2))
    words: list[str | Path] = ["ckpt", "import", source, "--table", "t", "-o", tmp_path / "run" / "step-0"]
    said(*words)
    assert "--force" in str(refused(*words))
    said(*words, "--force")
    inside = refused(*words[:-1], tmp_path / "run")
    assert isinstance(inside, UsageError) and "contains checkpoints, such as step-0" in str(inside)


def test_a_run_starts_from_imported_rows(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="persia")
    configure(SLOTS)
    source = write(tmp_path / "v.parquet", pa.array(range(1000, 1100)), vectors(100))
    import_rows([(source, "a")], tmp_path / "run" / "step-0")

    def has_rows(ctx: Any) -> bool:
        return bool(ctx.engine.stats()["rows"]["a"] >= 100)

    with make() as ctx:
        ctx.load_checkpoint(tmp_path / "run" / "step-0")
        assert has_rows(ctx) and ctx.step == 0
        train(ctx, DataLoader(Batches(3)))
        assert has_rows(ctx) and ctx.step == 3
    with eval_ctx() as evaluation:
        evaluation.load_embedding(tmp_path / "run" / "step-0")
        assert has_rows(evaluation)
    state = torch.optim.lr_scheduler.StepLR(fresh()[1], 3)
    with make(checkpoints=Checkpoints(tmp_path / "run", every=2, state={"decay": state})) as ctx:
        assert has_rows(ctx) and ctx.step == 0
        assert "training starts at step 1 with the rows of" in caplog.text and "resumes" not in caplog.text
        train(ctx, DataLoader(Batches(3)))
    with make(checkpoints=Checkpoints(tmp_path / "run", every=2, state={"decay": state})) as ctx:
        assert has_rows(ctx) and ctx.step == 3 and "training resumes after step 3" in caplog.text


def test_new_rows_beside_imported_ones_are_those_of_the_script(tmp_path: Path) -> None:
    source = write(tmp_path / "v.parquet", pa.array([1_000_000]), vectors(1))
    import_rows([(source, "a")], tmp_path / "made")
    largest = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tables = EmbeddingCollection([TableConfig("a", 4, ["a"])])
        tables.load(tmp_path / "made")
        largest.append(float(tables({"a": torch.arange(100)})["a"].detach().abs().max()))
        tables.close()
    assert all(0.04 < each < 0.05 for each in largest), "the range of the collection's own default"
    assert largest[0] != largest[1], "the seed of the script"


def test_a_table_of_another_dim_is_refused(tmp_path: Path) -> None:
    import_rows([(write(tmp_path / "v.parquet", pa.array([1, 2]), vectors(2, dim=3)), "a")], tmp_path / "made")
    tables = collection()
    with pytest.raises(CheckpointError, match="its table a has dim 3, but dim 4 is configured"):
        tables.load(tmp_path / "made")
    import_rows([(write(tmp_path / "v.parquet", pa.array([1, 2]), vectors(2)), "user")], tmp_path / "made", force=True)
    with pytest.raises(CheckpointError, match="it has a table user, but the configured tables are a, b"):
        tables.load(tmp_path / "made")


@pytest.mark.parametrize("at", [".", "s0"])
def test_a_checkpoint_of_persiaml_is_refused_by_name(configure: Configure, tmp_path: Path, at: str) -> None:
    folder = tmp_path / "persiaml"
    (folder / at).mkdir(parents=True)
    (folder / at / "embedding_dump_done").write_text("num_shards: 1\n")
    (folder / at / "replica_0_shard_0.emb").write_bytes(b"\0" * 20)
    text = r"persiaml is a PersiaML checkpoint .*cannot be loaded or converted"
    configure(SLOTS)
    with make() as ctx:
        for load in (ctx.load_checkpoint, ctx.load_embedding):
            with pytest.raises(CheckpointError, match=text) as caught:
                load(folder)
            assert "persia ckpt import" in caught.value.hint
    tables = collection()
    with pytest.raises(CheckpointError, match=text):
        tables.load(folder)
    for verb in ("show", "verify", "rows", "list"):
        assert "a PersiaML checkpoint" in str(refused("ckpt", verb, folder)), verb
    assert "a PersiaML checkpoint" in str(refused("ckpt", "import", folder, "--table", "a", "-o", tmp_path / "made"))


def test_a_trainer_starts_from_imported_rows(tmp_path: Path) -> None:
    """An id that does not occur in the data keeps its imported vector until the end of training."""
    config = config_of(tmp_path, train={"start_from": "pretrained"})
    ids = pq.read_table(tmp_path / "clicks.parquet")["id0"].unique().to_pylist()
    far = 10_000
    source = write(tmp_path / "v.parquet", pa.array([*ids[:2], far]), vectors(3))
    import_rows([(source, "id0")], tmp_path / "pretrained")
    with Trainer(config) as trainer:
        last = [*trainer.fit()][-1].step
        assert trainer.folder is not None
        save = trainer.folder.saves(config) / f"step-{last}"
    said("ckpt", "rows", str(save), "--table", "id0", "-o", tmp_path / "after.parquet")
    found = read(tmp_path / "after.parquet")
    assert found[far] == [1.0, 1.125, 1.25, 1.375] and len(found) == len(ids) + 1
    assert found[ids[1]] != [0.5, 0.625, 0.75, 0.875]
    for start, kind in ((save, "checkpoint of a run"), (trainer.folder.path, "run")):
        other = config_of(tmp_path, train={"start_from": str(start)}, run={"name": "two"})
        with pytest.raises(ConfigError, match=f"{start} is a {kind}, not a checkpoint of") as caught:
            Trainer(other).fit()
        assert f"persia ckpt rows {start} " in caught.value.hint and "persia ckpt import" in caught.value.hint
    assert not (tmp_path / "runs" / "two").exists(), "nothing is made"
    import_rows([(source, "nope")], tmp_path / "other")
    third = config_of(tmp_path, train={"start_from": "other"}, run={"name": "three"})
    with Trainer(third) as trainer, pytest.raises(CheckpointError):
        trainer.fit()
    assert contexts.current() is None, "a context that fails to open is left"
    refused = "has no checkpoint; it failed: ForeignCheckpointError"
    with Trainer(third) as trainer, pytest.raises(UsageError, match=refused):
        trainer.resume(tmp_path / "runs" / "three").evaluate()
