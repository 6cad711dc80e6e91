"""B11, a peer: LitServe with the model of serving_peers.py. Usage: ``serving_litserve.py FOLDER PORT``."""

import os
import sys
from pathlib import Path
from typing import Any

import litserve
from fastapi import Request
from serving_peers import Ranker

BATCH = 64
"""The maximum number of requests that are scored together."""
BATCH_TIMEOUT_S = 0.002


class Api(litserve.LitAPI):  # type: ignore[misc]
    """The model, with LitServe's batching."""

    def setup(self, device: Any) -> None:
        """Load the model, in the worker."""
        del device
        self.ranker = Ranker(Path(os.environ["MODEL_FOLDER"]))

    def decode_request(self, request: Request) -> Any:
        """Return the records of a request."""
        return request

    def batch(self, inputs: list[Any]) -> Any:
        """Keep the requests of a batch apart."""
        return inputs

    def predict(self, inputs: list[list[dict[str, Any]]]) -> list[list[float]]:
        """Score the requests of a batch together."""
        scores = self.ranker.score([row for rows in inputs for row in rows])
        found, at = [], 0
        for rows in inputs:
            found.append(scores[at : at + len(rows)])
            at += len(rows)
        return found

    def unbatch(self, output: Any) -> Any:
        """Return the scores of each request."""
        return output

    def encode_response(self, output: Any) -> Any:
        """Return the response."""
        return {"scores": output}


if __name__ == "__main__":
    os.environ["MODEL_FOLDER"] = sys.argv[1]
    api = Api(max_batch_size=BATCH, batch_timeout=BATCH_TIMEOUT_S, api_path="/score")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, log_level="warning", generate_client_file=False
    )
