"""B11, a peer: FastAPI with a model with ``nn.EmbeddingBag``. Usage: ``serving_peers.py FOLDER PORT``.

benches/serving.py writes ``model.pt2``, ``weights.pt`` and ``spec.json`` to the folder. This program needs torch, and
the packages of requirements/serving-peers.in.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


class Ranker:
    """The model: a table for each id column, mean pooling for the bag, and the exported dense part."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        spec = json.loads((folder / "spec.json").read_text())
        self.ids, self.bag, self.floats = spec["ids"], spec["bag"], spec["floats"]
        self.mean, self.std = (torch.tensor(spec[name]) for name in ("mean", "std"))
        weights = torch.load(folder / "weights.pt", weights_only=True)
        self.tables = torch.nn.ModuleDict(
            {name: torch.nn.EmbeddingBag.from_pretrained(weights[name], mode="sum") for name in [*self.ids, self.bag]}
        )
        self.dense: Any = torch.export.load(folder / "model.pt2").module()

    @torch.inference_mode()
    def score(self, records: list[dict[str, Any]]) -> list[float]:
        """Return the scores of records."""
        vectors = [self.tables[name](torch.tensor([[row[name]] for row in records])) for name in self.ids]
        lengths = torch.tensor([0, *(len(row[self.bag]) for row in records[:-1])])
        flat = torch.tensor([value for row in records for value in row[self.bag]], dtype=torch.int64)
        vectors.append(self.tables[self.bag](flat, lengths.cumsum(0)))
        floats = torch.tensor([[row[name] for name in self.floats] for row in records], dtype=torch.float32)
        output = self.dense([(floats - self.mean) / self.std], vectors)
        found: list[float] = torch.sigmoid(output)[:, 0].tolist()
        return found


def fastapi(folder: Path, port: int) -> None:
    """Serve with FastAPI and uvicorn, with records declared by pydantic."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import create_model

    ranker = Ranker(folder)
    types: dict[str, Any] = {**dict.fromkeys(ranker.ids, (int, ...)), ranker.bag: (list[int], ...)}
    types |= dict.fromkeys(ranker.floats, (float, ...))
    record = create_model("Record", **types)
    app = FastAPI()

    def score(records: list[Any]) -> dict[str, list[float]]:
        return {"scores": ranker.score([each.model_dump() for each in records])}

    score.__annotations__["records"] = list[record]  # type: ignore[valid-type]
    app.post("/score")(score)
    uvicorn.run(app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning")


if __name__ == "__main__":
    fastapi(Path(sys.argv[1]), int(sys.argv[2]))
