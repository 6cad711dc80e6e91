"""The environment variables that the blocks ``dist`` and ``nccl`` set for the ranks."""

from pathlib import Path

from persia.config.blocks import Config
from persia.runtime.environment import Given


def variables_of(config: Config) -> dict[str, Given]:
    """Return the variables that are set before the ranks start their process group, by name."""
    dist, nccl = config.dist, config.nccl
    topology = None if nccl.topo_file is None else str(config.folder / Path(nccl.topo_file).expanduser())
    found = [
        ("dist.backend", "PERSIA_DIST_BACKEND", None if dist.backend == "auto" else dist.backend),
        ("dist.timeout_s", "PERSIA_DIST_TIMEOUT", None if dist.timeout_s is None else f"{dist.timeout_s:g}"),
        ("dist.interface", "PERSIA_SOCKET_IFNAME", dist.interface),
        ("dist.interface", "GLOO_SOCKET_IFNAME", dist.interface),
        ("nccl.debug", "NCCL_DEBUG", nccl.debug),
        ("nccl.debug_subsys", "NCCL_DEBUG_SUBSYS", nccl.debug_subsys),
        ("nccl.ib_disable", "NCCL_IB_DISABLE", None if nccl.ib_disable is None else str(int(nccl.ib_disable))),
        ("nccl.socket_ifname", "NCCL_SOCKET_IFNAME", nccl.socket_ifname),
        ("nccl.topo_file", "NCCL_TOPO_FILE", topology),
    ]
    if dist.interface is not None and nccl.socket_ifname is None:
        found.append(("dist.interface", "NCCL_SOCKET_IFNAME", f"={dist.interface}"))
    return {name: Given(key, value) for key, name, value in found if value is not None}
