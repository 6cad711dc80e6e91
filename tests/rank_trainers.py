"""Trainers of several ranks, each of which is started separately."""

import json
from typing import Any

from conftest import ROOT
from stack import Part, Stack

SCRIPT = ROOT / "tests" / "integration" / "rank_script.py"
COLLECTION = ROOT / "tests" / "integration" / "collection_script.py"


def nodes(stack: Stack, plan: dict[str, Any], count: int = 2, **env: str) -> list[Part]:
    """Start one trainer replica for each rank, because a launcher would end its other ranks."""
    return [stack.trainer(SCRIPT, json.dumps(plan), node=node, nodes=count, env=env) for node in range(count)]
