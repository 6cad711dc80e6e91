"""Common mistakes that led to a wrong model or an unclear error: each is now reported with the next step."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Batches, Configure, TinyModel
from test_training import SLOTS, make, train
from torch.utils.dlpack import from_dlpack

from persia.ctx import EmbeddingCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD, Adagrad
from persia.errors import CheckpointError, DataError, FeatureTypeError, UsageError
from persia.nn import EmbeddingCollection, TableConfig

TABLES = [TableConfig("a", 4, ["a"]), TableConfig("b", 4, ["b"])]


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING and text in record.message]


def ids_batch(a: Any, b: Any, *, label: np.ndarray | None = None, dense: np.ndarray | None = None) -> PersiaBatch:
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("a", a), IDTypeFeatureWithSingleID("b", b)],
        [NonIDTypeFeature(np.zeros((len(a), 3), np.float32) if dense is None else dense, name="age")],
        None if label is None else [Label(label, name="click")],
        requires_grad=label is not None,
    )


class Few(IterableDataset):
    """The same batch several times."""

    def __init__(self, batch: PersiaBatch, count: int = 3) -> None:
        super().__init__()
        self.batch, self.count = batch, count

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield from [self.batch] * self.count


# --- missing rows


def test_an_evaluation_of_empty_tables_warns_once(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    configure(SLOTS)
    for _ in range(2):
        caplog.clear()
        with eval_ctx(model=TinyModel()) as ctx:
            for batch in DataLoader(Batches(3)):
                ctx.forward(batch)
        (warning,) = warnings(caplog, "evaluation")
        assert "the tables are empty (0 rows)" in warning and "ctx.load_checkpoint(DIRECTORY)" in warning
        assert (ctx.evaluation_report.batches, ctx.evaluation_report.missing_share) == (3, 1.0)


def test_the_share_of_ids_without_a_row_is_in_the_report_of_every_evaluation(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    configure(SLOTS)
    known, strange = np.arange(200, dtype=np.uint64), np.arange(10_000, 10_200, dtype=np.uint64)
    with make() as ctx:
        train(ctx, DataLoader(Few(ids_batch(known, known, label=np.zeros((200, 1), np.float32))), reproducible=True))
        with eval_ctx(model=ctx.model) as first:
            first.forward(ids_batch(known, known))
        assert (first.evaluation_report.ids, first.evaluation_report.missing) == (400, 0)
        assert "evaluation: batches: 1, ids: 400, ids without a row, which read as zeros: 0.0 %" in caplog.text
        assert not warnings(caplog, "evaluation")
        mixed = np.concatenate([known[:150], strange[:50]])
        with eval_ctx(model=ctx.model) as second:
            for _ in range(3):
                second.forward(ids_batch(known, mixed))
        assert (second.evaluation_report.missing_share, second.evaluation_report.sampled) == (0.125, 2)
        assert second.evaluation_report.slot_shares == {"b": 0.25, "a": 0.0}
        assert "which read as zeros: 12.5 % (by slot, counted in 2 of the batches: b 25.0%)" in caplog.text
        assert not warnings(caplog, "evaluation")
        with eval_ctx(model=ctx.model) as third:
            for _ in range(3):
                third.forward(ids_batch(known, strange))
        (warning,) = warnings(caplog, "evaluation")
        assert "200 of 200 ids of slot 'b' have no row" in warning and "'a'" not in warning
        assert third.evaluation_report.slot_shares == {"b": 1.0, "a": 0.0}
        assert ctx.evaluation_report.batches == 0, "training is no evaluation"


def test_few_strange_ids_are_reported_at_the_end(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    configure(SLOTS)
    few = np.arange(8, dtype=np.uint64)
    with make() as ctx:
        train(ctx, DataLoader(Few(ids_batch(few, few, label=np.zeros((8, 1), np.float32)))))
        with eval_ctx(model=ctx.model) as inner:
            inner.forward(ids_batch(few, few + np.uint64(100)))
            assert not warnings(caplog, "evaluation")
        assert warnings(caplog, "8 of 8 ids of slot 'b'")


def test_a_collection_reports_each_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tables = EmbeddingCollection(TABLES, SGD(0.1))
    ids = torch.arange(200)
    with torch.no_grad():
        tables({"a": ids, "b": ids})
    (warning,) = warnings(caplog, "evaluation")
    assert "the tables are empty (0 rows)" in warning and "collection.load(DIRECTORY)" in warning
    tables({"a": ids, "b": ids})["a"].sum().backward()
    assert "evaluation: batches: 1, ids: 400, ids without a row, which read as zeros: 100.0 %" in caplog.text
    with torch.no_grad():
        for _ in range(2):
            tables({"a": ids, "b": ids + 100})
    report = tables.evaluation_report
    assert (report.batches, report.ids, report.missing) == (2, 800, 400), "b has no rows, because it had no gradient"
    assert report.slot_shares == {"b": 1.0, "a": 0.0}
    assert not warnings(caplog, "of slot 'b' have no row"), "the first warning was about every slot"
    tables.save(tmp_path / "c")
    assert "evaluation: batches: 2, ids: 800, ids without a row, which read as zeros: 50.0 %" in caplog.text
    tables.load(tmp_path / "c")
    for _ in range(3):  # evaluations in each step cause one warning, and are logged for debugging
        with torch.no_grad():
            tables({"a": ids, "b": ids + 100})
        tables({"a": ids, "b": ids})["a"].sum().backward()
    tables.close()
    assert len(warnings(caplog, "200 of 200 ids of slot 'b' have no row")) == 1
    assert caplog.text.count("INFO     persia.evaluation") == 2


# --- dtypes and shapes


def test_float64_becomes_float32_and_a_rounded_whole_number_is_named(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    configure(SLOTS)
    dense = np.full((4, 3), 0.1)
    with eval_ctx(model=TinyModel()) as ctx:
        batch = ids_batch(np.arange(4), np.arange(4), dense=dense, label=np.array([[0.0], [1.0], [0.5], [2**30]]))
        (given,), _, (label,) = ctx.prepare_features(batch)
        assert given.dtype == label.dtype == torch.float32
        assert torch.equal(given, torch.full((4, 3), 0.1)) and label[3] == 2**30
        assert not warnings(caplog, "float32")
        dense[2, 1] = 1_700_000_001
        for _ in range(2):
            ids_batch(np.arange(4), np.arange(4), dense=dense)
        (warning,) = warnings(caplog, "float32")
        assert "dense input 'age', row 2, column 1: 1700000001 becomes 1700000000" in warning
    dense[3, 0] = 1e39
    with pytest.raises(DataError, match=r"dense input 'age', row 3, column 0: 1e\+39 is beyond the largest float32"):
        ids_batch(np.arange(4), np.arange(4), dense=dense)


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "bool", "float64"])
@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, torch.nn.functional.binary_cross_entropy_with_logits])
def test_labels_of_any_dtype_train(configure: Configure, dtype: str, loss: Callable[..., torch.Tensor]) -> None:
    configure(SLOTS)
    ids, target = np.arange(4, dtype=np.uint64), np.array([[0], [1], [1], [0]])
    found = []
    for label in (target.astype(np.float32), target.astype(dtype)):
        with make() as ctx:
            for batch in DataLoader(Few(ids_batch(ids, ids, label=label)), reproducible=True):
                output, labels = ctx.forward(batch)
                assert labels[0].dtype == torch.float32
                found.append(float(ctx.backward(loss(output, labels[0]))))
    assert found[:3] == found[3:]


def test_labels_that_are_classes_or_not_exact_stay(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    configure(SLOTS)
    ids = np.arange(2, dtype=np.uint64)
    with eval_ctx(model=TinyModel()) as ctx:
        _, (classes,) = ctx.forward(ids_batch(ids, ids, label=np.array([0, 1])))
        assert classes.dtype == torch.int64, "class indices [batch] of an output [batch, classes]"
        for _ in range(2):
            _, (large,) = ctx.forward(ids_batch(ids, ids, label=np.array([[1], [2**24 + 1]])))
        assert large.dtype == torch.int64
        assert len(warnings(caplog, "label 'click' is int64 and has numbers beyond 2^24")) == 1


def test_a_dense_input_that_the_model_cannot_take_is_named(configure: Configure) -> None:
    configure(SLOTS)

    class Plain(TinyModel):
        def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
            output: torch.Tensor = self.layers[0](non_id_tensors[0])
            return output

    ids = np.arange(4)
    with eval_ctx(model=Plain(dense=3, embeddings=0)) as ctx:
        ctx.forward(ids_batch(ids, ids))
        with pytest.raises(FeatureTypeError, match=r"dense input 'age' is int64. Give the model float32.*astype"):
            ctx.forward(ids_batch(ids, ids, dense=np.zeros((4, 3), np.int64)))
        with pytest.raises(RuntimeError, match="shapes"):  # another error stays as it is
            ctx.forward(ids_batch(ids, ids, dense=np.zeros((4, 2), np.float32)))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, lambda output, label: ((output - label) ** 2).mean()])
def test_a_loss_that_broadcasts_labels_is_reported_once(
    configure: Configure, caplog: pytest.LogCaptureFixture, loss: Callable[..., torch.Tensor]
) -> None:
    configure(SLOTS)
    ids, label = np.arange(4, dtype=np.uint64), np.array([0, 1, 1, 0], np.float32)
    with make() as ctx:
        for batch in DataLoader(Few(ids_batch(ids, ids, label=label))):
            output, labels = ctx.forward(batch)
            ctx.backward(loss(output.squeeze(1), labels[0]))
        assert not warnings(caplog, "broadcasts"), "the script reshapes"
        for batch in DataLoader(Few(ids_batch(ids, ids, label=label))):
            output, labels = ctx.forward(batch)
            ctx.backward(loss(output, labels[0]))
    (warning,) = warnings(caplog, "broadcasts")
    assert "label 'click' has shape [4] and the model's output [4, 1]" in warning and "to [4, 4]" in warning


# --- one way to open a checkpoint


@pytest.fixture
def of_collection(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], TinyModel]:
    """Return the checkpoint of a collection, its rows, and its model."""
    tables, model = EmbeddingCollection(TABLES, Adagrad(0.1), EmbeddingConfig((-0.1, 0.1))), TinyModel()
    ids = torch.arange(20)
    sum(each.sum() for each in tables({"a": ids, "b": ids}).values()).backward()
    tables.save(tmp_path / "c", model=model.state_dict())
    rows = {name: each.clone() for name, each in tables.eval()({"a": ids, "b": ids}).items()}
    tables.close()
    return tmp_path / "c", rows, model


def test_a_collection_evaluates_any_checkpoint_without_an_optimizer(
    of_collection: tuple[Path, dict[str, torch.Tensor], TinyModel], configure: Configure, tmp_path: Path
) -> None:
    path, rows, _ = of_collection
    features = {"a": torch.arange(20), "b": torch.arange(20)}
    tables = EmbeddingCollection(TABLES, None)
    with pytest.raises(UsageError, match=r"has no rows: load a checkpoint first, collection.load\(DIRECTORY\)"):
        tables.eval()(features)
    tables.load(path)
    assert all(torch.equal(each, rows[name]) for name, each in tables(features).items())
    assert tables.step == 1
    with pytest.raises(UsageError, match="a forward pass in training needs an optimizer"):
        tables.train()(features)
    with pytest.raises(UsageError, match=r"save\(\) needs an optimizer"):
        tables.save(tmp_path / "again")
    configure(SLOTS)
    with make(optimizer=Adagrad(0.1, vectorwise_shared=True)) as ctx:
        train(ctx, DataLoader(Batches(3)))
        ctx.dump_checkpoint(tmp_path / "t")
        wanted = [from_dlpack(each).clone() for each in look(ctx)]
    tables.load(tmp_path / "t")
    found = tables.eval()(features)
    assert all(torch.equal(*pair) for pair in zip(found.values(), wanted, strict=True))


def look(ctx: EmbeddingCtx) -> list[Any]:
    ids = np.arange(20, dtype=np.uint64)
    return ctx.get_embedding_from_data(ids_batch(ids, ids)).embeddings()


def test_eval_ctx_loads_the_checkpoint_of_a_collection(
    of_collection: tuple[Path, dict[str, torch.Tensor], TinyModel], configure: Configure
) -> None:
    path, rows, model = of_collection
    configure(SLOTS)
    other = TinyModel()
    with eval_ctx(model=other) as ctx:
        ctx.load_checkpoint(path)
        assert all(torch.equal(from_dlpack(each), rows[name]) for name, each in zip("ab", look(ctx), strict=True))
        assert ctx.evaluation_report.missing == 0
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_messages_name_no_folder_that_is_gone(
    of_collection: tuple[Path, dict[str, torch.Tensor], TinyModel],
) -> None:
    path, _, _ = of_collection
    with pytest.raises(
        CheckpointError, match=r"shard-\d+.arrow does not fit this run: its table a has dim 4"
    ) as caught:
        EmbeddingCollection([TableConfig("a", 8, ["a"]), TABLES[1]], None).load(path)
    assert ".saving" not in str(caught.value)
    assert "persia ckpt show" in caught.value.hint and "ckpt verify" not in caught.value.hint
    named = Path(str(caught.value).split(" does not fit")[0])
    assert named.is_file(), named


def test_a_table_that_the_checkpoint_does_not_have_is_named(
    of_collection: tuple[Path, dict[str, torch.Tensor], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    path, _, _ = of_collection
    EmbeddingCollection([*TABLES, TableConfig("new", 4, ["c"])], Adagrad(0.1)).load(path)
    (warning,) = warnings(caplog, "")  # the feature of that table does not count as a second one
    assert "lacks some tables of this run, which start without rows: new; the tables of the checkpoint: a, b" in warning


def test_a_feature_that_the_model_was_trained_without_is_named(
    of_collection: tuple[Path, dict[str, torch.Tensor], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    path, _, _ = of_collection
    EmbeddingCollection([TABLES[0], TableConfig("b", 4, ["b", "c"])], Adagrad(0.1)).load(path)
    (warning,) = warnings(caplog, "")
    assert "was trained without these features, which use its tables: c (table b)" in warning


@pytest.mark.parametrize("reads", ["nothing", "model.pt", "the file"])
def test_rows_without_their_model_are_a_warning(
    of_collection: tuple[Path, dict[str, torch.Tensor], TinyModel], caplog: pytest.LogCaptureFixture, reads: str
) -> None:
    path, _, _ = of_collection
    tables = EmbeddingCollection(TABLES, None).eval()
    loaded = tables.load(path)
    if reads == "model.pt":
        loaded.state("model.pt")
    if reads == "the file":  # into a module that has the collection
        tables.load_state_dict({"_extra_state": tables.get_extra_state()})
    for _ in range(2):
        tables({"a": [1, 2], "b": [3, 4]})
    found = warnings(caplog, "used without its model, which was trained with them")
    assert len(found) == (reads == "nothing")
    assert reads != "nothing" or "loaded.state('model.pt')" in found[0]


def test_ids_that_are_strings_name_the_transform() -> None:
    for strings in (["x", "y"], np.array(["x", "y"]), np.array(["x", "y"], object)):
        with pytest.raises(FeatureTypeError, match=r"persia\.features: a feature of type id in persia\.yml"):
            IDTypeFeatureWithSingleID("a", strings)  # type: ignore[arg-type]
    with pytest.raises(FeatureTypeError, match="hash_text"):
        IDTypeFeature("a", ["x", "y"])  # type: ignore[list-item]
    with pytest.raises(FeatureTypeError) as caught:
        IDTypeFeatureWithSingleID("a", np.array([1.0, 2.0]))
    assert "persia.features" not in str(caught.value)


# --- tensors on several devices


@pytest.mark.row("S4-52")
def test_a_model_on_another_device_names_the_tensors_of_each(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        ctx.model = TinyModel().to("meta")
        for batch in DataLoader(Batches(1)):
            with pytest.raises(UsageError, match="device") as caught:
                ctx.forward(batch)
    text = str(caught.value)
    assert "on cpu: dense input 0, embeddings; on meta: the model's layers.0.weight, the model's layers.0.bias" in text
    assert "model.to(DEVICE)" in caught.value.hint
