"""The vocabulary of a table: ids with rows, ids that wait for admission, and the hit rate of look-ups."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Batches, Configure, Verb
from test_training import make, train

from persia.data import DataLoader
from persia.doctor import vocabulary
from persia.doctor.vocabulary import TableReport
from persia.embedding.optim import SGD

COUNTED = "a: {dim: 4}\nb: {dim: 4, admission: {min_count: 3}}"


def of_checkpoint(path: Path) -> dict[str, TableReport]:
    head = json.loads((path / "MANIFEST.json").read_text())["head"]
    return {one.name: one for one in vocabulary.of_manifest(head)}


@pytest.mark.stack
def test_a_checkpoint_has_the_vocabulary_of_its_step(configure: Configure, tmp_path: Path, verb: Verb) -> None:
    configure(COUNTED)
    with make(optimizer=SGD(0.1)) as ctx:
        train(ctx, DataLoader(Batches(20, ids=300), reproducible=True))
        ctx.dump_checkpoint(tmp_path / "ckpt")
        live = ctx.engine.stats()["tables"]
    saved = of_checkpoint(tmp_path / "ckpt")
    a, b = saved["a"], saved["b"]
    for name, one in saved.items():
        now, lookups = live[name], live[name]["lookups"]
        assert (one.rows, one.inserted, one.evicted) == (now["rows"], now["inserted"], 0)
        assert (one.hits, one.looked_up) == (lookups["hits"], sum(lookups.values()))
        assert (one.waiting, one.seen_once) == (now["waiting"], now["seen_once"])
        assert one.memory_bytes and one.memory_bytes > 16 * one.rows
    assert a.rows == a.inserted and a.waiting == 0, "every id gets a row at once"
    assert b.waiting and b.seen_once, "an id of b waits for its third push"
    assert b.seen_once < b.waiting
    assert a.hit_rate and b.hit_rate and b.hit_rate < 1 and a.hit_rate < 1
    out, _ = verb("ckpt", "show", "ckpt", "--tables")
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line[:2] in ("a ", "b ")}
    assert lines["a"][-2:] == ["-", "-"] and lines["b"][-2:] == [f"{b.waiting:,}", f"{b.seen_once:,}"]
    assert f"{a.hit_rate:.1%}" in lines["a"] and f"{b.rows:,}" in lines["b"]
    assert "since the generation began" in out and "note:" not in out
    assert "-: no id waits, as in a table without admission by count" in " ".join(out.split())


def test_a_checkpoint_without_counters_says_so(tmp_path: Path, verb: Verb) -> None:
    vectors = pa.array([[0.5, 1.0]] * 3, pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": pa.array([1, 2, 3], pa.uint64()), "weights": vectors}), tmp_path / "user.parquet")
    verb("ckpt", "import", "user.parquet", "--table", "user", "-o", "imported")
    assert of_checkpoint(tmp_path / "imported")["user"] == TableReport("user", 3)
    out, _ = verb("ckpt", "show", "imported", "--tables")
    assert "note: the checkpoint has only the number of rows" in out and "persia status" in out


def test_parts_of_several_servers_are_added() -> None:
    def part(name: str, rows: int, hits: int, missing: int) -> dict[str, object]:
        zero = dict.fromkeys(("memory_bytes", "inserted", "evicted", "expired", "waiting", "seen_once"), 0)
        lookups = {"hits": hits, "initial": 1, "missing": missing}
        return {**zero, "name": name, "rows": rows, "evicted": 2, "lookups": lookups}

    user, item = vocabulary.of_parts([part("user", 3, 5, 0), part("item", 1, 0, 0), part("user", 4, 1, 2)])
    assert (user.name, user.rows, user.evicted, user.hits, user.looked_up) == ("user", 7, 4, 6, 10)
    assert user.hit_rate == 0.6 and item.hit_rate == 0.0
    assert TableReport("none", 0, hits=0, looked_up=0).hit_rate is None
