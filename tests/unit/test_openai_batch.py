"""Batch files of OpenAI's API for embeddings: what is answered, what is refused, and in which words."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from nimble_jobs.data import BadRecord
from nimble_jobs.data.answers import Answers, Requests
from nimble_jobs.models.build import build
from nimble_jobs.spec.model import ModelSpec
from tests.cli import Cli
from tests.text_models import TEXTS, write_bert

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("model") / "m")


def request(custom_id: Any, given: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "mini", "input": given, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}


def job(folder: Path, model: Path, lines: Sequence[Any], *, name: str = "in.jsonl", **output: Any) -> Path:
    """A job over these lines, objects or bytes. Shards of 3 texts, two buckets, normalised means."""
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    spec = {
        "version": 1,
        "name": "batch",
        "kind": "score",
        "model": {"source": f"transformers:{model}"},
        "input": {"source": name, "format": "openai-batch", "text": {"buckets": [8, 24]}},
        "schedule": {"on_miss": "eager"},
        "output": {
            "path": "out", "format": "openai-batch", "fields": ["id", "embedding"], "pooling": "mean",
            "normalize": True, "shard_size": 3, "if_exists": "replace", **output,
        },
        "run": {"device": "cpu", "error_threshold": -1},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(spec))
    return folder / "job.yaml"


def answers(cli: Cli, path: Path, *more: str) -> list[dict[str, Any]]:
    """The lines of all shards, in order."""
    answer = cli("run", str(path), *more)
    assert answer.code == 0, answer.err
    parts = sorted((path.parent / "out").glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def errors(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out" / "errors.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ids_of(model: Path, text: str) -> list[int]:
    found: list[int] = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return found


def vector(model: Path, ids: list[int]) -> np.ndarray:
    """The normalised mean of one text alone."""
    with torch.no_grad():
        made = build(ModelSpec(source=f"transformers:{model}"))(input_ids=torch.tensor([ids]))
    mean = made["last_hidden_state"][0].mean(dim=0)
    found: np.ndarray = (mean / mean.norm()).numpy()
    return found


def test_fields_need_not_be_named(cli: Cli, model: Path, tmp_path: Path) -> None:
    """The only ones that answers can have are the default."""
    path = job(tmp_path, model, [request("a", TEXTS[0])])
    spec = json.loads(path.read_text())
    del spec["output"]["fields"]
    path.write_text(json.dumps(spec))
    (line,) = answers(cli, path)
    assert len(line["response"]["body"]["data"][0]["embedding"]) == 16
    (found,) = cli("ls", "--json").json
    assert cli("show", found["id"], "--json").json["spec"]["output"]["fields"] == ["id", "embedding"]


def test_every_kind_of_input_is_answered(cli: Cli, model: Path, tmp_path: Path) -> None:
    """One text, several, tokens, lists of tokens: a line each, in the order of the input, with its tokens counted."""
    tokens = [ids_of(model, text) for text in TEXTS]
    path = job(
        tmp_path,
        model,
        [
            request("a", TEXTS[0], user="u"),
            request("b", TEXTS),
            b"  ",
            request("c", tokens[1], encoding_format="float", user=None),
            request("d", tokens),
            request("é", TEXTS[2:], encoding_format="base64"),
        ],
    )
    found = answers(cli, path)
    assert [line["custom_id"] for line in found] == ["a", "b", "c", "d", "é"]
    assert errors(tmp_path) == []
    expected = [tokens[:1], tokens, tokens[1:2], tokens, tokens[2:]]
    for line, given in zip(found, expected, strict=True):
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        response = line["response"]
        assert response["status_code"] == 200
        body = response["body"]
        assert (body["object"], body["model"]) == ("list", "mini")
        used = sum(map(len, given))
        assert body["usage"] == {"prompt_tokens": used, "total_tokens": used}
        assert [(item["object"], item["index"]) for item in body["data"]] == [
            ("embedding", i) for i in range(len(given))
        ]
        for item, ids in zip(body["data"], given, strict=True):
            made = item["embedding"]
            if isinstance(made, str):
                made = np.frombuffer(base64.b64decode(made), dtype="<f4")
            np.testing.assert_allclose(made, vector(model, ids), rtol=1e-4, atol=1e-5)
    assert len({line["id"] for line in found} | {line["response"]["request_id"] for line in found}) == 10
    assert answers(cli, path) == found


def test_dimensions_shorten_vectors(cli: Cli, model: Path, tmp_path: Path) -> None:
    """And scale them to length 1 again. More than the model has is an error of that request alone."""
    lines = [request("a", TEXTS, dimensions=5), request("b", TEXTS[0], dimensions=17), request("c", TEXTS[0])]
    found = answers(cli, job(tmp_path, model, lines))
    assert [line["custom_id"] for line in found] == ["a", "c"]
    for item, text in zip(found[0]["response"]["body"]["data"], TEXTS, strict=True):
        plain = vector(model, ids_of(model, text))[:5]
        np.testing.assert_allclose(item["embedding"], plain / np.linalg.norm(plain), rtol=1e-4, atol=1e-5)
    (error,) = errors(tmp_path)
    assert error["response"]["body"]["error"]["param"] == "dimensions"
    expected = "body.dimensions: is 17; expected at most 16, the length of the model's embeddings"
    assert error["response"]["body"]["error"]["message"] == expected
    answer = cli("run", str(tmp_path / "job.yaml"), "run.error_threshold=0")
    assert answer.code == 100
    assert "1 of 3 requests are bad" in answer.err
    assert f"b: {tmp_path}/in.jsonl:2: {expected}" in answer.err  # the job's owner is told the place


LINES: dict[str, tuple[Any, str, str | None, str]] = {
    "no JSON": (b'{"custom_id": ', "line", None, "is not JSON ("),
    "not UTF-8": (b'{"custom_id": "\xff"}', "line", None, "is not JSON (is not UTF-8"),
    "nested too deeply": (b"[" * 100_000, "line", None, "is not JSON ("),
    "a list": ([1], "line", None, "is a list; expected an object"),
    "no custom_id": ({"method": "POST"}, "custom_id", None, "is missing; expected text that is not empty"),
    "a number for custom_id": (request(7, "a"), "custom_id", None, "is 7; expected text that is not empty"),
    "a long custom_id": (request("x" * 513, "a"), "custom_id", None, "has 513 characters; expected at most 512"),
    "half a character": (
        b'{"custom_id": "\\ud800"}', "custom_id", None, "holds half of a surrogate pair, which is no character",
    ),
    "the custom_id of another": (
        request("good", "a"), "custom_id", "good",
        "'good' is already used in line 1; expected a different one for each request",
    ),
    "another method": ({**request("r", "a"), "method": "GET"}, "method", "r", 'is "GET"; expected POST'),
    "another url": (
        {**request("r", "a"), "url": "/v1/chat/completions"}, "url", "r",
        'is "/v1/chat/completions"; expected /v1/embeddings',
    ),
    "no body": ({**request("r", "a"), "body": None}, "body", "r", "is missing; expected an object"),
    "no model": (request("r", "a", model=None), "body.model", "r", "is missing; expected the model's name"),
    "half a character as model": (
        b'{"custom_id": "half", "method": "POST", "url": "/v1/embeddings", "body": {"model": "\\ud800", "input": "a"}}',
        "body.model", "half", "holds half of a surrogate pair, which is no character",
    ),
    "no input": (request("r", None), "body.input", "r", "is missing; expected text, a list of texts, or token ids"),
    "empty text": (request("r", ""), "body.input", "r", "is empty; expected text"),
    "no texts": (request("r", []), "body.input", "r", "is an empty list; expected at least one text or token id"),
    "one empty text": (request("r", ["a", ""]), "body.input[1]", "r", "is empty; expected text"),
    "texts and tokens": (request("r", ["a", [1]]), "body.input[1]", "r", "holds a list; expected text"),
    "tokens and texts": (request("r", [[1], "a"]), "body.input[1]", "r", 'is "a"; expected a list of token ids'),
    "tokens and text": (request("r", [5, "a"]), "body.input[1]", "r", 'is "a"; expected a token id, as the first'),
    "tokens and null": (request("r", [5, 6, None]), "body.input[2]", "r", "is null; expected a token id, as the first"),
    "lists and null": (request("r", [[5], None]), "body.input[1]", "r", "is null; expected a list of token ids"),
    "null and text": (request("r", [None, "a"]), "body.input[0]", "r", "is null; expected text, a token id, or a list"),
    "true and tokens": (request("r", [True, 5]), "body.input[0]", "r", "is true; expected text, a token id, or a list"),
    "a late negative token": (
        request("r", [[3, 4], [3, 4, -1]]), "body.input[1]", "r",
        "holds -1; expected token ids, whole numbers from 0, also for entry 2",
    ),
    "a number": (request("r", 7), "body.input", "r", "is 7; expected text, a list of texts, or token ids"),
    "true for a token": (request("r", [[1, True]]), "body.input[0]", "r", "holds true; expected token ids"),
    "a negative token": (request("r", [3, -1]), "body.input", "r", "holds -1; expected token ids, whole numbers"),
    "a token of no word": (request("r", [3, 40]), "body.input", "r", "holds the token id 40; expected ids below 40"),
    "too many texts": (request("r", ["a"] * 2049), "body.input", "r", "has 2049 entries; expected at most 2048"),
    "a long text": (
        request("r", ["a", "cat", "dog " * 70]), "body.input[2]", "r", "has more than 64 tokens",
    ),
    "too many tokens": (request("r", [5] * 65), "body.input", "r", "has more than 64 tokens"),
    "an unknown encoding": (
        request("r", "a", encoding_format="hex"), "body.encoding_format", "r", 'is "hex"; expected float or base64',
    ),
    "no dimensions": (request("r", "a", dimensions=0), "body.dimensions", "r", "is 0; expected a whole number"),
    "dimensions as text": (request("r", "a", dimensions="5"), "body.dimensions", "r", 'is "5"; expected a whole num'),
    "a number for the user": (request("r", "a", user=1), "body.user", "r", "is 1; expected text"),
}  # fmt: skip


def test_each_mistake_is_told_in_the_error_file(cli: Cli, model: Path, tmp_path: Path) -> None:
    """In the API's form and in order; all others are answered."""
    lines = [request("good", TEXTS[0]), *(line for line, *_ in LINES.values()), request("last", TEXTS[1])]
    # Requests with the same id would be refused for that.
    lines = [
        {**line, "custom_id": f"r{i}"} if isinstance(line, dict) and line.get("custom_id") == "r" else line
        for i, line in enumerate(lines)
    ]
    found = answers(cli, job(tmp_path, model, lines))
    assert [line["custom_id"] for line in found] == ["good", "last"]
    told = errors(tmp_path)
    assert len(told) == len(LINES)
    for number, (name, error) in enumerate(zip(LINES, told, strict=True), start=1):
        _, where, custom_id, message = LINES[name]
        assert set(error) == {"id", "custom_id", "response", "error"}, name
        assert error["custom_id"] == (f"r{number}" if custom_id == "r" else custom_id), name
        if where.startswith("body"):
            assert error["error"] is None
            assert error["response"]["status_code"] == 400
            problem = error["response"]["body"]["error"]
            assert (problem["type"], problem["code"]) == ("invalid_request_error", None)
            assert problem["param"] == (where.partition(".")[2].partition("[")[0] or None), name
        else:
            assert error["response"] is None
            problem = error["error"]
            assert problem["code"] == {"line": "invalid_json_line"}.get(where, f"invalid_{where}"), name
        # A client knows its request by the field, or by the line if it has no custom_id of its own.
        line = f"line {number + 1}: "
        begins = {"line": line, "custom_id": f"{line}custom_id: "}.get(where, f"{where}: ")
        assert problem["message"].startswith(begins + message), (name, problem["message"])
        assert str(tmp_path) not in problem["message"], name
        assert "input.text" not in problem["message"], name  # a setting of the job


def test_no_mistake_is_tolerated_by_default(cli: Cli, model: Path, tmp_path: Path) -> None:
    """As for every format: run.error_threshold says how many may be."""
    path = job(tmp_path, model, [request("a", "cat"), request("b", "")])
    answer = cli("run", str(path), "run.error_threshold=0")
    assert answer.code == 100
    assert "in.jsonl:2: body.input: is empty; expected text" in answer.err
    answer = cli("run", str(job(tmp_path, model, [b'{"custom_id": '])), "run.error_threshold=0")
    assert f"the last one is line 1: {tmp_path}/in.jsonl:1: is not JSON (" in answer.err


def test_a_file_without_a_good_request(cli: Cli, model: Path, tmp_path: Path) -> None:
    """Nothing but errors is an output, too; a file without requests is none."""
    assert answers(cli, job(tmp_path, model, [request("a", ""), request("b", [])])) == []
    assert [error["custom_id"] for error in errors(tmp_path)] == ["a", "b"]
    answer = cli("run", str(job(tmp_path, model, [b"", b" "])))
    assert "in.jsonl: no requests; expected at least one" in answer.err
    (tmp_path / "in2.jsonl").write_text("")
    path = tmp_path / "job.yaml"
    path.write_text(path.read_text().replace('"in.jsonl"', '"*.jsonl"'))
    answer = cli("run", str(path))
    assert "found 2 batch files; expected one" in answer.err


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_requests_are_never_cut_by_shards(name: str, cli: Cli, model: Path, tmp_path: Path) -> None:
    """A request larger than a shard has one of its own; the files together hold each request once, in order."""
    sizes = [1, 1, 4, 2, 1, 1, 1, 7, 1]
    lines = [request(f"q{i}", [TEXTS[k % 4] for k in range(size)]) for i, size in enumerate(sizes)]
    found = answers(cli, job(tmp_path, model, lines, name=name))
    assert [line["custom_id"] for line in found] == [f"q{i}" for i in range(len(sizes))]
    assert [len(line["response"]["body"]["data"]) for line in found] == sizes
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    assert [len(part.read_text().splitlines()) for part in parts] == [2, 1, 2, 2, 1, 1]


def test_requests_may_become_a_table(cli: Cli, model: Path, tmp_path: Path) -> None:
    """A row for each text, named by its request and place."""
    path = job(tmp_path, model, [request("a", TEXTS[:2]), request("b", TEXTS[2]), request("c", "")], format="jsonl")
    rows = answers(cli, path)
    assert [row["id"] for row in rows] == ["a[0]", "a[1]", "b"]
    for row, text in zip(rows, TEXTS, strict=False):
        np.testing.assert_allclose(row["embedding"], vector(model, ids_of(model, text)), rtol=1e-4, atol=1e-5)
    assert [error["id"] for error in errors(tmp_path)] == ["c"]


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_a_table_leaves_out_whole_requests(cli: Cli, model: Path, tmp_path: Path, format_: str) -> None:
    """As answers do: a text of a request that cannot be answered is in no row, wherever the bad one stands. Reasons
    name place and field, since they are for the job's owner.
    """
    lines = [
        request("a", TEXTS[:2]),
        request("b", [TEXTS[0], "dog " * 70, TEXTS[1]]),
        request("c", TEXTS[2]),
        request("d", [[3, 5], [40]]),
        request("e", ["cat", ""]),
        request("f", TEXTS[3]),
    ]
    path = job(tmp_path, model, lines, format=format_)
    answer = cli("run", str(path))
    assert answer.code == 0, answer.err
    rows = [
        row
        for part in sorted((tmp_path / "out").glob(f"part-*.{format_}"))
        for row in (
            pq.read_table(part).to_pylist() if format_ == "parquet" else map(json.loads, part.read_text().splitlines())
        )
    ]
    assert [row["id"] for row in rows] == ["a[0]", "a[1]", "c", "f"]
    for row, text in zip(rows, TEXTS, strict=True):
        np.testing.assert_allclose(row["embedding"], vector(model, ids_of(model, text)), rtol=1e-4, atol=1e-5)
    long = f"{tmp_path}/in.jsonl:2: body.input[1]: has more than 64 tokens; to cut longer texts, set "
    unknown = f"{tmp_path}/in.jsonl:4: body.input[1]: holds the token id 40; expected ids below 40"
    empty = f"{tmp_path}/in.jsonl:5: body.input[1]: is empty; expected text"
    told = [(error["id"], error["reason"].removesuffix("input.text.truncate: end")) for error in errors(tmp_path)]
    assert told == [*((f"b[{i}]", long) for i in range(3)), ("d[0]", unknown), ("d[1]", unknown), ("e", empty)]


def test_a_table_has_embeddings_of_one_length(cli: Cli, model: Path, tmp_path: Path) -> None:
    """So a request that asks for another one is a bad one, and not given something else in silence."""
    lines = [request("a", TEXTS[0]), request("b", TEXTS[:2], dimensions=5), request("c", TEXTS[1], dimensions=5000)]
    path = job(tmp_path, model, lines, format="jsonl")
    assert [row["id"] for row in answers(cli, path)] == ["a"]
    why = (
        "; expected none, because with output.format: jsonl all embeddings have one length; to answer such requests, "
        "set output.format: openai-batch"
    )
    b, c = (f"{tmp_path}/in.jsonl:{line}: body.dimensions: is {asked}{why}" for line, asked in ((2, 5), (3, 5000)))
    assert [(error["id"], error["reason"]) for error in errors(tmp_path)] == [("b[0]", b), ("b[1]", b), ("c", c)]
    plain = {"fields": ["id", "token_count"], "pooling": None, "normalize": None}
    job(tmp_path, model, lines, format="jsonl", **plain)  # nothing that could be cut
    assert [row["id"] for row in answers(cli, path)] == ["a", "b[0]", "b[1]", "c"]


def test_requests_are_counted_as_requests(cli: Cli, model: Path, tmp_path: Path) -> None:
    """In the summary, in `show`, in JSON and in the manifest, though the model meets texts."""
    lines = [request("a", TEXTS), request("b", ["cat", "dog " * 70]), request("c", ""), request("d", "dog")]
    answer = cli("run", str(job(tmp_path, model, lines)))
    assert answer.code == 0, answer.err
    assert ": 4 requests in " in answer.err
    assert ", 2 bad, " in answer.err
    (found,) = cli("ls", "--json").json
    assert (found["records_done"], found["records_total"], found["records_bad"]) == (4, 4, 2)
    shown = cli("show", found["id"], "--json").json
    assert (shown["records_done"], shown["records_total"], shown["records_bad"]) == (4, 4, 2)
    assert shown["unit"] == "request"
    assert sum(kind["count"] for kind in shown["bad_kinds"]) == 2
    assert shown["timings"]["records_per_s"] == pytest.approx(4 / shown["timings"]["run_s"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["records"], manifest["bad"]) == (2, 2)
    words = cli("show", found["id"]).out
    assert "job.requests: 4/4 100%, 2 bad" in words
    assert "bad requests.1: " in words
    assert "job.records" not in words
    for length, texts in ((8, "3 texts"), (24, "2 texts"), (64, "0 texts")):  # of requests that are answered
        assert f"schedule.{length} tokens: {texts}, " in words
    answer = cli("run", str(job(tmp_path, model, [request("a", "cat")])))
    assert ": 1 request in " in answer.err
    (other,) = (row["id"] for row in cli("ls", "--json").json if row["id"] != found["id"])
    words = cli("show", other).out
    assert "schedule.8 tokens: 1 text, " in words


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_an_embedding_that_is_not_finite_is_an_error(encoding: str, cli: Cli, tmp_path: Path) -> None:
    """JSON has no NaN. The request counts as bad, and its error is the server's; the others are answered."""
    model = write_bert(tmp_path / "bert")
    weights = load_file(model / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][ids_of(model, "dog")[1]] = torch.inf
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    lines = [request("a", "cat"), request("b", ["cat", "dog"], encoding_format=encoding), request("c", "mat")]
    path = job(tmp_path, model, lines)
    found = answers(cli, path)
    assert [line["custom_id"] for line in found] == ["a", "c"]
    (error,) = errors(tmp_path)
    assert (error["custom_id"], error["error"], error["response"]["status_code"]) == ("b", None, 500)
    assert error["response"]["body"]["error"]["type"] == "server_error"
    answer = cli("run", str(path), "run.error_threshold=0")
    assert answer.code == 100
    assert "1 of 3 requests are bad" in answer.err
    assert f"b: {tmp_path}/in.jsonl:2: the model's embedding holds nan; expected finite numbers" in answer.err


def test_a_shard_that_fails_is_not_the_clients_fault() -> None:
    """Its requests are answered as a server does that had an error of its own, without the job's words."""
    requests = Requests(
        starts=np.array([0, 2]), lines=[1], custom_ids=["a"], models=["m"], base64=[False], dimensions=[None]
    )
    answers_ = Answers(requests, normalized=False, place=lambda _record: "/data/in.jsonl:1")
    why = "/data/in.jsonl:1: its shard 0 failed: OutOfMemory: /data/body.input: is full"
    error = answers_.error(BadRecord(index=0, id="a", reason=why))
    assert error["response"]["status_code"] == 500
    problem = error["response"]["body"]["error"]
    assert (problem["type"], problem["param"]) == ("server_error", None)
    assert "/data" not in problem["message"]
