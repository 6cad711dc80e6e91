"""The quality that synthetic rows allow: the AUC of the teacher, and of the teacher's formula fitted to the rows.

The rows are those of ``persia data synth`` with the same options. The formula of :class:`persia.data.synth.Teacher` is
fitted to ``--rows`` rows by maximum likelihood (``ml``), and again with the distributions of its numbers as a prior
(``map``). The teacher and both fits are scored on the next ``--test`` rows. A model that does not know the formula can
hardly score better than the fits. The line of ``ml`` ends with the number of the formula's parameters divided by twice
the number of fitted rows. With many rows for each parameter, theory expects the log loss of ``ml`` to exceed that of
the teacher by this number.
"""

import argparse
import statistics
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from persia.data.synth import Teacher
from persia.trainer.metrics import auc, log_loss

Ints = npt.NDArray[np.int64]
FACTORS = 4
BATCH, STEPS, LR = 4096, 1500, 0.02
WEIGHT_VARIANCE, FACTOR_VARIANCE = 0.5**2, 0.6**2


@dataclass
class Rows:
    """Rows of a teacher: ids numbered from 0, dense inputs, labels, and the teacher's logits."""

    ids: torch.Tensor
    dense: torch.Tensor
    labels: torch.Tensor
    logits: npt.NDArray[np.float64]

    def part(self, rows: slice) -> "Rows":
        """Return some of the rows."""
        return Rows(self.ids[rows], self.dense[rows], self.labels[rows], self.logits[rows])


def draw(teacher: Teacher, rows: int) -> Rows:
    """Return the first rows of a teacher."""
    ids: list[list[Ints]] = [[] for _ in teacher.ids]
    dense, labels, chances = [], [], []
    for batch, probabilities in teacher.batches(rows):
        for column, found in enumerate(ids):
            found.append(np.asarray(batch[f"id{column}"].cast("int64")))
        dense.append(np.stack([np.asarray(batch[f"dense{column}"]) for column in range(teacher.dense)], axis=1))
        labels.append(np.asarray(batch["label"]).astype(np.float32))
        chances.append(probabilities)
    places = [np.unique(np.concatenate(column), return_inverse=True)[1] for column in ids]
    chance = np.concatenate(chances)
    return Rows(
        torch.from_numpy(np.stack(places, axis=1)),
        torch.from_numpy(np.concatenate(dense)),
        torch.from_numpy(np.concatenate(labels)),
        np.log(chance / (1 - chance)),
    )


class Formula(torch.nn.Module):
    """The teacher's formula, with parameters in place of its numbers."""

    def __init__(self, counts: list[int], dense: int) -> None:
        super().__init__()
        self.weights = [torch.nn.Embedding(count, 1) for count in counts]
        self.factors = [torch.nn.Embedding(count, FACTORS) for count in counts[:2]]
        self.all = torch.nn.ModuleList(self.weights + self.factors)
        self.dense = torch.nn.Linear(dense + 1, 1)
        for each in self.weights:
            torch.nn.init.zeros_(each.weight)
        for each in self.factors:
            torch.nn.init.normal_(each.weight, std=0.3)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return logits, ``[rows]``."""
        logits: torch.Tensor = self.dense(torch.cat([dense, dense[:, :1] ** 2], dim=1))
        for column, weights in enumerate(self.weights):
            logits = logits + weights(ids[:, column])
        if len(self.factors) == 2:
            logits = logits + (self.factors[0](ids[:, 0]) * self.factors[1](ids[:, 1])).sum(1, keepdim=True)
        return logits.squeeze(1)

    def prior(self) -> torch.Tensor:
        """Return minus the logarithm of the density of the parameters, without its constant."""
        squares = [each.weight.square().sum() / (2 * WEIGHT_VARIANCE) for each in self.weights]
        squares += [each.weight.square().sum() / (2 * FACTOR_VARIANCE) for each in self.factors]
        return torch.stack(squares).sum()


def fit(train: Rows, counts: list[int], seed: int, *, prior: bool) -> Formula:
    """Fit the formula to rows. The learning rate falls linearly to 0."""
    torch.manual_seed(seed)
    model = Formula(counts, train.dense.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    rows, step = len(train.labels), 0
    while step < STEPS:
        order = torch.randperm(rows)
        for start in range(0, max(rows - BATCH, 1), BATCH):
            chosen = order[start : start + BATCH]
            logits = model(train.ids[chosen], train.dense[chosen])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, train.labels[chosen])
            optimizer.zero_grad()
            torch.autograd.backward(loss + model.prior() / rows if prior else loss)
            optimizer.step()
            schedule.step()
            step += 1
            if step == STEPS:
                break
    return model


def quality(logits: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return AUC and log loss."""
    share = np.ones(len(labels))
    return auc(logits, labels, share), log_loss(logits, labels, share)


def main() -> None:
    """Print a line for the teacher and for each fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="that the formula is fitted to")
    parser.add_argument("--test", type=int, default=500_000, help="rows after these, on which it is scored")
    parser.add_argument("--ids", default="1000,10000,100000")
    parser.add_argument("--seeds", type=int, default=1, help="of the fit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    teacher = Teacher(tuple(int(float(each)) for each in arguments.ids.split(",")))
    rows = draw(teacher, arguments.rows + arguments.test)
    train, test = rows.part(slice(None, arguments.rows)), rows.part(slice(arguments.rows, None))
    counts = [int(column.max()) + 1 for column in rows.ids.T]
    parameters = sum(len(column.unique()) * (1 + FACTORS * (place < 2)) for place, column in enumerate(train.ids.T))
    parameters += teacher.dense + 2
    labels = test.labels.double().numpy()
    best, least = quality(test.logits, labels)
    print(f"teacher  AUC {best:.4f}  log loss {least:.4f}")
    for name in ("ml", "map"):
        found = []
        for seed in range(arguments.seeds):
            model = fit(train, counts, seed, prior=name == "map")
            with torch.no_grad():
                logits = model(test.ids, test.dense).double().numpy()
            found.append(quality(logits, labels))
        below, excess = best - statistics.mean(each[0] for each in found), statistics.mean(each[1] for each in found)
        expected = f", expected {parameters / (2 * arguments.rows):.4f}" if name == "ml" else ""
        print(f"{name}  AUC {below:.4f} below, log loss {excess - least:.4f} above that of the teacher{expected}")


if __name__ == "__main__":
    main()
