"""HTTP requests to a serving process: scores, the Open Inference Protocol, refusals, metrics."""

import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_model import SmallModel
from serving_process import Client, Serving, serving, write_bundle
from waiting import wait_until

RECORDS = [
    {"user": 3, "site": "a", "tags": [1, 2], "price": 0.5},
    {"user": 4, "site": "b", "tags": [], "price": -1.25},
    {"user": 5, "site": "ü", "tags": [7], "price": 2},
]
MODEL = SmallModel(2.0)
SCORES = MODEL.scores(RECORDS)
INPUTS: list[dict[str, Any]] = [
    {"name": "user", "shape": [3], "datatype": "INT64", "data": [3, 4, 5]},
    {"name": "site", "shape": [3, 1], "datatype": "BYTES", "data": ["a", "b", "ü"]},
    {"name": "tags", "shape": [3], "datatype": "INT64", "data": [1, 2, 7]},
    {"name": "tags.offsets", "shape": [4], "datatype": "INT64", "data": [0, 2, 2, 3]},
    {"name": "price", "shape": [3], "datatype": "FP32", "data": [0.5, -1.25, 2]},
]
INFER = "/v2/models/small/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serving")
    with serving(write_bundle(folder / "bundle", 2.0), folder / "log", request_rows=1000, body_bytes=100_000) as found:
        yield found


@pytest.fixture
def client(server: Serving) -> Client:
    return server.client()


@pytest.mark.parametrize(
    "body",
    [
        RECORDS,
        {"records": RECORDS},
        {"shared": {"user": 3}, "candidates": [{k: v for k, v in RECORDS[0].items() if k != "user"}]},
    ],
    ids=["list", "records", "candidates"],
)
def test_scores_of_records_are_those_of_the_bundle_that_is_named(client: Client, body: Any) -> None:
    status, headers, content = client.score(body)
    assert (status, headers["persia-bundle"]) == (200, "small-2")
    assert content == {"bundle": "small-2", "scores": SCORES[: 1 if "candidates" in body else 3]}


def test_unusual_values_are_counted_in_the_answer(client: Client) -> None:
    _, _, content = client.score([{"user": 3, "site": "a", "tags": [1, 2], "price": "x"}, {**RECORDS[1], "site": None}])
    assert content["unusual"] == {"price": {"wrong_type": 1}, "site": {"null": 1}}


def test_no_rows_have_no_scores(client: Client) -> None:
    assert client.score([])[2]["scores"] == []
    assert client.score({"shared": {"user": 1}, "candidates": []})[2]["scores"] == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "expected a list of records"),
        (b"[{}]x", "not JSON"),
        (b'"text"', "expected a list of records"),
        (b"[" * 50_000, "not JSON"),
        (b'{"a": ' * 10_000, "not JSON"),
        (b'{"rows": []}', "keys rows: expected a list"),
        (b'{"shared": 1, "candidates": []}', "expected a list of records"),
        (b'{"shared": {"user": 1}, "candidates": [{"user": 2}]}', "columns in both shared and a candidate: user"),
        (b'[{"usr": 1}]', "no record has a column of the model, which takes user, site, tags, price"),
        (b'[{"user": 1}, 2]', "expected"),
    ],
)
def test_an_invalid_body_is_refused_with_the_reason(client: Client, body: bytes, message: str) -> None:
    status, _, content = client.score(body)
    assert status == 400 and message in content["error"], content
    assert client.score(RECORDS)[2]["scores"] == SCORES  # by the same connection


def test_what_is_too_large_is_refused(client: Client, server: Serving) -> None:
    status, _, content = client.score([{"user": 1}] * 1001)
    assert (status, content["error"]) == (413, "the request has 1001 rows, the limit is 1000")
    status, _, content = client.score(b"x" * 100_001)
    assert (status, content["error"]) == (413, "the request has 100001 bytes, the limit is 100000")
    chunks = ({"Transfer-Encoding": "chunked"}, b"186a1\r\n" + b"x" * 100_001 + b"\r\n0\r\n\r\n")
    connection = server.connect()
    connection.sendall(b"POST /score HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunks[1])
    assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/score", 405),
        ("POST", "/v2", 405),
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/small/versions/small-3", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("GET", "/v2/models/small/a/b/c", 404),
        ("GET", "/v2/health/nothing", 404),
        ("GET", "/v2/models/small/versions/small-2/ready", 200),
        ("GET", "/v2/models/small/ready", 200),
        ("GET", "/v2/health/live", 200),
        ("GET", "/v2/health/ready", 200),
        ("HEAD", "/v2/health/ready", 200),
    ],
)
def test_paths_and_methods(client: Client, method: str, path: str, status: int) -> None:
    found, _, content = client.ask(method, path)
    assert found == status, content
    assert status == 200 or content["error"]


def test_metadata_names_the_tensors(client: Client) -> None:
    assert client.ask("GET", "/v2")[2]["extensions"] == ["binary_tensor_data"]
    _, _, content = client.ask("GET", "/v2/models/small")
    assert content["versions"] == ["small-2"]
    assert {each["name"]: (each["datatype"], each["shape"]) for each in content["inputs"]} == {
        each["name"]: (each["datatype"], [-1]) for each in INPUTS
    }
    assert content["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]


@pytest.mark.parametrize("path", [INFER, "/v2/models/small/versions/small-2/infer"])
def test_tensors_as_json(client: Client, path: str) -> None:
    status, headers, content = client.ask("POST", path, json.dumps({"id": "7", "inputs": INPUTS}))
    assert (status, headers["persia-bundle"]) == (200, "small-2")
    assert content == {
        "id": "7", "model_name": "small", "model_version": "small-2",
        "outputs": [{"name": "score", "datatype": "FP32", "shape": [3], "data": SCORES}],
    }  # fmt: skip


def test_binary_tensors(client: Client) -> None:
    texts = b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in ("a", "b", "ü"))
    raws = [struct.pack("<3q", 3, 4, 5), texts, struct.pack("<3q", 1, 2, 7), struct.pack("<4q", 0, 2, 2, 3)]
    raws.append(struct.pack("<3f", 0.5, -1.25, 2))
    tensors = [
        {**{key: value for key, value in each.items() if key != "data"}, "parameters": {"binary_data_size": len(raw)}}
        for each, raw in zip(INPUTS, raws, strict=True)
    ]
    outputs = [{"name": "score", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": tensors, "outputs": outputs}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    status, headers, content = client.ask("POST", INFER, head + b"".join(raws), length)
    assert status == 200, content
    split = int(headers["inference-header-content-length"])
    assert json.loads(content[:split])["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert [*struct.unpack("<3f", content[split:])] == SCORES
    status, _, content = client.ask("POST", INFER, head + b"".join(raws) + b"x", length)
    size = sum(map(len, raws))
    message = f"the number of bytes after the JSON is {size + 1}, expected {size}: the sum of binary_data_size"
    assert (status, content["error"]) == (400, message)


def valid(name: str, marks: list[Any], datatype: str = "BOOL") -> dict[str, Any]:
    """Return the tensor that marks the missing values of a column."""
    return {"name": f"{name}.valid", "shape": [len(marks)], "datatype": datatype, "data": marks}


def replaced(index: int, **keys: Any) -> list[dict[str, Any]]:
    return [{**each, **keys} if at == index else each for at, each in enumerate(INPUTS)]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (INPUTS[:4], "inputs are missing: price; the model takes user, site, tags, price"),
        ([*INPUTS, {**INPUTS[0], "name": "usr"}], "usr: no such input; did you mean user?"),
        ([*INPUTS, INPUTS[0]], "user: the input is given twice"),
        (replaced(0, data=[3, 4]), "user: the number of values is 2, expected 3 for shape [3]"),
        (replaced(0, shape=[2], data=[3, 4]), "different numbers of rows: user 2"),
        (replaced(0, data=[3, 4, 5.5]), "user: data is not INT64"),
        (replaced(0, data=[3, 4, 2**63]), "user: data is not INT64"),
        (replaced(0, data=[[3, 4], 5]), "user: data mixes lists and values"),
        (replaced(0, datatype="INT65"), "user: datatype 'INT65'"),
        (replaced(0, shape=[-1]), "user: shape [-1]"),
        (replaced(0, shape=[2**60]), "user: shape"),
        (replaced(1, data=["a", 1, "b"]), "site: data is not BYTES"),
        (replaced(3, data=[0, 2, 1, 3]), "tags.offsets: expected offsets that start at 0, never decrease"),
        (replaced(3, data=[0, 2, 2, 4]), "tags.offsets: expected offsets that start at 0, never decrease"),
        (replaced(3, shape=[3], data=[0, 2, 3]), "different numbers of rows"),
        ([*INPUTS, valid("user", [1, 0, 1], "INT8")], "user.valid: INT8 [3], expected BOOL [3]: false for each"),
        ([*INPUTS, valid("tags", [True])], "tags.valid: BOOL [1], expected BOOL [3]: false for each"),
        ([*INPUTS, valid("user", [True, None, True])], "user.valid: BOOL [3] with nulls, expected BOOL [3]: false"),
        ([*INPUTS, valid("usr", [True] * 3)], "usr.valid: no such input; did you mean user.valid?"),
        (replaced(4, parameters={"shared_memory_region": "x"}), "price: shared memory is not supported"),
        (replaced(4, parameters={"binary_data_size": 4}), "binary_data_size is 4, expected an integer from 0 to 0"),
        (7, "the request: expected a JSON object with the list 'inputs'"),
    ],
)
def test_invalid_tensors_are_refused_with_the_reason(client: Client, inputs: Any, message: str) -> None:
    status, _, content = client.ask("POST", INFER, json.dumps({"inputs": inputs}))
    assert status == 400 and message in content["error"], content


def test_an_output_that_is_named_twice_is_refused_before_rows_are_scored(client: Client, server: Serving) -> None:
    rows = server.metric("persia_serving_rows_total")
    status, _, content = client.ask("POST", INFER, json.dumps({"inputs": INPUTS, "outputs": [{"name": "score"}] * 2}))
    assert (status, content["error"]) == (400, "outputs: 'score' is listed twice")
    assert server.metric("persia_serving_rows_total") == rows


def test_ten_unknown_tensors_are_named(client: Client) -> None:
    many = [{**INPUTS[0], "name": f"x{number}"} for number in range(30)]
    status, _, content = client.ask("POST", INFER, json.dumps({"inputs": many}))
    assert status == 400 and content["error"].count("no such input") == 10, content
    assert content["error"].endswith("; and 20 more")


def test_a_missing_number_is_null(client: Client) -> None:
    _, _, content = client.ask("POST", INFER, json.dumps({"inputs": replaced(4, data=[0.5, None, 2])}))
    assert json.loads(content["parameters"]["unusual"]) == {"price": {"null": 1}}


def test_values_that_are_not_valid_are_missing(client: Client) -> None:
    names = ("user", "site", "tags", "price")
    missing = dict.fromkeys(names)
    wanted = client.score([RECORDS[0], {**RECORDS[1], **missing}, RECORDS[2]])[2]
    assert wanted["unusual"].keys() == {*names}
    whole = [each for each in INPUTS if each["name"] not in ("tags", "tags.offsets")]
    tags = [{**INPUTS[2], "data": [1, 2, 6, 7], "shape": [4]}, {**INPUTS[3], "data": [0, 2, 3, 4]}]
    marks = [valid(name, [True, False, True]) for name in names]
    _, _, found = client.ask("POST", INFER, json.dumps({"inputs": [*whole, *tags, *marks]}))
    assert found["outputs"][0]["data"] == wanted["scores"]
    assert json.loads(found["parameters"]["unusual"]) == wanted["unusual"]


def test_a_row_that_makes_the_model_fail_fails_alone(client: Client, server: Serving) -> None:
    bad: dict[str, Any] = {"user": 333, "site": None, "tags": [], "price": 0}
    bad["user"] = 333 - 10 * int(MODEL.transform([bad]).ids("site")[0][0] % 7)  # a score of 666
    status, _, content = client.score([bad])
    assert (status, content["error"]) == (500, "the model failed; the server's log has the cause")
    assert "a row that makes the model fail" in server.output
    assert client.score(RECORDS)[0] == 200


def test_metrics(client: Client, server: Serving) -> None:
    before = server.metric('persia_serving_requests_total{api="score",outcome="ok"}')
    rows = server.metric("persia_serving_rows_total")
    client.score(RECORDS)
    assert server.metric('persia_serving_requests_total{api="score",outcome="ok"}') == before + 1
    # The thread that scores counts the rows after it has returned the scores.
    wait_until("the rows to be counted", lambda: server.metric("persia_serving_rows_total") == rows + 3, 20)
    assert server.metric("persia_serving_ids_total") == 2 * server.metric("persia_serving_unseen_ids_total") > 0
    assert server.metric('persia_serving_bundle{bundle="small-2"}') == 1
    assert server.metric('persia_serving_request_duration_seconds_count{api="score"}') > before
    assert server.metric("persia_serving_waiting_bytes") == 0
    assert server.metric("process_resident_memory_bytes") > 1e6


def test_curl(server: Serving, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(RECORDS * 300))  # with Expect: 100-continue
    words = [
        "curl",
        "--silent",
        "--fail",
        "--data",
        f"@{tmp_path / 'rows.json'}",
        f"http://127.0.0.1:{server.port}/score",
    ]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE)
    assert json.loads(done.stdout)["scores"] == SCORES * 300
