"""GPUs in containers: the doctor and the page name the stanzas that the compose file and the manifests have."""

import re
from typing import Any

import pytest
import yaml
from conftest import ROOT, Verb

from persia.doctor import gpu

pytestmark = pytest.mark.clone


def page() -> str:
    """Return the page about GPUs."""
    return (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")


def compose(name: str) -> dict[str, Any]:
    """Return the services of a compose file."""
    content = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    services: dict[str, Any] = content["services"]
    return services


def layers() -> dict[str, str]:
    """Return the rows of the page's table by their first cell."""
    section = page().partition("\n## The driver, and containers\n")[2].partition("\n## ")[0]
    return {row[1]: row[0] for row in re.finditer(r"^\| ([^|]+) \|.*\|$", section, re.MULTILINE)}


@pytest.mark.row("S4-16")
def test_compose_gives_devices_by_the_stanza_that_the_doctor_names() -> None:
    named = yaml.safe_load(gpu.STANZA)["deploy"]["resources"]["reservations"]["devices"]
    overlay = compose("docker-compose.gpu.yaml")
    given = {name: each.get("deploy", {}).get("resources", {}).get("reservations") for name, each in overlay.items()}
    assert given == {"trainer": {"devices": named}}, "and no other service has a GPU"
    assert "GPU_NUM" in overlay["trainer"]["environment"], "the ranks of a container"
    assert gpu.OVERLAY in page()


@pytest.mark.row("S4-16")
def test_the_page_says_how_each_layer_is_provided_and_checked(verb: Verb) -> None:
    found = layers()
    assert [*found][-4:] == ["driver of the host", "Docker", "compose", "Kubernetes"]
    assert "nvidia-smi" in found["driver of the host"] and "nvidia-container-toolkit" in found["Docker"]
    image = compose("docker-compose.yaml")["trainer"]["image"]
    (checked,) = re.findall(r"docker run --rm --gpus all (\S+) nvidia-smi", found["Docker"])
    assert checked == re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", image)
    assert "docker-compose.gpu.yaml" in found["compose"]
    limits = re.search(r"`resources: (\{.*?\}\})`", found["Kubernetes"])
    assert limits is not None
    component = (ROOT / "deploy" / "kubernetes" / "gpu" / "kustomization.yaml").read_text(encoding="utf-8")
    (patch,) = yaml.safe_load(component)["patches"]
    (container,) = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["containers"]
    assert yaml.safe_load(limits[1])["limits"].keys() == container["resources"]["limits"].keys()
    for name in ("compose", "Kubernetes"):
        assert "persia doctor --only gpu`" in found[name]
    assert "gpu" in verb("doctor", "--only", "gpu")[0]
