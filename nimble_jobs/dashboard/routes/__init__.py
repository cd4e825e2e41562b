"""What the server answers. Each module's docstring has the shape of its answers.

Everywhere: times are ISO 8601 in UTC, as in `--json`; names end in their unit (`_s`, `_us`, `_bytes`). A page of a
listing has `next`: pass it as `before` to get the following page; null after the last one. An error is
`{"error": {"kind", "message"}}` with status 401 (no token), 403 (host, origin, csrf, read-only), 404, 405, 409 (the
job, timer or worker is not in a state for that), 422 (a bad parameter), 503 (the store cannot be used right now) or
500.
A change (POST) needs the header `X-CSRF-Token` with the `csrf` of `/api/overview`.
"""
