"""Bounds on what one request may send. The server bounds its headers (`HEAD_BYTES`) while it reads them."""

from __future__ import annotations

from nimble_jobs.dashboard.gate.asked import Asked, Refused

HEAD_BYTES = 16 * 1024  # of the request line and all headers
BODY_BYTES = 4 * 1024  # changes need a few words at most
_HEADERS = 64


def check(asked: Asked) -> Refused | None:
    """The number of headers, and the announced size of the body, which must be announced."""
    if len(asked.headers) > _HEADERS:
        return Refused(status=431, kind="headers", message=f"too many headers; expected at most {_HEADERS}")
    if asked.all("transfer-encoding"):
        return Refused(status=411, kind="body", message="the size of the body is not given; expected Content-Length")
    length = asked.one("content-length") if asked.all("content-length") else "0"
    if length is None or not (length.isascii() and length.isdigit()):
        return Refused(status=400, kind="body", message="Content-Length is not one number")
    if len(length) > 9 or int(length) > BODY_BYTES:
        return Refused(status=413, kind="body", message=f"the body is too large; expected at most {BODY_BYTES} bytes")
    return None
