"""Digests of the tensors of each step, their comparison, and tensors in files."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Batches, Configure, TinyModel
from typer.testing import CliRunner

from persia.cli.debug import app
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.debug import compare, digest, load_tensor, record, save_tensor
from persia.debug.digest_files import diff
from persia.embedding.optim import SGD
from persia.errors import DataError, UsageError
from persia.loop import digests
from persia.nn import EmbeddingCollection, TableConfig

Train = Callable[[Path], Path]


@pytest.fixture
def train(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Train five reproducible steps with digests, which go into the given folder."""
    configure("a: {dim: 4}\nb: {dim: 4}")
    monkeypatch.setenv("PERSIA_DIGEST", "1")

    def run(folder: Path) -> Path:
        monkeypatch.setenv("PERSIA_DIGEST_DIR", str(folder))
        monkeypatch.setattr(digests, "_current", None)
        torch.manual_seed(3)
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with TrainCtx(SGD(0.1), optimizer, mixed_precision=False, model=model) as ctx:
            for batch in DataLoader(Batches(5), reproducible=True):
                output, labels = ctx.forward(batch)
                if folder.name == "planted" and batch.step == 3:
                    output = output * 1.001
                ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        return folder

    yield run
    digests._current = None


@pytest.mark.row("S2-17", "S2-18")
def test_equal_runs_have_equal_digests_and_a_difference_is_found_where_it_is(train: Train, tmp_path: Path) -> None:
    a, b, planted = (train(tmp_path / name) for name in ("a", "b", "planted"))
    lines = (a / "rank-0.csv").read_text().splitlines()
    assert lines[0] == "step,name,md5,norm"
    assert [line.split(",")[1] for line in lines if line.startswith("3,")] == [
        *(f"parameter/layers.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")),
        *("dense/0", "label/0", "lookup/a", "lookup/b", "loss"),
        *(f"gradient/layers.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")),
        *("push/a", "push/b"),
    ]
    equal = diff(a, b)
    assert equal.first is None and equal.tensors == 5 * 15
    assert (
        CliRunner().invoke(app, ["digest", "--diff", str(a), str(b)]).output.startswith("equal: 75 digests of rank 0")
    )
    found = diff(a, planted).first
    assert found is not None and (found.rank, found.step, found.name) == ("rank 0", 3, "loss")
    done = CliRunner().invoke(app, ["digest", "--diff", str(a), str(planted)])
    assert done.exit_code == 1 and "rank 0, step 3: loss differs" in done.output


def test_the_loss_of_a_divided_step_is_that_of_all_parts(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("a: {dim: 4}\nb: {dim: 4}")
    monkeypatch.setenv("PERSIA_DIGEST", "1")
    losses = {}
    for rows in (32, 10):
        monkeypatch.setenv("PERSIA_DIGEST_DIR", str(tmp_path / str(rows)))
        monkeypatch.setattr(digests, "_current", None)
        torch.manual_seed(3)
        model = TinyModel()
        with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx:
            for batch in DataLoader(Batches(2), reproducible=True):
                for part in ctx.micro_batches(batch, rows):
                    output, labels = ctx.forward(part)
                    loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0])
                    ctx.backward(loss * part.share)
        lines = [line.split(",") for line in (tmp_path / str(rows) / "rank-0.csv").read_text().splitlines()]
        losses[rows] = [float(norm) for _, name, _, norm in lines if name == "loss"]
    digests._current = None
    assert len(losses[10]) == 2 and losses[10] == pytest.approx(losses[32], rel=1e-5)


@pytest.mark.row("S2-18")
def test_an_embedding_collection_records_its_look_ups_and_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_DIGEST", "1")
    monkeypatch.setenv("PERSIA_DIGEST_DIR", str(tmp_path))
    monkeypatch.setattr(digests, "_current", None)
    tables = EmbeddingCollection([TableConfig("t", 4, ["f"])], SGD(0.1))
    vectors = tables({"f": torch.tensor([1, 2, 1])})["f"]
    vectors.sum().backward()
    tables.close()
    lines = [line.split(",") for line in (tmp_path / "rank-0.csv").read_text().splitlines()]
    assert [line[:2] for line in lines[1:]] == [["1", "lookup/f"], ["1", "push/f"]]
    assert [line[2] for line in lines[1:]] == [digest(vectors), digest(torch.ones(3, 4))]


@pytest.mark.row("S2-18")
def test_digests_that_have_nothing_in_common_are_not_equal(tmp_path: Path) -> None:
    head = "step,name,md5,norm\n"
    for name, content in {"a": "1,loss,aa,1\n", "b": "2,loss,aa,1\n", "c": "1,push/a,aa,1\n2,push/a,bb,1\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.csv").write_text(head + content)
    a, b, c = (tmp_path / name for name in "abc")
    for one, other in ((a, b), (a, tmp_path), (a, tmp_path / "none"), (a, b / "rank-0.csv")):
        with pytest.raises(UsageError):
            diff(one, other)
    (b / "rank-1.csv").write_text(head)
    with pytest.raises(UsageError, match="different numbers of ranks"):
        diff(a, b)
    (b / "rank-1.csv").write_text(head + "2,push/a,aa,1\n")
    with pytest.raises(UsageError, match="no parameter and no gradient of the same step in common; for two"):
        diff(c / "rank-0.csv", b / "rank-1.csv")  # the batches of two ranks differ
    (b / "rank-1.csv").unlink()
    (b / "rank-0.csv").write_text(head + "1,loss\n")
    with pytest.raises(DataError, match=r"rank-0\.csv:2"):
        diff(a, b)
    (b / "rank-0.csv").write_bytes(head.encode() + b"1,\xff,aa,1\n")
    with pytest.raises(DataError, match="is not a file of digests"):
        diff(a, b)
    (b / "rank-0.csv").write_text(head + "1,loss,aa,1\n2,loss,bb,1\n")
    assert diff(a, b).unmatched == 1


@pytest.mark.row("S2-17")
def test_the_digests_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        digests.Digests(tmp_path, 0, 1).record(step, [("x", torch.ones(2)), ("none", None)])
    assert (tmp_path / "rank-0-previous.csv").read_text().splitlines()[1].startswith("1,x,")
    assert (tmp_path / "rank-0.csv").read_text().splitlines()[1].startswith("2,x,")
    digests.Digests(tmp_path, 0, 1).record(2, [("x", torch.zeros(2))])
    found = diff(tmp_path / "rank-0.csv", tmp_path / "rank-0-previous.csv")
    assert not found.shared_only and found.first is not None and found.first.name == "x", "both are of rank 0"


@pytest.mark.row("S2-17")
def test_a_digest_by_tensor_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert digest("x") == digest(x) == digest(x.t().contiguous().t()) != digest(x + 1)
    assert digest(torch.tensor(1.0)) == digest(torch.ones(1)) and digest(x.bfloat16()) != digest(x)
    with pytest.raises(UsageError, match=r"no tensor of this name here; recorded: none$") as caught:
        digest("y")
    assert caught.value.hint.endswith("PERSIA_DIGEST=N")
    monkeypatch.setenv("PERSIA_DIGEST", "2")
    monkeypatch.setenv("PERSIA_DIGEST_DIR", str(tmp_path))
    monkeypatch.setattr(digests, "_current", None)
    model = torch.nn.Linear(3, 1)
    model(x).sum().backward()
    for step in (1, 2):
        record(step, model, y=x * step)
    assert digest("y") == digest(x * 2) and digest("parameter/bias") == digest(model.bias)
    assert {line.split(",")[0] for line in (tmp_path / "rank-0.csv").read_text().splitlines()[1:]} == {"2"}


@pytest.mark.row("S2-19")
def test_tensors_are_compared_number_by_number(tmp_path: Path) -> None:
    one = torch.tensor([[1.0, -0.0, float("nan")], [3.0, 1e-3, 2.0]])
    assert repr(compare(one, one.clone())) == "equal: 6 elements"
    other = one.clone()
    other[1, 0] = torch.nextafter(one[1, 0], torch.tensor(9.0))
    found = compare(one, other)
    assert (found.differing, found.at, found.max_ulp) == (1, (1, 0), 1)
    assert found.max_abs == pytest.approx(2.4e-7, rel=0.01) and found.max_rel == pytest.approx(8e-8, rel=0.01)
    assert repr(found).startswith("1 of 6 elements differ; max abs 2.38419e-07 at [1, 0], rel 7.9")
    assert compare(torch.tensor([1e-45]), torch.tensor([-1e-45])).max_ulp == 2
    assert compare(torch.tensor([1.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)).max_ulp > 2**62
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 5])).max_abs == 3
    assert compare(one, torch.zeros(2, 3)).max_abs == float("inf"), "NaN differs from a number"
    for wrong in (one.double(), one[0], torch.zeros(0)):
        with pytest.raises(UsageError):
            compare(one if wrong.numel() else wrong, wrong)
    path = save_tensor("x", one, tmp_path)
    assert path == tmp_path / "x.rank-0.npy"
    assert compare(load_tensor("x", 0, tmp_path), one).differing == 0
    with pytest.raises(UsageError, match="exists"):
        save_tensor("x", other, tmp_path)
    half = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    save_tensor("x", half, tmp_path, overwrite=True)
    assert torch.equal(load_tensor("x", folder=tmp_path), half.float())
    with pytest.raises(UsageError, match="cannot load a tensor from .*; expected a file of save_tensor"):
        load_tensor("y", folder=tmp_path)
    (tmp_path / "y.rank-0.npy").touch()
    with pytest.raises(UsageError, match="cannot load a tensor from .*; expected a file of save_tensor"):
        load_tensor("y", folder=tmp_path)
