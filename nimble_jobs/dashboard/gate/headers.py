"""Headers of every response: what browsers may do with it."""

from __future__ import annotations

Headers = tuple[tuple[str, str], ...]

_PAGE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_STRANGER = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
# A drawing brings its own styles. It is shown as a picture; opened by itself it can neither run scripts nor load
# anything.
_DRAWING = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"


def security_headers(path: str, *, drawing: bool = False, stranger: bool = False) -> Headers:
    """The headers for a response to this path. `drawing`: it is an SVG; `stranger`: it is the page without a cookie."""
    return (
        ("content-security-policy", _DRAWING if drawing else _STRANGER if stranger else _PAGE),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cache-control", "no-cache" if _is_file(path) else "no-store"),
    )


def _is_file(path: str) -> bool:
    """Whether this is one of the page's files, which may be kept but must be asked for again."""
    return not path.startswith("/api/") and path not in ("/", "/metrics")
