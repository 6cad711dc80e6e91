"""Checks of the keys for operators: several ranks on a network, and spot instances."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from persia.config.block import Block
from persia.config.checker import Checker
from persia.config.operations import CompressionBlock, FsdpBlock, MemoryBlock
from persia.runtime.files import shown_url


class Operations(Checker):
    """Checks the blocks of :mod:`persia.config.operations`, and ``nccl``."""

    def check(self) -> None:
        """Report keys that contradict each other, or have no effect."""
        dist: Mapping[str, Any] = self._values.get("dist") or {}
        self._check_nccl(dist)
        self._check_regions(dist)
        self._check_compression(dist)
        self._check_spot()
        # The folder of a run has a copy of the file with all defaults. Therefore, defaults must not cause warnings.
        if self._values.get("parallel") == "ddp":
            self._check_effect("fsdp", FsdpBlock, "`parallel: fsdp`", ("reshard_after_forward",))
        if (self._values.get("memory") or {}).get("leaks") is False:
            self._check_effect("memory", MemoryBlock, "`leaks: true`", ("limit_mb",))

    def _check_effect(self, path: str, block: type[Block], needs: str, keys: Sequence[str]) -> None:
        """Warn about keys that have no effect, unless they have their defaults."""
        values: Any = self._values
        for key in path.split("."):
            values = (values or {}).get(key)
        for key in keys:
            if values is not None and values[key] != block.model_fields[key].default:
                self._warn(f"{path}.{key}", f"has no effect without {needs}")

    def _check_nccl(self, dist: Mapping[str, Any]) -> None:
        """Check that settings of NCCL are used only with NCCL."""
        nccl = self._node("nccl")
        if dist.get("backend") == "gloo" and nccl is not None and not nccl.is_null:
            self._warn("nccl", "has no effect with `dist.backend: gloo`: remove one of them")
        given = self._values.get("nccl") or {}
        if given.get("debug_subsys") is not None and given.get("debug") is None:
            self._warn("nccl.debug_subsys", "has no effect without nccl.debug")

    def _check_regions(self, dist: Mapping[str, Any]) -> None:
        """Check that each rank is in at most one region. Missing ranks are detected when the ranks start."""
        regions = dist.get("regions")
        if regions is None:
            return
        seen: dict[int, str] = {}
        for name, ranks in sorted(regions.items()):
            path = f"dist.regions.{name}"
            if not ranks:
                self._error(path, "found no ranks; allowed: at least one")
            for rank in ranks or ():
                if rank < 0:
                    self._error(path, f"found rank {rank}; ranks are counted from 0")
                elif rank in seen:
                    where = "listed twice" if seen[rank] == name else f"in region `{seen[rank]}` too"
                    self._error(path, f"rank {rank} is {where}; allowed: one region for each rank")
                seen[rank] = name
        if not regions:
            self._error("dist.regions", "found no regions; allowed: at least one, such as `{east: [0, 1]}`")
        if self._values.get("parallel") == "fsdp":
            self._error(
                "dist.regions", "found together with `parallel: fsdp`, which shards the gradients: remove one of them"
            )

    def _check_compression(self, dist: Mapping[str, Any]) -> None:
        """Check that compression gets whole gradients, and that PowerSGD is not used with regions."""
        block = dist.get("compression")
        if not block:
            return
        path = "dist.compression"
        if self._values.get("parallel") == "fsdp":
            self._error(path, "found together with `parallel: fsdp`, which shards the gradients: remove one of them")
        if block["name"] == "powersgd":
            if dist.get("regions"):
                self._error(path, "found `powersgd` together with dist.regions; allowed: one of them, or fp16, bf16")
            return
        self._check_effect(path, CompressionBlock, "`name: powersgd`", ("rank", "start_iter"))

    def _check_spot(self) -> None:
        """Check that addresses use HTTP, and that a volatile price makes checkpoints more frequent."""
        for block, key in (("spot", "url"), ("spot", "token_url"), ("price", "url")):
            given = (self._values.get(block) or {}).get(key)
            if given is not None and not _is_address(given):
                allowed = "a complete http:// or https:// address, without spaces, such as http://169.254.169.254/path"
                self._error(f"{block}.{key}", f"found `{shown_url(given)}`, allowed: {allowed}")
        every = (self._values.get("checkpoint") or {}).get("every")
        often = (self._values.get("price") or {}).get("checkpoint_every")
        if every is not None and often is not None and often >= every:
            message = f"found {often}, which has no effect, because checkpoint.every is {every}"
            self._warn("price.checkpoint_every", message)


def _is_address(text: str) -> bool:
    """Whether this is an HTTP URL."""
    try:
        parts = urlsplit(text)
        has_port = parts.port is None or parts.port > 0
    except ValueError:  # such as unbalanced brackets, or a port that is not a number
        return False
    written = text.isascii() and text.isprintable() and " " not in text
    return written and has_port and parts.scheme in ("http", "https") and bool(parts.hostname)
