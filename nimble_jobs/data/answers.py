"""Lines of the output and of the error file of OpenAI's Batch API, for requests to `/v1/embeddings`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nimble_jobs.data.records import BadRecord
from nimble_jobs.data.text.values import HOW_TO_CUT
from nimble_jobs.data.writers import valid

# Problems of a line, which no server has answered; all others are answered with the status 400.
_CODES = {
    "line": "invalid_json_line",
    "custom_id": "invalid_custom_id",
    "method": "invalid_method",
    "url": "invalid_url",
}
# Whoever wrote the file finds the request by its line, as its custom_id is of no use.
_BY_LINE = frozenset({"line", "custom_id"})
_FIELD = re.compile(r"(custom_id|method|url|body(?:\.\w+)?)(?:\[\d+\])?: ")
_OURS = "the server could not answer this request, which is no fault of the request"


@dataclass(kw_only=True, eq=False)
class Requests:
    """The requests of a file, without their texts. Lists have one entry for each request."""

    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # first record; and the end
    lines: list[int] = field(default_factory=list)  # from 1
    custom_ids: list[str | None] = field(default_factory=list)  # None: the line has none
    models: list[str] = field(default_factory=list)
    base64: list[bool] = field(default_factory=list)
    dimensions: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lines)

    def of_record(self, record: int) -> int:
        """The number of the request with this record."""
        return int(np.searchsorted(self.starts, record, side="right")) - 1

    def span(self, number: int) -> tuple[int, int]:
        """The first record of a request, and the one behind its last."""
        return int(self.starts[number]), int(self.starts[number + 1])

    def with_dimensions(self, first: int, stop: int, why: str) -> dict[int, str]:
        """A reason for each of the records [first, stop) whose request has `dimensions`: it, and `why`."""
        found: dict[int, str] = {}
        for number in range(self.of_record(first), self.of_record(stop - 1) + 1):
            if (asked := self.dimensions[number]) is not None:
                found |= dict.fromkeys(range(*self.span(number)), f"body.dimensions: is {asked}; {why}")
        return found

    def whole(self, bad: Mapping[int, str]) -> dict[int, str]:
        """Reasons for all records of requests with bad ones: a request is answered as a whole, or not at all."""
        found: dict[int, str] = {}
        for record in sorted(bad):
            if record not in found:
                found |= dict.fromkeys(range(*self.span(self.of_record(record))), bad[record])
        return found


class Answers:
    """Makes one line of each request, from the vectors of its texts."""

    def __init__(self, requests: Requests, *, normalized: bool, place: Callable[[int], str]) -> None:
        """`normalized`: whether vectors are scaled to length 1, also after `dimensions` has shortened them. `place`
        says where a record is, as `Reader.place` does. Reasons begin with that; messages for clients do not.
        """
        self._requests, self._normalized, self._place = requests, normalized, place

    @property
    def total(self) -> int:
        """How many requests there are."""
        return len(self._requests)

    def number(self, record: int) -> int:
        """The number of the request with this record: as many requests are in front of it. The total for the number of
        all records.
        """
        return self._requests.of_record(record)

    def first_record(self, refused: BadRecord) -> BadRecord:
        """The first record of a request that cannot be answered, as `lines` returns it."""
        return replace(refused, index=int(self._requests.starts[refused.index]))

    def lines(
        self, first: int, stop: int, vectors: np.ndarray, counts: np.ndarray, bad: Sequence[BadRecord]
    ) -> tuple[list[str], list[BadRecord]]:
        """The lines of the requests with records [first, stop), in order, and the requests that cannot be answered.

        vectors: float32 [n, features], of the records that are not bad, in order; counts: int [n], their tokens. A
        request with one bad text is bad as a whole. `index` of what is returned counts requests.
        """
        requests = self._requests
        reasons = {record.index: record.reason for record in bad}
        rows = np.cumsum([record not in reasons for record in range(first, stop)]) - 1
        lines: list[str] = []
        refused: list[BadRecord] = []
        for number in range(requests.of_record(first), requests.of_record(stop - 1) + 1):
            begin, end = requests.span(number)
            why = next((reasons[record] for record in range(begin, end) if record in reasons), None)
            dimensions = requests.dimensions[number]
            if why is None and dimensions is not None and dimensions > vectors.shape[1]:
                why = (
                    f"{self._place(begin)}: body.dimensions: is {dimensions}; expected at most "
                    f"{vectors.shape[1]}, the length of the model's embeddings"
                )
            own = rows[begin - first : end - first]
            made = self._vectors(number, vectors[own]) if why is None else vectors[:0]
            if not np.isfinite(made).all():
                value = made[~np.isfinite(made)][0]
                why = f"{self._place(begin)}: the model's embedding holds {value}; expected finite numbers"
            if why is not None:
                refused.append(BadRecord(index=number, id=requests.custom_ids[number] or "", reason=why))
                continue
            lines.append(self._line(number, made, int(counts[own].sum())))
        return lines, refused

    def error(self, refused: BadRecord) -> dict[str, Any]:
        """The line of the error file for a request that cannot be answered."""
        number = refused.index
        place = valid(self._place(int(self._requests.starts[number])))
        message = refused.reason.removeprefix(f"{place}: ").removesuffix(HOW_TO_CUT)
        message = message.removeprefix("line: ")  # as shards of earlier versions say it
        answer: dict[str, Any] = {"id": self._id(number), "custom_id": refused.id or None}
        found = _FIELD.match(message)
        where = "line" if message.startswith("is ") else found[1] if found is not None else None
        if where is None:  # a shard that failed again and again, or an embedding that is not finite
            return answer | self._answered(number, 500, _OURS, kind="server_error", field=None)
        if where in _BY_LINE:
            message = f"line {self._requests.lines[number]}: {message}"
        if where in _CODES:
            return {**answer, "response": None, "error": {"code": _CODES[where], "message": message}}
        field = where.partition(".")[2] or None
        return answer | self._answered(number, 400, message, kind="invalid_request_error", field=field)

    def _answered(self, number: int, status: int, message: str, *, kind: str, field: str | None) -> dict[str, Any]:
        problem = {"message": message, "type": kind, "param": field, "code": None}
        response = {"status_code": status, "request_id": self._id(number, "req"), "body": {"error": problem}}
        return {"response": response, "error": None}

    def _vectors(self, number: int, vectors: np.ndarray) -> np.ndarray:
        """The vectors of a request with as many features as it asks for, float32."""
        dimensions = self._requests.dimensions[number]
        if dimensions is not None and dimensions < vectors.shape[1]:
            vectors = vectors[:, :dimensions]
            if self._normalized:
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.ascontiguousarray(vectors, dtype="<f4")

    def _line(self, number: int, vectors: np.ndarray, tokens: int) -> str:
        requests = self._requests
        encoded = requests.base64[number]
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": base64.b64encode(row.tobytes()).decode() if encoded else row.tolist(),
            }
            for i, row in enumerate(vectors)
        ]
        body = {
            "object": "list",
            "data": data,
            "model": requests.models[number],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        response = {"status_code": 200, "request_id": self._id(number, "req"), "body": body}
        answer = {
            "id": self._id(number),
            "custom_id": requests.custom_ids[number],
            "response": response,
            "error": None,
        }
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":"))

    def _id(self, number: int, kind: str = "batch_req") -> str:
        """The same in each run: equal inputs give equal files."""
        requests = self._requests
        text = f"{kind} {requests.lines[number]} {requests.custom_ids[number]}"
        return f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
