"""``persia config pick``: the cheapest instance of a price table on which a run fits."""

import json
from pathlib import Path

import pytest
from conftest import Verb
from trainer_files import config_of, write_clicks, write_config

from persia.errors import ConfigError
from persia.trainer import sizing
from persia.trainer.instances import GIB, Instance, pick, read_table

HEAD = "instance,memory_gib,usd_per_hour,on_demand_usd_per_hour,gpus,zone"
TABLE = f"""\
{HEAD}
tiny,0.25,0.001,0.002,0,a
small,4,0.02,0.05,0,a
small,4,0.019,0.05,0,b
large,64,0.2,0.8,0,a
gpu,32,0.9,1.2,1,a
"""


def instances() -> list[Instance]:
    return [
        Instance("small", 4 * GIB, 0.02, 0.05),
        Instance("large", 64 * GIB, 0.2, 0.8),
        Instance("gpu", 32 * GIB, 0.9, 1.2, gpus=1),
    ]


@pytest.mark.row("S4-40")
def test_the_cheapest_one_with_enough_memory_is_picked() -> None:
    first = pick(instances(), 3 * GIB)
    assert first is not None and first.instance.name == "small"
    assert first.saving == pytest.approx(0.6) and not first.waits
    second = pick(instances(), 5 * GIB)
    assert second is not None and second.instance.name == "large" and second.saving == pytest.approx(0.75)
    exact = pick(instances(), 64 * GIB)
    assert exact is not None and exact.instance.name == "large"
    assert pick(instances(), 64 * GIB + 1) is None
    assert pick([], 1) is None


@pytest.mark.row("S4-40")
def test_it_waits_if_less_than_half_is_saved() -> None:
    gpu = pick(instances(), GIB, gpus=1)
    assert gpu is not None and gpu.instance.name == "gpu" and gpu.saving == pytest.approx(0.25) and gpu.waits
    taken = pick(instances(), GIB, gpus=1, min_saving=0.25)
    assert taken is not None and not taken.waits
    half = pick([Instance("a", GIB, 0.21, 0.42)], GIB)
    assert half is not None and half.saving == pytest.approx(0.5) and not half.waits
    above = pick([Instance("a", GIB, 0.2101, 0.42)], GIB)
    assert above is not None and above.waits


@pytest.mark.row("S4-40")
def test_the_saving_is_that_against_the_lowest_price_on_demand_of_a_suitable_one() -> None:
    """A discounted large instance saves little if another suitable instance costs the same on demand."""
    found = pick([Instance("big", 64 * GIB, 0.3, 3.0), Instance("mid", 8 * GIB, 0.35, 0.4)], 4 * GIB)
    assert found is not None and found.usual is not None
    assert (found.instance.name, found.usual.name) == ("big", "mid") and found.waits
    assert found.saving == pytest.approx(0.25)


def test_equal_prices_take_the_larger_memory_and_unknown_ones_do_not_wait() -> None:
    found = pick([Instance("a", 4 * GIB, 0.1), Instance("b", 8 * GIB, 0.1), Instance("c", 8 * GIB, 0.1)], GIB)
    assert found is not None and found.instance.name == "b"
    assert found.saving is None and found.usual is None and not found.waits


def test_a_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text(TABLE)
    found = read_table(tmp_path / "prices.csv")
    assert len(found) == 5 and found[2] == Instance("small", 4 * GIB, 0.019, 0.05, 0, "b")
    (tmp_path / "prices.csv").write_text("\ufeffusd_per_hour, instance, memory_gib\n0.5, x, 0.5\n")
    assert read_table(tmp_path / "prices.csv") == [Instance("x", GIB // 2, 0.5)]


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("", ["line 1: no column `instance`", "line 1: no column `memory_gib`", "line 1: no column `usd_per_hour`"]),
        (f"{HEAD}\n", ["the table has no instance"]),
        (
            "instance,memory_gib,usd_per_hours\n",
            ["line 1: no column `usd_per_hour`", "unknown column `usd_per_hours`, did you mean `usd_per_hour`?"],
        ),
        (
            f"{HEAD}\n,x,0,-1,0.5,a\nb,nan,inf,,1,\n",
            [
                "line 2: instance: found nothing",
                "line 2: memory_gib: found `x`, allowed: a number above 0",
                "line 2: usd_per_hour: found `0`",
                "line 2: on_demand_usd_per_hour: found `-1`",
                "line 2: gpus: found `0.5`, allowed: a whole number of at least 0",
                "line 3: memory_gib: found `nan`",
                "line 3: usd_per_hour: found `inf`",
            ],
        ),
        (f"{HEAD}\na,1,1\n", ["line 2: the number of values differs from the number of columns"]),
        (f"{HEAD}\na,1,1,1,1,b,c\n", ["line 2: the number of values differs from the number of columns"]),
        (f"{HEAD}\na,1,1,,,b\na,2,1,,,b\n", ["line 3: a in b is on line 2 too"]),
        (f'{HEAD}\n"a"x,1,1,,,\n', ["not a CSV file"]),
    ],
)
def test_all_errors_of_a_table_are_named(tmp_path: Path, text: str, mistakes: list[str]) -> None:
    (tmp_path / "prices.csv").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_table(tmp_path / "prices.csv")
    assert all(each in str(caught.value) for each in mistakes), str(caught.value)
    named = "instance,memory_gib,usd_per_hour, and may have on_demand_usd_per_hour,gpus,zone"
    assert named in caught.value.hint


@pytest.fixture
def prices(tmp_path: Path) -> str:
    (tmp_path / "prices.csv").write_text(TABLE)
    write_clicks(tmp_path / "clicks.parquet")
    write_config(tmp_path)
    return "prices.csv"


@pytest.mark.row("S4-40")
def test_the_memory_is_the_estimate_of_the_run(tmp_path: Path, verb: Verb, prices: str) -> None:
    out, _ = verb("config", "pick", prices, "persia.yml", "--json")
    found = json.loads(out)
    assert found["memory"] == round(sizing.of_config(config_of(tmp_path)).here / sizing.FULL)
    assert found["memory"] > 0.25 * GIB, "tiny is too small for torch alone"
    assert (found["instance"]["name"], found["instance"]["zone"], found["wait"]) == ("small", "b", False)
    larger = json.loads(verb("config", "pick", prices, "--json", "--set", "data.batch_size=10000000")[0])
    assert larger["instance"]["name"] == "large", "the default file, with a change"


@pytest.mark.row("S4-40")
def test_the_verb_picks_or_waits(verb: Verb, prices: str) -> None:
    out, _ = verb("config", "pick", prices)
    assert "suitable instances: 4 of 5" in out
    assert "pick: small in b, 0.019 USD per hour, 62% below the 0.05 USD of small on demand" in out
    out, _ = verb("config", "pick", prices, "--memory-gib", "8", "--gpus", "1", code=75)
    assert "wait: gpu in a, 0.9 USD per hour, is the cheapest, but only 25% below the 1.2 USD of gpu on demand" in out
    assert "--min-saving requires 50%" in out and "--min-saving 0" in out
    out, _ = verb("config", "pick", prices, "--memory-gib", "8", "--gpus", "1", "--min-saving", "0")
    assert "pick: gpu in a" in out


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--memory-gib", "65"], "no instance has 65.0 GiB of memory; the largest is large in a with 64.0 GiB", "add"),
        (
            ["--memory-gib", "64.01"],
            "no instance has 64.1 GiB of memory; the largest is large in a with 64.0 GiB",
            "add",
        ),
        (
            ["--memory-gib", "1", "--gpus", "2"],
            "no instance has at least 2 GPUs; the largest number is 1",
            "lower --gpus",
        ),
        (["--memory-gib", "1", "persia.yml"], "FILE and --set are not allowed with --memory-gib", ""),
    ],
)
def test_mistakes_of_the_verb(verb: Verb, prices: str, words: list[str], message: str, hint: str) -> None:
    errors = verb("config", "pick", prices, *words, code=2)[1]
    assert message in errors and hint in errors


def test_without_a_configuration_and_without_a_table(tmp_path: Path, verb: Verb, prices: str) -> None:
    (tmp_path / "persia.yml").unlink()
    assert "--memory-gib 16" in verb("config", "pick", prices, code=2)[1]
    assert "none.csv: No such file" in verb("config", "pick", "none.csv", "--memory-gib", "1", code=1)[1]
