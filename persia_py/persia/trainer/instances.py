"""Finds the cheapest instance in a price table on which a run fits, and tells whether to wait for a lower price.

This module only decides; it does not wait.
"""

import csv
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from persia.config.findings import near
from persia.runtime.errors import ConfigError, StorageError

REQUIRED = ("instance", "memory_gib", "usd_per_hour")
OPTIONAL = ("on_demand_usd_per_hour", "gpus", "zone")
"""Optional columns of a price table."""
MIN_SAVING = 0.5
"""The default saving, as a share of the on-demand price, below which :attr:`Choice.waits` is set."""
GIB = 1 << 30


@dataclass(frozen=True)
class Instance:
    """An instance that can be rented.

    Attributes:
        name: The instance type.
        memory: The memory, in bytes.
        usd_per_hour: The current price per hour.
        on_demand: The on-demand price; None if unknown.
        gpus: The number of GPUs.
        zone: The zone; empty if unknown.
    """

    name: str
    memory: int
    usd_per_hour: float
    on_demand: float | None = None
    gpus: int = 0
    zone: str = ""

    def __str__(self) -> str:
        """Return type and zone."""
        return f"{self.name} in {self.zone}" if self.zone else self.name


@dataclass(frozen=True)
class Choice:
    """The cheapest instance.

    Attributes:
        instance: The instance.
        usual: The suitable instance whose on-demand price is the lowest; None if no such price is known.
        saving: The saving, as a share of that price; negative if the instance is more expensive. None without
            ``usual``.
        waits: Whether to wait for another price, because the saving is too small.
    """

    instance: Instance
    usual: Instance | None
    saving: float | None
    waits: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the choice, JSON-serializable."""
        return {
            "instance": asdict(self.instance),
            "on_demand": None if self.usual is None else asdict(self.usual),
            "saving": None if self.saving is None else round(self.saving, 4),
            "wait": self.waits,
        }


def is_suitable(instance: Instance, memory: float, gpus: int = 0) -> bool:
    """Whether an instance has the required memory and GPUs."""
    return instance.memory >= memory and instance.gpus >= gpus


def pick(
    instances: Sequence[Instance], memory: float, *, gpus: int = 0, min_saving: float = MIN_SAVING
) -> Choice | None:
    """Return the cheapest suitable instance; None if none is suitable.

    Of instances with equal prices, the instance with the most memory is chosen; of instances with equal memory, the
    first.

    Args:
        instances: The instances and their prices.
        memory: The required memory, in bytes.
        gpus: The required number of GPUs.
        min_saving: The required saving, as a share of the lowest on-demand price of a suitable instance.
    """
    suitable = [each for each in instances if is_suitable(each, memory, gpus)]
    if not suitable:
        return None
    chosen = min(suitable, key=lambda each: (each.usd_per_hour, -each.memory))
    known = [(each.on_demand, each) for each in suitable if each.on_demand is not None]
    if not known:
        return Choice(chosen, None, None, waits=False)
    usual_price, usual = min(known, key=lambda pair: pair[0])
    saving = 1 - chosen.usd_per_hour / usual_price
    return Choice(chosen, usual, saving, waits=saving < min_saving and not math.isclose(saving, min_saving))


def read_table(path: Path) -> list[Instance]:
    """Return the instances of a CSV file with the columns :data:`REQUIRED` and, where known, :data:`OPTIONAL`.

    Raises:
        StorageError: The file cannot be read.
        ConfigError: The file has errors; the message lists all of them with their lines.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, skipinitialspace=True, restkey="", strict=True)
            names = [*(rows.fieldnames or ())]
            wrong = _wrong_columns(names)
            found = [] if wrong else [(rows.line_num, row) for row in rows]
    except OSError as error:
        raise StorageError(
            f"cannot read the price table {path}: {error.strerror or error}",
            hint=f"check the path and its permissions: ls -l {shlex.quote(str(path))}",
        ) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise _refused([f"{path}: not a CSV file: {error}"]) from error
    instances: list[Instance] = []
    lines: dict[tuple[str, str], int] = {}
    for line, row in found:
        mistakes, instance = _instance(row)
        if instance is not None and (first := lines.setdefault((instance.name, instance.zone), line)) != line:
            mistakes.append(f"{instance} is on line {first} too")
        wrong += [f"line {line}: {each}" for each in mistakes]
        instances += [] if instance is None else [instance]
    if not wrong and not instances:
        wrong = ["the table has no instance"]
    if wrong:
        raise _refused([f"{path}: {each}" for each in wrong])
    return instances


def _refused(mistakes: list[str]) -> ConfigError:
    return ConfigError(
        "\n".join(mistakes),
        hint=(
            f"correct the file; its first line must have the columns {','.join(REQUIRED)}, and may have "
            f"{','.join(OPTIONAL)}; the page Long runs of the documentation has an example"
        ),
    )


def _wrong_columns(names: Sequence[str]) -> list[str]:
    known = [*REQUIRED, *OPTIONAL]
    wrong = [f"line 1: no column `{name}`" for name in REQUIRED if name not in names]
    wrong += [f"line 1: unknown column `{name}`{near(name, known)}" for name in names if name not in known]
    return wrong + [f"line 1: column `{name}` appears twice" for name in known if names.count(name) > 1]


def _instance(row: dict[str, Any]) -> tuple[list[str], Instance | None]:
    """Return the errors of a line, or its instance."""
    if "" in row or None in row.values():
        return ["the number of values differs from the number of columns in line 1"], None
    wrong: list[str] = []

    def number(name: str, *, least: float, default: float | None = None) -> float | None:
        text = str(row.get(name) or "").strip()
        if not text and name in OPTIONAL:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least) or (name == "gpus" and value != int(value)):
            kind = "a whole number of at least 0" if name == "gpus" else "a number above 0"
            wrong.append(f"{name}: found `{text}`, allowed: {kind}")
            return default
        return value

    name = str(row["instance"]).strip()
    if not name:
        wrong.append("instance: found nothing, allowed: the name of an instance type")
    above = math.ulp(0.0)
    memory, price = number("memory_gib", least=above), number("usd_per_hour", least=above)
    on_demand, gpus = number("on_demand_usd_per_hour", least=above), number("gpus", least=0, default=0)
    if wrong or memory is None or price is None:
        return wrong, None
    zone = str(row.get("zone") or "").strip()
    return wrong, Instance(name, int(memory * GIB), price, on_demand, int(gpus or 0), zone)
