"""Query a server with stock clients: ``triton_client.py HTTP GRPC NAME TOKEN SPEC`` prints the scores of each client.

The spec is JSON with the datatype and the values of each input. This script runs in an environment with tritonclient.
"""

import json
import sys
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http


def ask(module: Any, address: str, name: str, headers: dict[str, str], spec: dict[str, Any], **arguments: Any) -> Any:
    """Return the identity of the bundle, and the scores."""
    client = module.InferenceServerClient(address)
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(name, headers=headers)
    metadata = client.get_model_metadata(name, headers=headers)
    names = metadata["inputs"] if isinstance(metadata, dict) else metadata.inputs
    found = {each["name"] if isinstance(each, dict) else each.name for each in names}
    assert found == set(spec), found
    inputs = []
    for key, (datatype, values) in spec.items():
        tensor = module.InferInput(key, [len(values)], datatype)
        kind = {"BYTES": np.object_, "INT64": np.int64, "FP32": np.float32, "FP64": np.float64}[datatype]
        tensor.set_data_from_numpy(np.array(values, kind), **arguments)
        inputs.append(tensor)
    result = client.infer(name, inputs, request_id="7", headers=headers)
    answer = result.get_response()
    version = answer["model_version"] if isinstance(answer, dict) else answer.model_version
    scores = result.as_numpy("score")
    message = ""
    try:
        client.infer(name, inputs[1:], headers=headers)
    except tritonclient.http.InferenceServerException as error:
        message = error.message()
    assert "inputs are missing" in message
    client.close()
    return [version, scores.tolist()]


def main(http: str, grpc: str, name: str, token: str, spec: str) -> None:
    """Query over HTTP with binary tensors, over HTTP with JSON, and over gRPC."""
    given, bearer = json.loads(spec), f"Bearer {token}"
    sys.stdout.write(
        json.dumps(
            [
                ask(tritonclient.http, http, name, {"Authorization": bearer}, given),
                ask(tritonclient.http, http, name, {"Authorization": bearer}, given, binary_data=False),
                ask(tritonclient.grpc, grpc, name, {"authorization": bearer}, given),
            ]
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
