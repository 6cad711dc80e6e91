"""``persia config sizing``: the memory of the pods of a job on Kubernetes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Verb
from trainer_files import config_of

from persia.trainer import pod_memory, sizing

MIB = 1 << 20


def patches(text: str) -> dict[str, dict[str, int]]:
    """Return the memory of each workload of a patch, in MiB."""
    found: dict[str, dict[str, int]] = {}
    for document in yaml.safe_load_all(text):
        (only,) = document["spec"]["template"]["spec"]["containers"]
        assert only["name"] == document["metadata"]["name"]
        resources: dict[str, Any] = only["resources"]
        values = {key: resources[key]["memory"] for key in ("requests", "limits")}
        assert all(re.fullmatch(r"[1-9]\d*Mi", value) for value in values.values())
        found[only["name"]] = {key: int(value[:-2]) for key, value in values.items()}
    return found


def test_the_memory_of_pods_is_that_of_the_estimate(tmp_path: Path) -> None:
    config = config_of(tmp_path, features={"id0": {"type": "id", "dim": 4}}, data={"batch_size": 64})
    estimated = sizing.of_config(config, sizing.Place(2, ranks=4))
    found, pods = pod_memory.pods_of(config, 2, 2, 2)
    assert found.server == estimated.server > 0 and found.batches == estimated.batches
    sizes = {pod.name: pod for pod in pods}
    assert list(sizes) == ["server", "middleware", "trainer", "data-compose"]
    server, trainer = sizes["server"], sizes["trainer"]
    assert (server.request - pod_memory.SERVER_BASE) * sizing.FULL == pytest.approx(estimated.server, abs=1)
    assert server.limit - server.request == estimated.server, "a checkpoint may copy every row"
    assert trainer.request * sizing.FULL == pytest.approx(2 * estimated.trainer, abs=1), "two ranks in each pod"
    assert sizes["middleware"].request - pod_memory.MIDDLEWARE_BASE == 4 * estimated.batches
    assert all(pod.limit > pod.request for pod in pods)


def test_more_servers_have_fewer_rows_each(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    one, four = (pod_memory.pods_of(config, servers, 1, 1)[0].server for servers in (1, 4))
    assert four == -(-one // 4)


def test_the_verb_prints_a_patch(tmp_path: Path, verb: Verb) -> None:
    config_of(tmp_path)
    path = str(tmp_path / "persia.yml")
    output, _ = verb("config", "sizing", path, "--servers", "3", "--trainers", "2", "--ranks", "4")
    assert re.match(r"# [1-9][\d,]* rows on 3 servers, \d.* each; 8 ranks, \d.* each\.\n", output), output
    found = patches(output)
    _, pods = pod_memory.pods_of(config_of(tmp_path), 3, 2, 4)
    assert found == {pod.name: {"requests": -(-pod.request // MIB), "limits": -(-pod.limit // MIB)} for pod in pods}


def test_the_patch_replaces_a_file_only_without_an_error(tmp_path: Path, verb: Verb) -> None:
    config_of(tmp_path)
    path, sizing_yaml = str(tmp_path / "persia.yml"), tmp_path / "sizing.yaml"
    sizing_yaml.write_text("# of the last time\n")
    command = ("config", "sizing", path, "--out", str(sizing_yaml))
    _, errors = verb(*command, "--set", "data.train=/data/none-*.parquet", code=2)
    assert "/data/none-*.parquet" in errors and "sizing.yaml" not in errors
    assert sizing_yaml.read_text() == "# of the last time\n"
    output, _ = verb(*command)
    assert output.strip().endswith(f"The patch is in {sizing_yaml}")
    assert sizing_yaml.read_text() == verb("config", "sizing", path)[0]
    assert [each.name for each in tmp_path.glob("*sizing*")] == ["sizing.yaml"]
    _, errors = verb("config", "sizing", path, "--out", str(tmp_path / "missing" / "sizing.yaml"), code=1)
    assert "cannot write the patch to " in errors and "missing/sizing.yaml: No such file or directory" in errors
