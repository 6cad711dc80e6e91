"""The DCN-v2 model against its formula."""

import io

import pytest
import torch

from persia.errors import ConfigError, DataError
from persia.models import DCNv2

BATCH, DENSE, DIMS = 5, 3, [4, 2, 4]


def model(**options: object) -> DCNv2:
    torch.manual_seed(0)
    return DCNv2(DENSE, DIMS, **{"cross_layers": 2, "deep_mlp": [7, 6], **options})  # type: ignore[arg-type]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(1)
    dense = [torch.randn(BATCH, 1, dtype=dtype), torch.randn(BATCH, DENSE - 1, dtype=dtype)]
    return dense, [torch.randn(BATCH, dim, dtype=dtype, requires_grad=True) for dim in DIMS]


@pytest.mark.parametrize("rank", [None, 3])
def test_logits_follow_the_formula_sample_by_sample(rank: int | None) -> None:
    dcn = model(low_rank=rank)
    state = dcn.state_dict()
    dense, embeddings = inputs()
    logits = dcn(dense, embeddings)
    assert logits.shape == (BATCH, 1)
    for sample in range(BATCH):
        first = torch.cat([part[sample] for part in [*dense, *embeddings]])
        crossed = first
        for layer in range(2):
            name = f"cross.layers.{layer}"
            weight = state[f"{name}.weight"] if rank is None else state[f"{name}.1.weight"] @ state[f"{name}.0.weight"]
            bias = state[f"{name}.bias" if rank is None else f"{name}.1.bias"]
            crossed = first * (weight @ crossed + bias) + crossed
        deep = first
        for linear in ("deep.0", "deep.2"):
            deep = torch.relu(state[f"{linear}.weight"] @ deep + state[f"{linear}.bias"])
        torch.testing.assert_close(logits[sample], dcn.top(torch.cat([crossed, deep])))


def test_gradients_equal_finite_differences() -> None:
    dcn = model().double()
    dense, embeddings = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda *rows: dcn(dense, list(rows)), embeddings)


def test_the_cross_network_alone_and_slots_alone() -> None:
    dense, embeddings = inputs()
    assert model(deep_mlp=[])(dense, embeddings).shape == (BATCH, 1)
    assert DCNv2(0, DIMS)([], embeddings).shape == (BATCH, 1)


def test_dropout_acts_in_training_only() -> None:
    dcn = model(dropout=0.5)
    given = inputs()
    assert not torch.equal(dcn(*given), dcn(*given))
    dcn.eval()
    assert torch.equal(dcn(*given), dcn(*given))


def test_wrong_arguments_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DCNv2(-1, [4, 0], cross_layers=0, deep_mlp=[0], low_rank=0, dropout=1.0)
    for part in (
        "num_dense (-1) must be at least 0",
        "embedding_dims[1] (0) must be at least 1",
        "cross_layers (0)",
        "deep_mlp[0] (0)",
        "low_rank (0)",
        "dropout (1.0)",
    ):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="embedding_dims is empty"):
        DCNv2(1, [])


@pytest.mark.parametrize(
    ("columns", "shapes", "message"),
    [
        (DENSE + 1, [(BATCH, dim) for dim in DIMS], r"num_dense \(3\)"),
        (DENSE, [(BATCH, 4)] * 2, "slots in the batch: 2, expected 3"),
        (DENSE, [(BATCH, 4)] * 3, r"slot 1 has shape \[5, 4\], expected \[batch, 2\]"),
        (DENSE, [(BATCH, 10, 4), (BATCH, 2), (BATCH, 4)], "slot 0 has shape"),
    ],
)
def test_other_shapes_are_refused(columns: int, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        model()([torch.zeros(BATCH, columns)], [torch.zeros(shape) for shape in shapes])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("deep", [[7, 6], []])
def test_the_scripted_model_gives_the_same_logits(deep: list[int]) -> None:
    dcn = model(deep_mlp=deep)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(dcn), file)
    file.seek(0)
    loaded = torch.jit.load(file)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loaded(*inputs()), dcn(*inputs()))
