"""The trace that a job is a part of, as W3C Trace Context writes it: https://www.w3.org/TR/trace-context/#traceparent-header"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_VARIABLE = "TRACEPARENT"
_FORM = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(text: str) -> bool:
    """Whether this is a traceparent of version 00."""
    return _FORM.fullmatch(text) is not None


def submitter_traceparent(environ: Mapping[str, str] | None = None) -> str | None:
    """TRACEPARENT of this process; None if it is unset or malformed, as the standard asks."""
    text = (os.environ if environ is None else environ).get(_VARIABLE, "").strip()
    return text if valid_traceparent(text) else None
