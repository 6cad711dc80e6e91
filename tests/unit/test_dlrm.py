"""The DLRM model against its formula."""

import io

import pytest
import torch

from persia.errors import ConfigError, DataError
from persia.models import DLRM

BATCH, DENSE, SLOTS, DIM = 5, 3, 4, 8


def model(dropout: float = 0.0) -> DLRM:
    torch.manual_seed(0)
    return DLRM(DENSE, SLOTS, DIM, bottom_mlp=[6, DIM], top_mlp=[7, 1], dropout=dropout)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(1)
    dense = [torch.randn(BATCH, 1, dtype=dtype), torch.randn(BATCH, DENSE - 1, dtype=dtype)]
    return dense, [torch.randn(BATCH, DIM, dtype=dtype, requires_grad=True) for _ in range(SLOTS)]


@pytest.mark.stack
def test_logits_follow_the_formula_sample_by_sample() -> None:
    dlrm = model()
    dense, embeddings = inputs()
    logits = dlrm(dense, embeddings)
    assert logits.shape == (BATCH, 1)
    for sample in range(BATCH):
        first = dlrm.bottom(torch.cat([part[sample] for part in dense]))
        vectors = [first, *(embedding[sample] for embedding in embeddings)]
        products = [torch.dot(vectors[i], vectors[j]) for i in range(SLOTS + 1) for j in range(i)]
        torch.testing.assert_close(logits[sample], dlrm.top(torch.cat([first, torch.stack(products)])))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("bottom", [[], [6, DIM]])
def test_a_model_without_dense_inputs_has_a_learned_vector_instead(bottom: list[int]) -> None:
    torch.manual_seed(0)
    dlrm = DLRM(0, SLOTS, DIM, bottom_mlp=bottom, top_mlp=[7, 1])
    _, embeddings = inputs()
    assert dlrm.constant is not None and not [*dlrm.bottom.parameters()]
    logits = dlrm([], embeddings)
    for sample in range(BATCH):
        vectors = [dlrm.constant, *(embedding[sample] for embedding in embeddings)]
        products = [torch.dot(vectors[i], vectors[j]) for i in range(SLOTS + 1) for j in range(i)]
        torch.testing.assert_close(logits[sample], dlrm.top(torch.cat([vectors[0], torch.stack(products)])))
    logits.sum().backward()
    assert dlrm.constant.grad is not None and dlrm.constant.grad.any()
    with pytest.raises(DataError, match=r"num_dense \(0\)"):
        dlrm([torch.ones(BATCH, 1)], embeddings)
    torch.testing.assert_close(torch.jit.script(dlrm)([], embeddings), logits)


def test_dense_inputs_of_whole_numbers_are_refused_by_name() -> None:
    dense, embeddings = inputs()
    with pytest.raises(DataError, match=r"dense input 1 has dtype int64.*astype\(np.float32\)"):
        model()([dense[0], dense[1].long()], embeddings)


def test_gradients_equal_finite_differences() -> None:
    dlrm = model().double()
    dense, embeddings = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda *rows: dlrm(dense, list(rows)), embeddings)


def test_dropout_acts_in_training_only() -> None:
    dlrm = model(dropout=0.5)
    dense, embeddings = inputs()
    assert not torch.equal(dlrm(dense, embeddings), dlrm(dense, embeddings))
    dlrm.eval()
    assert torch.equal(dlrm(dense, embeddings), dlrm(dense, embeddings))


def test_wrong_arguments_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DLRM(-1, SLOTS, 16, bottom_mlp=[0, 64], top_mlp=[], dropout=1.0)
    for part in (
        "num_dense (-1) must be at least 0",
        "bottom_mlp[-1] (64) must equal embedding_dim (16)",
        "bottom_mlp[0] (0) must be at least 1",
        "top_mlp is empty; its last layer must equal 1",
        "dropout (1.0)",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "slots", "shape", "message"),
    [
        (DENSE + 1, SLOTS, (BATCH, DIM), r"num_dense \(3\)"),
        (DENSE, SLOTS - 1, (BATCH, DIM), "slots in the batch: 3, expected 4"),
        (DENSE, SLOTS, (BATCH, DIM + 1), r"slot 0 has shape \[5, 9\], expected \[batch, 8\]"),
        (DENSE, SLOTS, (BATCH, 10, DIM), "slot 0 has shape"),
    ],
)
def test_other_shapes_are_refused(columns: int, slots: int, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        model()([torch.zeros(BATCH, columns)], [torch.zeros(shape)] * slots)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_scripted_model_gives_the_same_logits() -> None:
    dlrm = model()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(dlrm), file)
    file.seek(0)
    loaded = torch.jit.load(file)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loaded(*inputs()), dlrm(*inputs()))
