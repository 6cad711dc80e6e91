"""The AutoInt model: attention between features, fused (``sdpa``) or operation by operation (``math``)."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import ROOT, Verb
from trainer_files import config_of, fit, summary, write_clicks, write_config

import persia
from persia.errors import ConfigError, DataError
from persia.models import AutoInt
from persia.serving import Bundle
from persia.trainer import Trainer, models

BATCH, DENSE, DIMS = 5, 3, [4, 2, 4]
CENSUS = ROOT / "examples" / "dlrm" / "data"


def model(**options: Any) -> AutoInt:
    torch.manual_seed(0)
    return AutoInt(DENSE, DIMS, **{"attention_layers": 2, "heads": 2, "width": 6, "deep_mlp": [7], **options})


def inputs(
    batch: int = BATCH, dims: list[int] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(1)
    dense = [torch.randn(batch, 1, dtype=dtype), torch.randn(batch, DENSE - 1, dtype=dtype)]
    return dense, [torch.randn(batch, dim, dtype=dtype, requires_grad=True) for dim in dims or DIMS]


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_logits_follow_the_formula_sample_by_sample(attention: str) -> None:
    auto = model(attention=attention)
    state = auto.state_dict()
    dense, embeddings = inputs()
    logits = auto(dense, embeddings)
    assert logits.shape == (BATCH, 1)
    for sample in range(BATCH):
        fields = [state[f"slots.{index}.weight"] @ each[sample] for index, each in enumerate(embeddings)]
        values = torch.cat([each[sample] for each in dense])
        fields += [value * vector for value, vector in zip(values, state["dense_vectors"], strict=True)]
        stacked = torch.stack(fields)
        for layer in range(2):
            query, key, value, rest = (
                stacked @ state[f"layers.{layer}.{name}.weight"].T for name in ("query", "key", "value", "residual")
            )
            heads = []
            for start in (0, 3):
                part = slice(start, start + 3)
                weights = torch.softmax(query[:, part] @ key[:, part].T / math.sqrt(3), dim=1)
                heads.append(weights @ value[:, part])
            stacked = torch.relu(torch.cat(heads, dim=1) + rest)
        whole = torch.cat([part[sample] for part in [*dense, *embeddings]])
        deep = torch.relu(state["deep.0.weight"] @ whole + state["deep.0.bias"])
        torch.testing.assert_close(logits[sample], auto.top(torch.cat([stacked.flatten(), deep])))


def step(auto: AutoInt, given: tuple[list[torch.Tensor], list[torch.Tensor]]) -> tuple[int, list[torch.Tensor]]:
    """Return the bytes that the forward pass keeps, and the output with the gradients of weights and inputs."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = auto(*given)
        size = sum(kept.values())
    wanted = [*auto.parameters(), *given[1]]
    return size, [output.detach(), *torch.autograd.grad(output.square().mean(), wanted)]


@pytest.mark.row("S4-14")
@pytest.mark.parametrize("num_dense", [0, DENSE])
def test_sdpa_and_math_have_equal_outputs_and_gradients(num_dense: int) -> None:
    dims = [8] * 45
    dense, embeddings = inputs(64, dims)
    given = (dense if num_dense else [], embeddings)
    both = []
    for attention in ("sdpa", "math"):
        torch.manual_seed(0)
        both.append(step(AutoInt(num_dense, dims, 3, 2, 32, attention), given)[1])
    assert len(both[0]) == len(both[1]) > 50
    assert any(float(each.abs().max()) > 0 for each in both[0][1:])
    for fused, plain in zip(*both, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.row("S4-14")
def test_sdpa_keeps_no_matrix_of_weights_for_the_backward() -> None:
    dims = [4] * 100
    given = inputs(16, dims)
    fused, plain = (
        step(AutoInt(DENSE, dims, 1, 4, 8, attention, deep_mlp=[]), given)[0] for attention in ("sdpa", "math")
    )
    matrix = 16 * 4 * (100 + DENSE) ** 2 * 4
    assert plain > matrix > 5 * fused, (plain, fused)


def test_gradients_equal_finite_differences() -> None:
    auto = model().double()
    dense, embeddings = inputs(dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *rows: auto(dense, list(rows)), embeddings)


def test_slots_alone_and_attention_alone() -> None:
    dense, embeddings = inputs()
    assert model(deep_mlp=[])(dense, embeddings).shape == (BATCH, 1)
    assert AutoInt(0, DIMS, num_labels=2)([], embeddings).shape == (BATCH, 2)


def test_dropout_acts_in_training_only() -> None:
    auto = model(dropout=0.5)
    given = inputs()
    assert not torch.equal(auto(*given), auto(*given))
    auto.eval()
    assert torch.equal(auto(*given), auto(*given))


def test_wrong_arguments_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        AutoInt(-1, [4, 0], 0, 3, 32, "flash", [0], 1.0, 0)  # type: ignore[arg-type]
    for part in (
        "num_dense (-1) must be at least 0",
        "embedding_dims[1] (0) must be at least 1",
        "attention_layers (0) must be at least 1",
        "num_labels (0) must be at least 1",
        "width (32) must be a multiple of heads (3)",
        "attention ('flash') must be sdpa or math",
        "deep_mlp[0] (0)",
        "dropout (1.0)",
    ):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="embedding_dims is empty"):
        AutoInt(1, [])
    with pytest.raises(DataError, match="AutoInt: slot 1 has shape"):
        model()(inputs()[0], [torch.zeros(BATCH, 4)] * 3)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"attention": "math", "deep_mlp": []}])
def test_the_scripted_model_gives_the_same_logits(options: dict[str, Any]) -> None:
    auto = model(**options)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(auto), file)
    file.seek(0)
    loaded = torch.jit.load(file)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loaded(*inputs()), auto(*inputs()))


@pytest.mark.row("S4-14")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention": "mats"}, "model.attention: found `mats`, allowed: sdpa, math"),
        ({"width": 7}, "model.width: autoint: AutoInt: width (7) must be a multiple of heads (2)"),
        ({"name": "dcnv2", "attention": "math"}, "model.attention: unknown key"),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, verb: Verb, keys: dict[str, Any], message: str) -> None:
    write_clicks(tmp_path / "clicks.parquet")
    path = write_config(tmp_path, model={"name": "autoint", **keys})
    errors = verb("train", str(path), code=2)[1]
    assert message in errors and f"{path}:" in errors, errors


@pytest.mark.row("S4-14")
def test_a_run_computes_attention_as_its_key_says(tmp_path: Path) -> None:
    """Runs with the two values of ``attention`` differ in rounding. The second run may continue the first one."""
    states = []
    for attention in ("sdpa", "math"):
        block = {"name": "autoint", "attention": attention, "deep_mlp": [8], "width": 8}
        config = config_of(tmp_path, model=block, run={"name": attention})
        made = models.build(config)
        assert isinstance(made, AutoInt)
        assert [each.is_fused for each in made.layers] == [attention == "sdpa"] * 2
        trainer, _ = fit(config)
        assert trainer.folder is not None
        newest = max(Path(trainer.folder.saves(config)).glob("step-*"), key=lambda path: int(path.name[5:]))
        states.append(torch.load(newest / "dense.pt", weights_only=True))
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], rtol=1e-3, atol=1e-4, msg=key)
    with Trainer(config_of(tmp_path, model={**block, "attention": "sdpa"}, data={"epochs": 2})) as trainer:
        reports = [*trainer.resume(tmp_path / "runs" / "math").fit()]
    assert reports and summary(trainer)["status"] == "finished"


def census(folder: Path, part: str, rows: int) -> Path:
    table = pq.read_table(CENSUS / f"census_income_{part}.parquet")
    pq.write_table(table.slice(0, rows), folder / f"{part}.parquet")
    return folder / f"{part}.parquet"


@pytest.mark.row("S4-14")
def test_census_is_trained_exported_and_served(tmp_path: Path, verb: Verb) -> None:
    census(tmp_path, "train", 20_000)
    test = census(tmp_path, "test", 10_000)
    ids = ["class_of_worker", "occupation_code", "education", "marital_status", "major_occupation", "sex"]
    content = {
        "data": {"train": "train.parquet", "test": "test.parquet", "batch_size": 256, "epochs": 2},
        "features": {
            **{name: {"type": "id", "dim": 8} for name in ids},
            "age": {"type": "bucket", "quantiles": 16, "dim": 8},
            "gains": {"type": "dense", "column": "capital_gains", "log1p": True, "standardise": True},
            "weeks": {"type": "dense", "column": "weeks_worked", "standardise": True},
        },
        "labels": {"label": {}},
        "model": {"name": "autoint", "attention": "sdpa", "width": 16, "deep_mlp": [32]},
        "train": {"reproducible": True},
        "run": {"dir": "runs", "name": "one"},
    }
    (tmp_path / "persia.yml").write_text(yaml.safe_dump(content, sort_keys=False))
    trainer, _ = fit(persia.load_config(tmp_path / "persia.yml"))
    found = summary(trainer)
    assert found["status"] == "finished" and found["test"]["labels"]["label"]["auc"] > 0.9
    verb("export", "runs/one", "-o", "bundle")
    verb("export", "runs/one", "-o", "scripted", "--torchscript")
    rows = pq.read_table(test).slice(0, 500)
    scores = []
    for name in ("bundle", "scripted"):
        bundle = Bundle.open(tmp_path / name)
        scores.append(bundle.outputs_of(bundle.transform(rows), at_a_time=100).values)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-5)
    assert len(np.unique(scores[0])) > 100
