"""``persia.testing.check``: the step that fails is named, with the user's own line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_files import write_config

import persia
import persia.testing
from persia.errors import DataError, NonFiniteError, UsageError
from persia.features import read_features
from persia.testing import Report

STEPS = ["build", "forward", "loss", "backward", "eval", "state_dict"]


class Good(torch.nn.Module):
    """A model that takes any inputs. Subclasses break one method each."""

    def __init__(self) -> None:
        super().__init__()
        self.top = torch.nn.Linear(13, 1)  # three features of dim 4, one dense

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.top(torch.cat([*dense, *embeddings], 1))
        return output


class BadForward(Good):
    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*dense, *embeddings], 1) @ torch.ones(3, 1)  # the wrong line


class BadLoss(Good):
    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(dense, embeddings).expand(-1, 2)


class NotFinite(Good):
    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(dense, embeddings) * float("nan")


class Detached(Good):
    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(dense, embeddings).detach()


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient of mine")


class BadBackward(Good):
    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = _NoBackward.apply(super().forward(dense, embeddings))
        return output


class BadEval(Good):
    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        if not self.training:
            raise KeyError("only in training")
        return super().forward(dense, embeddings)


class BadState(Good):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Parameter(torch.ones(1))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(dense, embeddings) * self.hidden

    def state_dict(self, *arguments: object, **options: object) -> dict[str, torch.Tensor]:  # type: ignore[override]
        state = super().state_dict(*arguments, **options)  # type: ignore[call-overload]
        return {name: each for name, each in state.items() if name != "hidden"}

    def load_state_dict(self, state: dict[str, torch.Tensor], *rest: object) -> object:  # type: ignore[override]
        return super().load_state_dict(state, strict=False)


def no_model() -> torch.nn.Module:
    raise RuntimeError("not today")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.mark.row("S1-03")
@pytest.mark.parametrize(
    ("model", "failed", "kind", "text"),
    [
        (no_model, "build", RuntimeError, "not today"),
        (BadForward, "forward", RuntimeError, "shapes cannot be multiplied"),
        (BadLoss, "loss", DataError, "expected [batch, 1]"),
        (NotFinite, "loss", NonFiniteError, "the loss is [nan]"),
        (Detached, "loss", UsageError, "check that its output is not detached"),
        (BadBackward, "backward", ValueError, "no gradient of mine"),
        (BadEval, "eval", KeyError, "only in training"),
        (BadState, "state_dict", DataError, "a weight is missing from the state dict"),
    ],
)
def test_the_step_that_fails_is_named(
    config: Path, model: type[torch.nn.Module], failed: str, kind: type[Exception], text: str
) -> None:
    report = persia.testing.check(model, config)
    assert not report and report.failed == failed, str(report)
    assert [step.name for step in report.steps] == STEPS[: STEPS.index(failed) + 1]
    assert isinstance(report.error, kind) and text in str(report.error)
    assert f"✗ {failed}: " in str(report)
    with pytest.raises(kind):
        report.raise_if_failed()


@pytest.mark.row("S1-03")
def test_the_users_own_line_is_named(config: Path) -> None:
    report = persia.testing.check(BadForward(), config)
    place = report.steps[-1].place
    assert "test_model_check.py:" in place and "in forward: " in place and "# the wrong line" in place
    assert f"  at {place}" in repr(report), "pytest shows it where an assertion fails"


@pytest.mark.row("S1-03")
def test_a_sound_model_passes_and_stays_as_it_was(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")  # in a container of a job, rows are in memory too
    model = Good().eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    for given in (persia.load_config(config), str(config), read_features(config)):
        report = persia.testing.check(model, given)
        assert report and [step.name for step in report.steps] == STEPS, str(report)
        assert not report.warnings
    assert torch.equal(torch.rand(1), expected), "the random state too"
    assert not model.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert persia.testing.check(None, config), "the model of the file"


@pytest.mark.parametrize("features", [{"type": "sequence", "last": 5, "dim": 4}, {"type": "bag", "dim": 4}])
def test_other_features(tmp_path: Path, features: dict[str, object]) -> None:
    path = write_config(tmp_path, features={"items": features, "user": {"type": "id", "dim": 4}})
    assert persia.testing.check(None, path) and persia.testing.check_alone(None, path)


def test_what_gets_no_gradient_is_a_warning(config: Path) -> None:
    class Lazy(Good):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(1, 1)

        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            return super().forward(dense, [embeddings[0] * 0, *embeddings[1:]])

    report = persia.testing.check(Lazy, config)
    assert report and "unused.weight, unused.bias" in report.warnings[0]
    assert "features whose embeddings get no gradient: id0" in report.warnings[1]


def test_wrong_arguments_are_refused(config: Path) -> None:
    with pytest.raises(UsageError, match="pass a model"):
        persia.testing.check(None, read_features(config))
    with pytest.raises(UsageError, match="found int"):
        persia.testing.check(Good, 5)  # type: ignore[arg-type]
    report: Report = persia.testing.check(lambda: 5, config)  # type: ignore[arg-type, return-value]
    assert report.failed == "build" and "expected a torch.nn.Module as the model, found int" in str(report)


@pytest.mark.row("S1-13")
def test_from_a_shell(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Mine(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 1)\n\n"
        "    def forward(self, dense, embeddings):\n"
        "        return super().forward(embeddings[0 if self.training else 9])\n"
    )
    path = write_config(tmp_path, model={"class": "mine:Mine"})
    words = [sys.executable, "-m", "persia.testing"]
    done = subprocess.run([*words, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    ticks = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("✓")]
    assert ticks == ["build", "forward", "loss", "backward"]
    assert "✗ eval: IndexError: list index out of range\n  at mine.py:7 in forward" in done.stdout
