"""Answers as JSON, and errors with the words of the command line."""

from __future__ import annotations

import logging

from starlette.responses import Response

from nimble_jobs.dashboard.query import BadQuery
from nimble_jobs.errors import FencedOut, NimbleError, NotFound, SpecError, StoreTrouble, UsageError
from nimble_jobs.store.records import dump

log = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[NimbleError], int, str], ...] = (
    (NotFound, 404, "not-found"),
    (BadQuery, 422, "query"),
    (SpecError, 422, "spec"),
    (UsageError, 409, "state"),  # the job, timer or worker is not in a state for that
    (FencedOut, 409, "state"),
    (StoreTrouble, 503, "store"),
)


def answer(value: object, status: int = 200) -> Response:
    """JSON in ASCII: control characters, lone surrogates and marks that turn text around are escaped in it."""
    return Response(dump(value), status_code=status, media_type="application/json")


def refusal(error: Exception) -> Response:
    """The answer for an error. The message of an unforeseen one is in the log only."""
    if not isinstance(error, NimbleError):
        log.error("unexpected error", exc_info=error)
        return problem(500, "unexpected", "an unexpected error; the output of `nimble-jobs dashboard` tells more")
    status, kind = next(((s, k) for known, s, k in _STATUS if isinstance(error, known)), (500, "error"))
    return problem(status, kind, str(error))


def problem(status: int, kind: str, message: str) -> Response:
    """An error as all answers have it: `{"error": {"kind", "message"}}`."""
    return answer({"error": {"kind": kind, "message": message}}, status)
