"""A model gets the parts of every batch in the order of its first training batch, or an error."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Configure
from small_collection import arrays, rows
from test_training import everything

from persia.backend.inputs import ModelInputs
from persia.ctx import Checkpoints, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig, inputs
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.inputs import InputNames
from persia.embedding.optim import SGD
from persia.errors import CheckpointError, DataError
from persia.loop.inputs import InputAgreement
from persia.nn import EmbeddingCollection, TableConfig

SLOTS = "a: {dim: 4}\nb: {dim: 4}"
Parts = tuple[list[Any], list[Any], list[Any]]


def forwards(parts: Parts) -> Parts:
    return parts


def backwards(parts: Parts) -> Parts:
    """Reverse the order of the parts of a batch."""
    ids, dense, labels = parts
    return ids[::-1], dense[::-1], labels[::-1]


def batch(
    number: int, order: Callable[[Parts], Parts] = forwards, *, named: bool = True, train: bool = True
) -> PersiaBatch:
    rng = np.random.default_rng([3, number])
    single = rng.integers(0, 50, 16, dtype=np.uint64)
    lists = [rng.integers(0, 50, rng.integers(0, 3), dtype=np.uint64) for _ in range(16)]
    x, y = rng.standard_normal((2, 16, 2), dtype=np.float32)
    bought = (single % 3 == 0).astype(np.float32)[:, None]
    ids, dense, labels = order(
        (
            [IDTypeFeatureWithSingleID("a", single), IDTypeFeature("b", lists)],
            [NonIDTypeFeature(x, "x" if named else None), NonIDTypeFeature(y, "y" if named else None)],
            [Label(bought, "bought" if named else None), Label(1 - bought, "left" if named else None)],
        )
    )
    return PersiaBatch(ids, dense, labels, requires_grad=train)


class Given(IterableDataset):
    """Batches from a list."""

    def __init__(self, batches: list[PersiaBatch]) -> None:
        super().__init__()
        self.batches = batches

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield from self.batches


class Model(torch.nn.Module):
    """Uses a different weight for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 2)

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return ``[batch, 2]``, one logit for each label."""
        result: torch.Tensor = self.layer(torch.cat([*non_id_tensors, *embedding_tensors], 1))
        return result


def make(model: torch.nn.Module | None = None, **options: Any) -> TrainCtx:
    torch.manual_seed(1)
    model = model or Model()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    config = EmbeddingConfig((-0.5, 0.5))
    return TrainCtx(SGD(0.5), dense, model=model, mixed_precision=False, embedding_config=config, **options)


def train(ctx: TrainCtx, batches: list[PersiaBatch]) -> None:
    for given in DataLoader(Given(batches), reproducible=True):
        output, labels = ctx.forward(given)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, torch.cat(labels, 1)))


def predict(ctx: Any, order: Callable[[Parts], Parts], **options: Any) -> list[torch.Tensor]:
    output, labels = ctx.forward(batch(99, order, train=False, **options))
    return [output.detach().clone(), *(label.clone() for label in labels)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_the_order_of_later_batches_has_no_effect(configure: Configure) -> None:
    configure(SLOTS)
    results = []
    for later in (forwards, backwards):
        with make() as ctx:
            train(ctx, [batch(number, later if number % 2 else forwards) for number in range(20)])
            results.append(everything(ctx))
    assert results[0] == results[1]


def test_predictions_do_not_depend_on_the_order_of_the_batch(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, [batch(number) for number in range(20)])
        expected = predict(ctx, forwards)
        assert same(predict(ctx, backwards), expected)
        for model in (ctx.model, copy.deepcopy(ctx.model)):
            with eval_ctx(model=model) as evaluation:
                assert same(predict(evaluation, backwards), expected)
                given = evaluation.get_embedding_from_bytes(batch(99, backwards, train=False).to_bytes())
                assert torch.equal(evaluation.forward(given)[0], expected[0])
        with eval_ctx() as evaluation:  # the script calls the model
            dense, embeddings, _ = evaluation.prepare_features(batch(99, backwards, train=False))
            assert ctx.model is not None
            assert torch.equal(ctx.model(dense, embeddings), expected[0])


@pytest.mark.parametrize("checkpoint", ["checkpoint", "automatic", "rows and model"])
def test_the_order_is_part_of_a_checkpoint(configure: Configure, tmp_path: Path, checkpoint: str) -> None:
    """The order applies to resumed training, and to a prediction with another model object in another process."""
    configure(SLOTS)
    first = [batch(number) for number in range(10)]
    folder = tmp_path / "saves"
    automatic = checkpoint == "automatic"
    saves: Any = {"checkpoints": Checkpoints(folder, every=10)} if automatic else {}
    more = [batch(number) for number in range(10, 12)]
    with make(**saves) as ctx:
        train(ctx, [*first, *more] if automatic else first)
        expected = predict(ctx, forwards)
        if checkpoint == "checkpoint":
            ctx.dump_checkpoint(folder)
        elif not automatic:
            assert ctx.model is not None
            ctx.dump_embedding(folder)
            ctx.dump_torch_state_dict(ctx.model, tmp_path / "model", "dense.pt")
        if not automatic:
            train(ctx, more)
        trained = everything(ctx)
    path = folder / "step-10" if automatic else folder

    def load(context: Any) -> None:
        if checkpoint == "rows and model":
            context.load_embedding(path)
            context.load_torch_state_dict(context.model, tmp_path / "model" / "dense.pt")
        else:
            context.load_checkpoint(path)

    with eval_ctx(model=Model()) as evaluation:
        load(evaluation)
        expected = predict(evaluation, forwards) if automatic else expected
        assert same(predict(evaluation, backwards), expected)
        evaluation.dump_checkpoint(tmp_path / "again")
    with eval_ctx(model=Model()) as evaluation:
        evaluation.load_checkpoint(tmp_path / "again")
        assert same(predict(evaluation, backwards), expected)
    with make() as ctx:
        load(ctx)
        last = [batch(number, backwards) for number in range(10, 12)]
        train(ctx, [*first, *last] if automatic else last)
        assert everything(ctx) == trained


def test_a_checkpoint_without_names_loads(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions wrote no names, so the first batch determines the order."""
    configure(SLOTS)
    with make() as ctx:
        train(ctx, [batch(0)])
        expected = predict(ctx, forwards)
        with monkeypatch.context() as old:
            old.setattr(ModelInputs, "of", lambda self, model: None)
            ctx.dump_checkpoint(tmp_path / "old")
    assert not (tmp_path / "old" / inputs.FILE).exists()
    with make() as ctx:
        ctx.load_checkpoint(tmp_path / "old")
        assert same(predict(ctx, forwards), expected)
        assert same(predict(ctx, backwards), expected)


def fewer(parts: Parts) -> Parts:
    return parts[0][:1], parts[1][:1], parts[2][:1]


def test_a_batch_with_other_parts_is_refused_with_both_lists(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    text = (
        r"id features: 'a' in the batch, 'a', 'b' in training; dense inputs: 'x' in the batch, 'x', 'y' in training; "
        r"labels: 'bought' in the batch, 'bought', 'left' in training"
    )
    with make() as ctx, pytest.raises(DataError, match=text):
        train(ctx, [batch(0), batch(1, fewer)])
    with make() as ctx:
        train(ctx, [batch(0)])
        with pytest.raises(DataError, match=text):
            predict(ctx, fewer)
        ctx.dump_checkpoint(tmp_path / "checkpoint")
    with eval_ctx(model=Model()) as evaluation:
        evaluation.load_checkpoint(tmp_path / "checkpoint")
        with pytest.raises(DataError, match=text):
            predict(evaluation, fewer)
    with make() as ctx:
        ctx.load_checkpoint(tmp_path / "checkpoint")
        with pytest.raises(DataError, match=text):
            train(ctx, [batch(0), batch(1, fewer)])


def test_some_features_may_be_looked_up(configure: Configure) -> None:
    """An index of items needs only some features. No model gets the tensors."""
    configure(SLOTS)
    with make() as ctx:
        train(ctx, [batch(0)])
        with eval_ctx(model=ctx.model) as evaluation:
            dense, embeddings, labels = evaluation.prepare_features(batch(1, fewer, train=False))
            assert (len(dense), len(embeddings), len(labels)) == (1, 1, 1)
            _, embeddings, _ = evaluation.prepare_features(batch(1, backwards, train=False))
            _, expected, _ = evaluation.prepare_features(batch(1, train=False))
            assert same(embeddings, expected)
            with pytest.raises(DataError, match="the inputs of the batch differ"):
                evaluation.forward(batch(1, fewer, train=False))
    assert names("x", "y", ids="abc").arrange(Named(names("z", "x", ids="dca")), whole=False).id_features == [2, 1, 0]


def names(*dense: str | None, ids: str = "ab", labels: tuple[str | None, ...] = ()) -> InputNames:
    return InputNames(tuple(ids), dense, labels)


class Named:
    """A batch that consists of names only."""

    def __init__(self, given: InputNames) -> None:
        self.slots = [*given.id_features]
        self.dense_names, self.label_names = [*(given.dense or ())], [*(given.labels or ())]


def test_parts_without_names_keep_their_places() -> None:
    for trained, given in [
        (names("x"), names(None)),
        (names(None, None), names(None, None)),
        (names("x", None), names("x", None)),
        (names("x", None), names("x", "y")),
        (InputNames(("a", "b")), names("x")),  # dense inputs and labels are not known
    ]:
        places = trained.arrange(Named(given))
        assert (places.dense, places.unchecked) == (None, ""), (trained, given)
    for trained, given in [(names("x", "y"), names(None, None)), (names(None, None), names("x", "y"))]:
        assert trained.arrange(Named(given)).unchecked == "dense inputs"
    for trained, given, text in [
        (names("x", None), names(None, "x"), "dense inputs: one without a name, 'x' in the batch"),
        (names(None, None), names(None), "one without a name in the batch, one without a name, one without a name in"),
        (names("x"), names("z"), "dense inputs: 'z' in the batch, 'x' in training"),
        (names("x"), names(), "dense inputs: none in the batch"),
        (names(), names("x"), "dense inputs: 'x' in the batch, none in training"),
        (names(), names(ids="ac"), "id features: 'a', 'c' in the batch, 'a', 'b' in training"),
        (names(), names(ids="abc"), "id features: 'a', 'b', 'c' in the batch"),
    ]:
        with pytest.raises(DataError, match=text):
            trained.arrange(Named(given))


def test_labels_may_be_missing_or_more_in_evaluation() -> None:
    trained = names(labels=("l", "m"))
    assert trained.arrange(Named(names())).labels is None
    assert trained.arrange(Named(names(labels=("user", "m", "l")))).labels == [2, 1, 0]
    assert names(labels=(None,)).arrange(Named(names(labels=(None, "user")))).labels is None
    with pytest.raises(DataError, match="labels: 'user', 'm' in the batch, 'l', 'm' in training"):
        trained.arrange(Named(names(labels=("user", "m"))))


def test_parts_that_only_some_batches_name_are_logged_once(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, [batch(number, named=number > 0) for number in range(5)])
    found = [record.message for record in caplog.records if "taken by position" in record.message]
    assert len(found) == 1 and found[0].startswith("dense inputs and labels are taken by position")


def test_ranks_agree_on_one_order(configure: Configure) -> None:
    """The first batches of the ranks come from different data scripts."""
    configure(SLOTS)
    models = [Model(), Model()]
    known = [ModelInputs(), ModelInputs()]
    hooks = [InputAgreement(known[0], lambda: models[0]), InputAgreement(known[1], lambda: models[1])]

    class Fed:
        def __init__(self, order: Callable[[Parts], Parts]) -> None:
            self.batch = batch(0, order).data

    votes = [hook.vote(Fed(order)) for hook, order in zip(hooks, (forwards, backwards), strict=True)]  # type: ignore[arg-type]
    assert not any(hook.decide(1, votes) for hook in hooks)
    expected = InputNames(("a", "b"), ("x", "y"), ("bought", "left"))
    assert [mine.of(model) for mine, model in zip(known, models, strict=True)] == [expected] * 2
    assert [hook.vote(Fed(backwards)) for hook in hooks] == [None, None]  # type: ignore[arg-type]


def test_damaged_names_are_refused() -> None:
    states: list[Any] = [{}, {"id_features": 1, "dense": None, "labels": None}, []]
    for state in states:
        with pytest.raises(CheckpointError, match="the saved names of the model's inputs"):
            InputNames.from_state(state)


def tables(names: str, pooling: str = "sum", group: bool = False) -> EmbeddingCollection:
    listed = [TableConfig(name, 4, [name], pooling) for name in names]
    return EmbeddingCollection([TableConfig("g", 4, [*names])] if group else listed, SGD(1.0))


def test_a_collection_returns_vectors_in_the_order_of_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tables("ab")
    for number in range(5):
        first(arrays(number)[0])["a"].sum().backward()
    expected = rows(first)
    first.save(tmp_path / "ab")
    other = tables("ba")
    assert [*rows(other)] == ["b", "a"]
    other.load(tmp_path / "ab")
    assert any(
        "with new features at the end. The order is now: a, b; before" in record.message for record in caplog.records
    )
    assert [*rows(other)] == ["a", "b"] and same([*rows(other).values()], [*expected.values()])
    other(arrays(9)[0])["a"].sum().backward()
    other.save(tmp_path / "again")
    third = tables("ba")
    third.load(tmp_path / "again")
    assert [*rows(third)] == ["a", "b"]


def test_a_collection_with_other_features_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = {name: torch.arange(3) for name in "abc"}
    saved = tables("abc", group=True)
    saved(ids)["a"].sum().backward()
    saved.save(tmp_path / "checkpoint")
    few = tables("ab", group=True)
    with pytest.raises(CheckpointError, match="lacks features that the model of the checkpoint needs: c; add them to"):
        few.load(tmp_path / "checkpoint")
    assert few.step == 0
    more = tables("dabc", group=True)
    more.load(tmp_path / "checkpoint")
    with torch.no_grad():
        assert [*more({**ids, "d": torch.arange(3)})] == ["a", "b", "c", "d"]
    said = "was trained without these features, which use its tables: d (table "
    assert any(said in record.message for record in caplog.records)
    one = tables("a")
    one({"a": torch.arange(3)})["a"].sum().backward()
    one.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match="a was trained with pooling sum, but this run has mean"):
        tables("a", pooling="mean").load(tmp_path / "one")


def test_a_checkpoint_of_a_context_gives_a_collection_its_order(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, [batch(0)])
        ctx.dump_checkpoint(tmp_path / "checkpoint")
    loaded = tables("ba")
    loaded.load(tmp_path / "checkpoint")
    assert [*rows(loaded)] == ["a", "b"]
