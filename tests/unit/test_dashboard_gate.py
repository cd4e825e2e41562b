"""Which requests the dashboard's gate lets through: every combination of what an attacker can choose."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.dashboard.gate.gate import Gate
from nimble_jobs.dashboard.gate.hosts import Hosts
from nimble_jobs.dashboard.gate.keys import FILE, Keys, token_of
from nimble_jobs.errors import StoreError, UsageError

PORT = 8765
TOKEN = "5f" * 32
KEYS = Keys(TOKEN, PORT)
OTHER = Keys("a0" * 32, PORT)
Headers = Sequence[tuple[str, str]]


async def _inner(scope: Any, receive: Any, send: Any) -> None:
    """An application that says it was reached, and would send headers that it should not."""
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"public")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'"reached"'})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(gate: Gate, method: str, target: str, headers: Headers) -> Outcome:
    """One request, without a socket."""
    path, _, query = target.partition("?")
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": raw}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    asyncio.run(gate(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Outcome(status=sent[0]["status"], headers=found, body=b"".join(m.get("body", b"") for m in sent[1:]))


def gate(*, read_only: bool = False, open_metrics: bool = False, more: Sequence[str] = ("gpu.example.org",)) -> Gate:
    return Gate(_inner, hosts=Hosts(PORT, more), keys=KEYS, read_only=read_only, open_metrics=open_metrics)


# What can be sent, and whether it is right. None: the header is missing.
HOSTS = {
    f"127.0.0.1:{PORT}": True,
    f"LOCALHOST:{PORT}": True,
    f"[::1]:{PORT}": True,
    "gpu.example.org": True,
    f"127.0.0.1:{PORT + 1}": False,
    "127.0.0.1": False,
    "evil.example": False,
    f"evil.example:{PORT}": False,
    f"127.0.0.1.evil.example:{PORT}": False,
    f"127.0.0.1:{PORT}@evil.example": False,
    "": False,
    None: False,
}
ORIGINS = ("own", "missing", "null", "another site", "another port", "its prefix", "with a path")
COOKIES = ("right", "missing", "wrong", "the token", "twice", "of another port")
CSRF = ("right", "missing", "wrong", "the cookie")
METHODS = ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT")


def _origin(kind: str, host: str | None) -> str | None:
    own = f"{'https' if host == 'gpu.example.org' else 'http'}://{(host or '').lower()}"
    return {
        "own": own,
        "missing": None,
        "null": "null",
        "another site": "http://evil.example",
        "another port": f"http://127.0.0.1:{PORT + 1}",
        "its prefix": f"{own}.evil.example",
        "with a path": f"{own}/",
    }[kind]


def _cookie(kind: str) -> str | None:
    name = KEYS.cookie_name
    return {
        "right": f"theme=dark; {name}={KEYS.cookie}",
        "missing": None,
        "wrong": f"{name}={OTHER.cookie}",
        "the token": f"{name}={TOKEN}",
        "twice": f"{name}={OTHER.cookie}; {name}={KEYS.cookie}",
        "of another port": f"nimble-jobs-{PORT + 1}={KEYS.cookie}",
    }[kind]


def _csrf(kind: str) -> str | None:
    return {"right": KEYS.csrf, "missing": None, "wrong": OTHER.csrf, "the cookie": KEYS.cookie}[kind]


def _expected(host: str | None, method: str, cookie: str, origin: str, csrf: str, *, read_only: bool) -> set[int]:
    """The statuses that the rules allow, from the rules alone: the first broken rule names the status."""
    if not HOSTS[host]:
        return {400, 403}
    if method not in ("GET", "HEAD", "POST"):
        return {405}
    if cookie != "right":
        return {401}
    if method != "POST":
        return {200}
    return {200} if not read_only and origin == "own" and csrf == "right" else {403}


def test_the_matrix() -> None:
    """Each of thousands of combinations is answered as the rules say, and only right ones reach the application."""
    combinations = 0
    gates = {read_only: gate(read_only=read_only) for read_only in (False, True)}
    for host, method, cookie, origin, csrf, read_only in itertools.product(
        HOSTS, METHODS, COOKIES, ORIGINS, CSRF, (False, True)
    ):
        if method not in ("POST", "DELETE") and (origin, csrf) not in (("own", "right"), ("another site", "missing")):
            continue  # they do not matter for reading; DELETE stands for the other methods
        given = {
            "host": host,
            "cookie": _cookie(cookie),
            "origin": _origin(origin, host),
            "x-csrf-token": _csrf(csrf),
        }
        headers = [(name, value) for name, value in given.items() if value is not None]
        outcome = ask(gates[read_only], method, "/api/jobs/0123456789ab/cancel", headers)
        wanted = _expected(host, method, cookie, origin, csrf, read_only=read_only)
        assert outcome.status in wanted, (headers, method, read_only, outcome)
        assert (outcome.body == b'"reached"') == (wanted == {200})
        _check_headers(outcome)
        combinations += 1
    assert combinations > 5000


def _check_headers(outcome: Outcome) -> None:
    assert not [name for name in outcome.headers if name.startswith("access-control-")]
    policy = outcome.headers["content-security-policy"].split("; ")
    wanted = {"default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"}
    assert wanted <= set(policy)
    assert "unsafe" not in outcome.headers["content-security-policy"]
    assert outcome.headers["x-content-type-options"] == "nosniff"
    assert outcome.headers["referrer-policy"] == "no-referrer"
    assert outcome.headers["cache-control"] == "no-store"
    if outcome.status != 200:
        assert outcome.headers["content-type"] == "application/json"
        error = json.loads(outcome.body)["error"]
        assert set(error) == {"kind", "message"}
        assert not set('<>&"') & set(error["message"])


HOST = ("host", f"127.0.0.1:{PORT}")


def test_the_token_is_exchanged_for_a_cookie() -> None:
    """`GET /?token=` answers with the cookie and leads to `/`, under an allowed name only."""
    outcome = ask(gate(), "GET", f"/?token={TOKEN}", [HOST])
    assert outcome.status == 303
    assert outcome.headers["location"] == "/"
    cookie = outcome.headers["set-cookie"]
    assert cookie.split("; ")[1:] == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert cookie.startswith(f"nimble-jobs-{PORT}=")
    assert TOKEN not in cookie
    assert ask(gate(), "GET", "/api/overview", [HOST, ("cookie", cookie.partition(";")[0])]).status == 200


@pytest.mark.parametrize(
    ("method", "target", "host"),
    [
        ("GET", f"/?token={OTHER.token}", HOST[1]),
        ("GET", "/?token=", HOST[1]),
        ("GET", "/?token=%00%ff%f0", HOST[1]),
        ("GET", f"/?token={TOKEN}&token={TOKEN}", HOST[1]),
        ("GET", f"/?token={TOKEN.upper()}", HOST[1]),
        ("GET", f"/api/overview?token={TOKEN}", HOST[1]),
        ("POST", f"/?token={TOKEN}", HOST[1]),
        ("HEAD", f"/?token={TOKEN}", HOST[1]),
        ("GET", f"/?token={TOKEN}", "evil.example"),
    ],
)
def test_no_cookie_without_the_token(method: str, target: str, host: str) -> None:
    """Wrong, repeated and misplaced tokens, other methods and other hosts get none."""
    outcome = ask(gate(), method, target, [("host", host)])
    assert outcome.status in (401, 403)
    assert "set-cookie" not in outcome.headers
    assert KEYS.cookie.encode() not in outcome.body


def test_a_person_without_the_cookie_gets_a_page() -> None:
    """At `/` alone, the same whatever was sent, and under the strict policy; programs get JSON."""
    outcome = ask(gate(), "GET", "/", [HOST])
    assert (outcome.status, outcome.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert outcome.headers["cache-control"] == "no-store"
    assert "unsafe" not in outcome.headers["content-security-policy"]
    assert b"<form>" in outcome.body  # without an action, it leads to this very address
    assert "form-action 'self'" in outcome.headers["content-security-policy"]
    assert b"<script" not in outcome.body
    assert ask(gate(), "GET", f"/?token={OTHER.token}<b>", [HOST]).body == outcome.body
    assert ask(gate(), "GET", "/api/jobs", [HOST]).headers["content-type"] == "application/json"
    assert ask(gate(), "GET", "/", [("host", "evil.example")]).headers["content-type"] == "application/json"


@pytest.mark.parametrize("word", [f"Bearer {TOKEN}", f"bearer  {TOKEN} "])
def test_a_bearer_token_reads_but_changes_nothing(word: str) -> None:
    """A program may read with the token; a change needs the cookie."""
    headers = [HOST, ("authorization", word)]
    assert ask(gate(), "GET", "/metrics", headers).status == 200
    assert ask(gate(), "GET", "/api/jobs", headers).status == 200
    more = [("origin", f"http://{HOST[1]}"), ("x-csrf-token", KEYS.csrf)]
    assert ask(gate(), "POST", "/api/jobs/0123456789ab/cancel", [*headers, *more]).status == 401


@pytest.mark.parametrize("word", [TOKEN, f"Basic {TOKEN}", "Bearer ", f"Bearer {OTHER.token}", f"Bearer {KEYS.cookie}"])
def test_other_words_of_authorization_are_none(word: str) -> None:
    """Only `Bearer` with the token counts."""
    assert ask(gate(), "GET", "/metrics", [HOST, ("authorization", word)]).status == 401


def test_metrics_can_be_opened() -> None:
    """`--open-metrics` opens that path only, and only under an allowed name."""
    opened = gate(open_metrics=True)
    assert ask(opened, "GET", "/metrics", [HOST]).status == 200
    assert ask(opened, "GET", "/metrics", [("host", "evil.example")]).status == 403
    assert ask(opened, "GET", "/metrics/../api/jobs", [HOST]).status == 401
    assert ask(opened, "POST", "/metrics", [HOST]).status == 401
    assert ask(gate(), "GET", "/metrics", [HOST]).status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("content-length", "4096")], 200),
        ([("content-length", "4097")], 413),
        ([("content-length", "9" * 5000)], 413),
        ([("content-length", "-1")], 400),
        ([("content-length", "1e3")], 400),
        ([("content-length", "1"), ("content-length", "9999")], 400),
        ([("transfer-encoding", "chunked")], 411),
        ([(f"x-{i}", "y") for i in range(100)], 431),
    ],
)
def test_limits(headers: Headers, status: int) -> None:
    """The body must be short and its size announced; the number of headers is bounded."""
    cookie = ("cookie", f"{KEYS.cookie_name}={KEYS.cookie}")
    assert ask(gate(), "GET", "/api/jobs", [HOST, cookie, *headers]).status == status


def test_two_hosts_are_refused() -> None:
    """A proxy and the server could each look at another one."""
    cookie = ("cookie", f"{KEYS.cookie_name}={KEYS.cookie}")
    assert ask(gate(), "GET", "/", [HOST, ("host", "evil.example"), cookie]).status == 400


@pytest.mark.parametrize("name", ["", "a b", "http://a", "a/b", "a:b", "a:123456", "*", "<b>", "a\n", "é.example"])
def test_bad_names_for_hosts(name: str) -> None:
    """`--allow-host` takes host names, with a port at most."""
    with pytest.raises(UsageError, match=r"--allow-host: found .* expected a host name"):
        Hosts(PORT, [name])


def test_allowed_hosts_with_and_without_a_port() -> None:
    """A name is allowed on the usual ports and ours; with a port, on that one only."""
    both = Hosts(PORT, ["gpu.example.org", "proxy.example:9000"])
    own = {f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"[::1]:{PORT}"}
    # Browsers leave out a port only if it is their scheme's own.
    named = {"gpu.example.org", "gpu.example.org:80", "gpu.example.org:443", f"gpu.example.org:{PORT}"}
    assert both.allowed == own | named | {"proxy.example:9000"}
    assert "https://gpu.example.org" in both.origins
    assert "https://proxy.example:9000" in both.origins


def test_the_log_holds_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Neither token nor cookie, and no line feed or escape of the path."""
    caplog.set_level("INFO")
    ask(gate(), "GET", f"/?token={TOKEN}", [HOST])
    ask(gate(), "GET", "/\n\x1b[2Jfalse line\u202e", [HOST, ("cookie", f"{KEYS.cookie_name}={KEYS.cookie}")])
    text = "\n".join(caplog.messages)
    assert len(caplog.messages) == 2
    assert TOKEN not in text
    assert KEYS.cookie not in text
    assert text.isascii()
    assert "\x1b" not in text
    assert text.count("\n") == 1


def test_the_token_is_kept_by_the_state_folder(tmp_path: Path) -> None:
    """32 random bytes, for the owner's eyes only, the same at each start."""
    token = token_of(tmp_path)
    assert len(bytes.fromhex(token)) == 32
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / FILE).chmod(0o644)
    assert token_of(tmp_path) == token
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / FILE).unlink()
    assert token_of(tmp_path) != token


@pytest.mark.parametrize("text", ["", "secret", "5F" * 32, "5f" * 31, "<script>"])
def test_other_contents_are_no_token(tmp_path: Path, text: str) -> None:
    """A file with anything else is refused, not used."""
    (tmp_path / FILE).write_text(text)
    with pytest.raises(StoreError, match=r"dashboard\.token: not a token"):
        token_of(tmp_path)


def test_secrets_differ() -> None:
    """Cookie and CSRF token do not tell the token, nor each other."""
    assert len({KEYS.token, KEYS.cookie, KEYS.csrf}) == 3
    assert not KEYS.is_cookie(KEYS.token)
    assert not KEYS.is_csrf(KEYS.cookie)
    assert not KEYS.is_token("\udc80 é")
    assert not KEYS.is_token(None)
