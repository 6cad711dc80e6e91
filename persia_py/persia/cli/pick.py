"""``persia config pick``: the cheapest instance in a price table on which a configuration fits."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persia.cli.config import Overrides
from persia.runtime.errors import ConfigError, UsageError
from persia.runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from persia.trainer.instances import Choice, Instance


def config_pick(
    prices: Annotated[Path, typer.Argument(metavar="PRICES", help="A CSV file of instances and their prices.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A persia.yml. Default: PERSIA_CONFIG, or persia.yml in this folder."),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(min=0.001, help="The memory that is needed, in place of an estimate for FILE.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=0, help="The number of GPUs that are needed.")] = 0,
    min_saving: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of the on-demand price that must be saved.")
    ] = 0.5,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Pick the cheapest instance on which a run fits. Exit with 75 if no price saves at least --min-saving.

    The required memory is the estimate that a run in one process makes at its start, divided by 0.9.
    """
    from persia.trainer import instances

    if memory_gib is not None and (file is not None or overrides):
        raise UsageError(
            "persia config pick: FILE and --set are not allowed with --memory-gib, which replaces the estimate"
        )
    table = instances.read_table(prices)
    memory = _estimated(file, overrides or ()) if memory_gib is None else memory_gib * instances.GIB
    choice = instances.pick(table, memory, gpus=gpus, min_saving=min_saving)
    if choice is None:
        raise _none(prices, table, memory, gpus, is_estimate=memory_gib is None)
    if as_json:
        typer.echo(json.dumps({"memory": round(memory), "gpus": gpus, **choice.as_dict()}))
    else:
        _show(table, memory, gpus, choice, min_saving)
    if choice.waits:
        raise typer.Exit(ExitCode.AGAIN)


def _estimated(file: Path | None, overrides: Sequence[str]) -> float:
    """Return the memory that a run of a configuration needs, in bytes, including a free tenth."""
    from persia.config import load_config
    from persia.runtime.config_files import find_persia_yml
    from persia.trainer import sizing

    path = file or find_persia_yml()
    if path is None:
        raise ConfigError(
            "no persia.yml: PERSIA_CONFIG is not set, and this folder has none",
            hint="specify its path: persia config pick PRICES FILE, or the memory: --memory-gib 16",
        )
    return sizing.of_config(load_config(path, overrides)).here / sizing.FULL


def _none(prices: Path, table: "Sequence[Instance]", memory: float, gpus: int, *, is_estimate: bool) -> ConfigError:
    """Return the error for a table in which no instance is suitable."""
    from persia.trainer import instances

    enough = [each for each in table if each.gpus >= gpus]
    needed = f"{math.ceil(10 * memory / instances.GIB) / 10} GiB of memory"  # rounded up, so that it exceeds ``most``
    if not enough:
        count = max(each.gpus for each in table)
        return ConfigError(
            f"{prices}: no instance has at least {_gpus(gpus)}; the largest number is {count}",
            hint="add instances to the table, or lower --gpus",
        )
    largest = max(enough, key=lambda each: each.memory)
    of = f" with at least {_gpus(gpus)}" if gpus else ""
    most = f"{math.floor(10 * largest.memory / instances.GIB) / 10} GiB"
    smaller = "; to reduce the memory, see the page What limits a run of the documentation" if is_estimate else ""
    return ConfigError(
        f"{prices}: no instance{of} has {needed}; the largest is {largest} with {most}",
        hint=f"add larger instances to the table{smaller}",
    )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _show(table: "Sequence[Instance]", memory: float, gpus: int, choice: "Choice", min_saving: float) -> None:
    from persia.trainer import instances

    needed = f"{memory / instances.GIB:.1f} GiB of memory" + (f" and {_gpus(gpus)}" if gpus else "")
    suitable = sum(instances.is_suitable(each, memory, gpus) for each in table)
    typer.echo(f"needed: {needed}; suitable instances: {suitable} of {len(table)}")
    price = f"{choice.instance}, {choice.instance.usd_per_hour:g} USD per hour"
    if choice.usual is None or choice.saving is None:
        typer.echo(f"pick: {price}; no suitable instance has an on-demand price to compare with")
        return
    compared = f"{choice.saving:.0%} below the {choice.usual.on_demand:g} USD of {choice.usual.name} on demand"
    if choice.saving < 0:
        compared = f"{-choice.saving:.0%} above the {choice.usual.on_demand:g} USD of {choice.usual.name} on demand"
    if choice.waits:
        only = "" if choice.saving < 0 else "only "
        typer.echo(f"wait: {price}, is the cheapest, but {only}{compared}; --min-saving requires {min_saving:.0%}")
        anyway = "" if choice.saving < 0 else ", or take this instance now: --min-saving 0"
        typer.echo(f"run the command again when prices have changed{anyway}")
    else:
        typer.echo(f"pick: {price}, {compared}")
