"""The requests of a batch file of OpenAI's API for `/v1/embeddings`: one JSON object a line, with one text or several.

A record is a text. A request that cannot be answered is one record, and a bad one. Lines without anything but white
space are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nimble_jobs.data.answers import Requests
from nimble_jobs.data.blocks import Layout
from nimble_jobs.data.ids import Ids
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.text.lines import LineFile
from nimble_jobs.data.text.values import Rows, Text, TextSource, TokenIds, Unreadable, decoded, text_of
from nimble_jobs.errors import DataError

MOST_INPUTS = 2048  # texts of one request
_LONGEST_ID = 512  # characters of a custom_id
_METHOD, _URL = "POST", "/v1/embeddings"


class Refused(ValueError):
    """Why a request cannot be answered: a field of it, and what is wrong there; of a whole line, that it `is` wrong."""

    def __init__(self, where: str, problem: str, custom_id: str | None = None) -> None:
        super().__init__(f"{where}: {problem}" if where else problem)
        self.custom_id = custom_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one line asks for."""

    custom_id: str
    model: str
    inputs: tuple[Text, ...]
    base64: bool  # whether vectors are written as base64 of float32
    dimensions: int | None  # features that are kept; None: all


class RequestTexts(TextSource):
    """The texts of all requests of a file."""

    def __init__(self, path: Path) -> None:
        """Raises DataError for a file without requests."""
        self._file = LineFile(Stamp.of(path))
        self.requests = Requests()
        self._places: dict[str, int] = {}  # the line that has a custom_id, from 1
        self._models: dict[str, str] = {}
        records, blocks = [0], [0]
        for number, lines in enumerate(self._file.scan()):
            for line, request in self._parsed(self._file.cuts[number].first, lines):
                self._note(line, request)
                records.append(records[-1] + (1 if isinstance(request, Refused) else len(request.inputs)))
            blocks.append(records[-1])
        if not len(self.requests):
            raise DataError(f"{path}: no requests; expected at least one")
        self.requests.starts = np.array(records, dtype=np.int64)
        kept = [i for i in range(len(blocks) - 1) if blocks[i] < blocks[i + 1]]
        self._blocks = kept
        layout = Layout(
            starts=np.array([*(blocks[i] for i in kept), blocks[-1]], dtype=np.int64),
            chains=np.zeros(len(kept), dtype=np.int64) if path.name.endswith(".gz") else np.arange(len(kept)),
            block_bytes=2 * max(cut.nbytes for cut in self._file.cuts),
        )
        super().__init__(self._file.stamp, layout, ids=RequestIds(self.requests, self._places), labels=None)

    def place(self, index: int) -> str:
        """FILE:LINE."""
        return f"{self.stamps[0].path}:{self.requests.lines[self.requests.of_record(index)]}"

    def field(self, index: int) -> str:
        """The field of its request that holds a text: body.input, or body.input[2] if there are several."""
        first, stop = self.requests.span(self.requests.of_record(index))
        return "body.input" if stop - first == 1 else f"body.input[{index - first}]"

    def rows(self, number: int) -> Rows:
        """The texts of a block. Raises DataError if the file has changed."""
        cut = self._blocks[number]
        lines = self._file.lines(cut)
        texts: list[Text | None] = []
        bad: dict[int, str] = {}
        for _, request in self._parsed(self._file.cuts[cut].first, lines):
            if isinstance(request, Refused):
                bad[len(texts)] = str(request)
                texts.append(None)
            else:
                texts.extend(request.inputs)
        return Rows(texts=texts, bad=bad, nbytes=2 * sum(map(len, lines)))

    def _parsed(self, first: int, lines: list[bytes]) -> Iterator[tuple[int, Request | Refused]]:
        """The requests on these lines, with their numbers, from 1. The first line with a custom_id has it."""
        for number, line in enumerate(lines, start=first + 1):
            if not line.strip():
                continue
            try:
                request: Request | Refused = parse(line)
            except Refused as e:
                request = e
            custom_id = request.custom_id
            if custom_id is not None and (other := self._places.setdefault(custom_id, number)) != number:
                why = f"{custom_id!r} is already used in line {other}; expected a different one for each request"
                request = Refused("custom_id", why, custom_id)
            yield number, request

    def _note(self, line: int, request: Request | Refused) -> None:
        known = self.requests
        known.lines.append(line)
        known.custom_ids.append(request.custom_id)
        asked = None if isinstance(request, Refused) else request
        model = asked.model if asked is not None else ""
        known.models.append(self._models.setdefault(model, model))  # one text for all lines that name it
        known.base64.append(asked is not None and asked.base64)
        known.dimensions.append(asked.dimensions if asked is not None else None)


def open_requests(paths: Sequence[Path]) -> RequestTexts:
    """The requests of a batch file. Raises DataError if there are several files: their answers are one file."""
    if len(paths) > 1:
        raise DataError(
            f"{paths[0].parent}: found {len(paths)} batch files; expected one, as each has its own file of answers"
        )
    return RequestTexts(paths[0])


class RequestIds(Ids):
    """The custom_id of each record; with [0], [1] and so on if its request has several texts, and the line if it has
    no custom_id of its own.
    """

    def __init__(self, requests: Requests, places: Mapping[str, int]) -> None:
        """`places`: the line that each custom_id belongs to."""
        super().__init__(())
        self._requests, self._places = requests, places

    def __len__(self) -> int:
        return int(self._requests.starts[-1])

    def _several(self, at: range) -> list[str]:
        return [self._one(i) for i in at]

    def _one(self, at: int) -> str:
        requests, number = self._requests, self._requests.of_record(at)
        first, stop = requests.span(number)
        custom_id = requests.custom_ids[number]
        if custom_id is None or self._places[custom_id] != requests.lines[number]:
            return f"line {requests.lines[number]}"
        return custom_id if stop - first == 1 else f"{custom_id}[{at - first}]"


def parse(line: bytes) -> Request:
    """The request on a line. Raises Refused."""
    try:
        found = json.loads(decoded(line))
    except (Unreadable, ValueError, RecursionError) as e:
        raise Refused("", f"is not JSON ({e}); expected an object") from e
    if not isinstance(found, dict):
        raise Refused("", f"{_kind(found)}; expected an object")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise Refused("custom_id", f"{_kind(custom_id)}; expected text that is not empty")
    try:
        custom_id = text_of(custom_id)
    except Unreadable as e:
        raise Refused("custom_id", str(e)) from e
    if len(custom_id) > _LONGEST_ID:
        raise Refused("custom_id", f"has {len(custom_id)} characters; expected at most {_LONGEST_ID}")
    try:
        return _request(found, custom_id)
    except Refused as e:
        e.custom_id = custom_id
        raise


def _request(found: dict[str, Any], custom_id: str) -> Request:
    for name, expected in (("method", _METHOD), ("url", _URL)):
        if found.get(name) != expected:
            raise Refused(name, f"{_kind(found.get(name))}; expected {expected}")
    body = found.get("body")
    if not isinstance(body, dict):
        raise Refused("body", f"{_kind(body)}; expected an object")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Refused("body.model", f"{_kind(model)}; expected the model's name")
    try:
        model = text_of(model)
    except Unreadable as e:
        raise Refused("body.model", str(e)) from e
    encoding = body.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise Refused("body.encoding_format", f"{_kind(encoding)}; expected float or base64")
    dimensions = body.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise Refused("body.dimensions", f"{_kind(dimensions)}; expected a whole number from 1")
    if not isinstance(body.get("user"), str | None):
        raise Refused("body.user", f"{_kind(body['user'])}; expected text")
    return Request(
        custom_id=custom_id,
        model=model,
        inputs=tuple(_inputs(body.get("input"))),
        base64=encoding == "base64",
        dimensions=dimensions,
    )


def _inputs(value: Any) -> list[Text]:
    """One text, several, the tokens of one, or those of several."""
    if isinstance(value, str):
        return [_text(value, "")]
    if not isinstance(value, list):
        raise Refused("body.input", f"{_kind(value)}; expected text, a list of texts, or token ids")
    if not value:
        raise Refused("body.input", "is an empty list; expected at least one text or token id")
    first = value[0]
    if type(first) is int:
        for i, item in enumerate(value):
            if type(item) is not int:
                raise Refused(f"body.input[{i}]", f"{_entry(item)}; expected a token id, as the first entry is one")
        return [_tokens(value, "")]
    if len(value) > MOST_INPUTS:
        raise Refused("body.input", f"has {len(value)} entries; expected at most {MOST_INPUTS}")
    if isinstance(first, str):
        return [_text(item, f"[{i}]") for i, item in enumerate(value)]
    if isinstance(first, list):
        return [_tokens(item, f"[{i}]") for i, item in enumerate(value)]
    raise Refused("body.input[0]", f"{_entry(first)}; expected text, a token id, or a list of token ids")


def _text(value: Any, which: str) -> str:
    """`which` entry of body.input it is: [2], or nothing."""
    try:
        text = text_of(value)
    except Unreadable as e:
        raise Refused(f"body.input{which}", str(e)) from e
    if not text:
        raise Refused(f"body.input{which}", "is empty; expected text")
    return text


def _tokens(value: Any, which: str) -> TokenIds:
    where = f"body.input{which}"
    if not isinstance(value, list):
        raise Refused(where, f"{_entry(value)}; expected a list of token ids, like the first entry")
    if not value:
        raise Refused(where, "is an empty list; expected at least one token id")
    for i, item in enumerate(value):
        if type(item) is not int or not 0 <= item < 2**31:
            raise Refused(where, f"holds {_shown(item)}; expected token ids, whole numbers from 0, also for entry {i}")
    return TokenIds(tuple(value))


def _entry(value: Any) -> str:
    return "is null" if value is None else _kind(value)


def _kind(value: Any) -> str:
    if value is None:
        return "is missing"
    if isinstance(value, dict | list):
        return "is an object" if isinstance(value, dict) else "is a list"
    return f"is {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value, ensure_ascii=True)[:60]
