"""The dashboard over real connections: what it answers, what it refuses, and how it ends."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nimble_jobs.job import JobState
from nimble_jobs.store import NewJob, Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.logs import job_log_path
from tests.cli import Cli, loaded_by
from tests.dashboards import Dashboard
from tests.store_samples import PARTS, a_schedule, add_events, folder_in_memory, key_of, many_jobs
from tests.waiting import PATIENCE_S

NASTY = "<script>alert(1)</script> \x1b[2J &quot; \u202e evil \u2028 \x00 \udc80 'é"
WORKER = {"role": "worker", "device": "cpu", "status": "ready"}
SPEC: dict[str, Any] = {
    "name": "n",
    "kind": "score",
    "model": {"source": "torchvision:resnet18"},
    "input": {"source": "x.npz", "batch_size": 4},
    "output": {"path": "/nowhere/out"},
}


def new_job(store: Store, name: str = "n", **values: Any) -> str:
    """A queued job."""
    spec = SPEC | {"name": name}
    job = NewJob(name=name, kind="score", spec=spec, **values)
    return store.jobs.queue(job, time.time()).id


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve(str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def store(home: Path) -> Iterator[Store]:
    with open_store(home) as opened:
        yield opened


@pytest.fixture(scope="module")
def board(store: Store) -> Iterator[Dashboard]:
    with Dashboard.started(store.home, "--allow-host", "gpu.example.org") as running:
        yield running


def test_it_says_what_the_command_line_says(board: Dashboard, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of jobs, and all about one, equal `ls --json` and `show --json`, words included."""
    job = new_job(store, "same-words")
    cli = Cli(store.home, capsys)
    row = next(row for row in board.get("/api/jobs")["jobs"] if row["id"] == job)
    listed = next(row for row in cli("ls", "--json").json if row["id"] == job)
    assert {name: row[name] for name in listed} == listed
    assert row["waits"].startswith("no worker is running; start one with:")
    shown, found = cli("show", job, "--json").json, board.get(f"/api/jobs/{job}")
    del shown["events"]
    assert {name: found["job"][name] for name in shown} == shown
    assert "source: torchvision:resnet18" in found["spec_yaml"]


def test_pages(board: Dashboard, store: Store) -> None:
    """All jobs, once each, whatever is submitted meanwhile."""
    ids = [new_job(store, f"page-{i}") for i in range(25)]
    seen, before = [], ""
    for _ in range(50):
        page = board.get(f"/api/jobs?limit=10{before}")
        seen += [row["id"] for row in page["jobs"]]
        new_job(store, "meanwhile")
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    assert len(seen) == len(set(seen))
    assert [job for job in seen if job in ids] == ids[::-1]
    found = board.get("/api/jobs?q=PAGE-1&state=queued&kind=score")
    assert sorted(row["name"] for row in found["jobs"]) == sorted(["page-1", *(f"page-1{i}" for i in range(10))])
    assert board.get("/api/jobs?kind=finetune")["jobs"] == []


def test_nasty_text_stays_text(board: Dashboard, store: Store) -> None:
    """Markup, escapes, marks that turn text around and half characters arrive as JSON in ASCII."""
    job = new_job(store, "nasty")
    claimed = store.jobs.claim("w", device="cpu", now=time.time())
    while claimed is not None and claimed.id != job:
        store.jobs.fail(claimed.id, claimed.attempt, error="out of the way", retry=False, now=time.time())
        claimed = store.jobs.claim("w", device="cpu", now=time.time())
    assert claimed is not None
    store.jobs.event(NASTY[:30], NASTY, job, 1, {"<b>": NASTY}, now=time.time())
    store.jobs.fail(job, 1, error=NASTY, retry=False, now=time.time())
    log = job_log_path(store.home, job)
    log.write_bytes(NASTY.encode("utf-8", "surrogatepass") + b"\xff\n")
    for path in ("", "/events", "/log"):
        reply = board.ask("GET", f"/api/jobs/{job}{path}", {"Cookie": board.cookie})
        assert reply.status == 200
        assert reply.headers["content-type"] == "application/json"
        assert reply.body.isascii()
        assert "<script>alert(1)</script>" in json.dumps(reply.json)
        json.dumps(reply.json).encode()
    assert board.get(f"/api/jobs/{job}/log")["text"].startswith("<script>")
    with board.stream(after=0) as stream:
        message = next(m for m in stream if m.name == "event" and m.data["job"] == job and m.data["data"])
        assert "<script>" in message.data["message"]


ODD = [
    "..",
    "%2e%2e",
    "%2e%2e%2f",
    "..%5c",
    "%00",
    "%ff",
    "<script>",
    "'\"",
    "etc",
    "passwd",
    "a" * 300,
    "%252e",
    "~",
    "://",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from(["/", "/api/", "/api/jobs/", "/api/schedules/", "/api/timers/", "/api/workers/"]),
    parts=st.lists(st.sampled_from(ODD), min_size=1, max_size=4),
    method=st.sampled_from(["GET", "POST"]),
)
def test_odd_paths(board: Dashboard, base: str, parts: list[str], method: str) -> None:
    """Nothing outside of the page's files is served, and no error shows what was asked."""
    path = base + "/".join(part.replace("<", "%3C").replace(">", "%3E").replace('"', "%22") for part in parts)
    headers = {"Cookie": board.cookie, "Origin": f"http://{board.host}", "X-CSRF-Token": board.csrf}
    reply = board.ask(method, path, headers)
    assert reply.status in (404, 405, 422)
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json["error"]) == {"kind", "message"}
    assert b"root:" not in reply.body


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/jobs?limit=0", "limit: found 0; expected a whole number from 1 to 500"),
        ("/api/jobs?limit=1e9", "limit: found 1e9"),
        ("/api/jobs?limit=%D9%A3", "limit: found ?"),
        ("/api/jobs?before=-1", "before: found -1"),
        ("/api/jobs?state=%3Cb%3E", "state: found ?b?; expected one of queued, running"),
        ("/api/jobs?kind=x", "kind: found x; expected one of score, finetune"),
        ("/api/jobs?q=" + "x" * 201, "q: found 201 characters; expected at most 200"),
        ("/api/stream?after=x", "after: expected the number of an event"),
        ("/api/schedules?state=x", "state: found x"),
    ],
)
def test_bad_parameters(board: Dashboard, path: str, words: str) -> None:
    """An error names the parameter, what was found, and what was expected."""
    reply = board.ask("GET", path, {"Cookie": board.cookie})
    assert reply.status == 422
    assert words in reply.json["error"]["message"]
    assert b"<" not in reply.body


def test_changes(board: Dashboard, store: Store) -> None:
    """hold, release, cancel, retry do what the commands do, and say why not in their words."""
    job = new_job(store, "changed")
    assert board.post(f"/api/jobs/{job}/hold").json["message"] == f"changed {job}: held"
    assert store.jobs.get(job).held
    again = board.post(f"/api/jobs/{job}/retry")
    assert again.status == 409
    assert f"job {job} (changed)" in again.json["error"]["message"]
    assert board.post(f"/api/jobs/{job}/release").json["jobs"][0]["held"] is False
    assert board.post(f"/api/jobs/{job}/release").status == 409
    assert board.post(f"/api/jobs/{job}/cancel").json["message"] == f"changed {job}: cancelled"
    assert store.jobs.get(job).state is JobState.CANCELLED
    assert board.post(f"/api/jobs/{job}/retry").json["message"] == f"changed {job}: queued again"
    assert board.post("/api/jobs/0123456789ab/cancel").status == 404
    assert board.post(f"/api/jobs/{job}/cancel", {"now": "yes"}).status == 422
    assert board.post("/api/timers/none/pause").status == 404
    assert board.post("/api/workers/0-none/pause").json["error"]["message"].startswith("no worker 0-none is running")


def test_bodies(board: Dashboard, store: Store) -> None:
    """The body is a small JSON object or nothing; a nested or broken one is no reason to fail."""
    job = new_job(store, "bodies")
    headers = {"Cookie": board.cookie, "Origin": f"http://{board.host}", "X-CSRF-Token": board.csrf}
    for body, status in ((b"[]", 422), (b"{", 422), (b"[" * 3000, 422), (b"\xff", 422), (b"{}" + b" " * 5000, 413)):
        assert board.ask("POST", f"/api/jobs/{job}/hold", headers, body).status == status
    assert not store.jobs.get(job).held


@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "FOO"])
def test_other_methods(board: Dashboard, method: str) -> None:
    """They are not allowed anywhere, and no CORS header answers a preflight."""
    headers = {"Cookie": board.cookie, "Origin": "http://evil.example", "Access-Control-Request-Method": "DELETE"}
    for path in ("/", "/api/jobs", "/api/jobs/0123456789ab", "/metrics"):
        reply = board.ask(method, path, headers)
        assert reply.status == 405
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_hosts_over_a_socket(board: Dashboard) -> None:
    """Static files and the exchange of the token are refused under another name, too."""
    for path in ("/", "/robots.txt", "/api/overview", f"/?token={board.token}", "/metrics", "/nothing"):
        for host in ("evil.example", f"evil.example:{board.port}", "127.0.0.1", f"127.0.0.1:{board.port + 1}"):
            reply = board.ask("GET", path, {"Host": host, "Cookie": board.cookie})
            assert (reply.status, reply.json["error"]["kind"]) == (403, "host")
    assert board.ask("GET", "/api/overview", {"Host": "gpu.example.org", "Cookie": board.cookie}).status == 200


def test_large_heads(board: Dashboard) -> None:
    """A request head over 16 KiB is not read to its end."""
    with socket.create_connection(("127.0.0.1", board.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000)
        answer = connection.recv(200)
    assert answer.startswith(b"HTTP/1.1 400") or answer == b""
    assert board.get("/api/overview")["version"]


def test_files_of_the_page(board: Dashboard) -> None:
    """Served with their type, and not sent again if they are unchanged."""
    reply = board.ask("GET", "/robots.txt", {"Cookie": board.cookie})
    assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert reply.headers["cache-control"] == "no-cache"
    again = board.ask("GET", "/robots.txt", {"Cookie": board.cookie, "If-None-Match": reply.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert board.ask("GET", "/robots.txt").status == 401


def test_logs_by_parts(board: Dashboard, store: Store) -> None:
    """The last bytes first, then what is added; parts put together are the file, characters whole."""
    job = new_job(store, "logged")
    assert board.get(f"/api/jobs/{job}/log") == {"text": "", "start": 0, "offset": 0, "size": 0, "end": True}
    text = "".join(f"line {i} of the log: é–𝄞\n" for i in range(3000))
    log = job_log_path(store.home, job)
    log.write_text(text)
    tail = board.get(f"/api/jobs/{job}/log?limit=2048")
    assert tail["end"]
    assert len(tail["text"].encode()) <= 2048
    assert text.endswith(tail["text"])
    assert tail["text"].startswith("line ")
    parts, offset = [], 0
    while not (part := board.get(f"/api/jobs/{job}/log?limit=1025&offset={offset}"))["end"]:
        parts.append(part["text"])
        offset = part["offset"]
    assert "".join([*parts, part["text"]]) == text
    with log.open("a") as file:
        file.write("more\n")
    assert board.get(f"/api/jobs/{job}/log?offset={tail['offset']}")["text"] == "more\n"
    log.write_text("short\n")
    assert board.get(f"/api/jobs/{job}/log?offset={tail['offset']}")["text"] == "short\n"
    log.unlink()
    log.mkdir()
    assert board.get(f"/api/jobs/{job}/log")["text"] == ""


def test_schedules(board: Dashboard, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Stored schedules as `cache ls`, `show` and `stats` have them; a job's timeline is the drawing of `explain`."""
    keys = [key_of(f"dashboard-{i}") for i in range(3)]
    for i, key in enumerate(keys):
        store.schedules.save(a_schedule(key), parts=PARTS, now=1000.0 + i)
    cli = Cli(store.home, capsys)
    listed = {row["key"]: row for row in cli("cache", "ls", "--json").json}
    first = board.get("/api/schedules?limit=2&model=RESNET")
    second = board.get(f"/api/schedules?limit=2&before={first['next']}&model=RESNET")
    rows = [*first["schedules"], *second["schedules"]]
    assert [row["key"] for row in rows] == keys[::-1]
    assert all(listed[row["key"]] == row for row in rows)
    assert second["next"] is None
    assert board.get("/api/schedules?model=nothing")["schedules"] == []
    store.schedules.quarantine(keys[1], "damaged", 2000.0)
    sound = listed[keys[0]]["state"]
    first = board.get(f"/api/schedules?limit=1&state={sound}")
    second = board.get(f"/api/schedules?limit=1&state={sound}&before={first['next']}")
    assert [row["key"] for row in first["schedules"] + second["schedules"]] == [keys[2], keys[0]]
    assert second["next"] is None
    assert [row["key"] for row in board.get("/api/schedules?state=quarantined")["schedules"]] == [keys[1]]
    assert board.get(f"/api/schedules/{keys[0]}") == cli("cache", "show", keys[0], "--json").json
    whole = board.get("/api/store")
    assert whole["stats"] == cli("cache", "stats", "--json").json
    assert whole["sizes"]["total_bytes"] > 0
    assert board.ask("GET", "/api/schedules/none", {"Cookie": board.cookie}).status == 404


def test_metrics_with_the_token(board: Dashboard) -> None:
    """Prometheus reads them with the token."""
    reply = board.ask("GET", "/metrics", {"Authorization": f"Bearer {board.token}"})
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    assert b"nimble_jobs" in reply.body
    assert board.ask("GET", "/metrics").status == 401


def test_overview(board: Dashboard, store: Store) -> None:
    """It says that jobs wait though no worker runs, and how to start one."""
    new_job(store, "waiting")
    found = board.get("/api/overview")
    assert found["counts"]["queued"] >= 1
    assert found["home"]["path"] == str(store.home)
    assert not found["well"]
    alert = next(alert for alert in found["alerts"] if alert["title"] == "no worker")
    assert alert["level"] == "problem"
    assert alert["hint"] == "start one with: nimble-jobs worker start --detach"
    assert found["last_seq"] == store.jobs.event_span()[1]


def test_read_only(home: Path, store: Store) -> None:
    """With --read-only every change is refused, with how to allow it; everything is shown."""
    job = new_job(store, "kept")
    with Dashboard.started(home, "--read-only") as board:
        assert board.get("/api/overview")["read_only"]
        for path in (f"/api/jobs/{job}/cancel", "/api/timers/x/pause", "/api/workers/x/drain", "/api/none"):
            reply = board.post(path)
            assert reply.status == 403
            assert "start it without --read-only" in reply.json["error"]["message"]
    assert store.jobs.get(job).state is JobState.QUEUED


def test_the_stream_resumes_after_a_kill(home: Path, store: Store) -> None:
    """Each event once and in order, though the server is killed in between and events happen meanwhile."""
    position = store.jobs.event_span()[1]
    wanted = [new_job(store, f"stream-{i}") for i in range(3)]
    with Dashboard.started(home) as board:
        port = board.port
        with board.stream(after=position) as stream:
            first = stream.events(3)
        wanted.append(new_job(store, "while-it-runs"))
        board.stop(signal.SIGKILL)
    wanted += [new_job(store, f"while-it-is-away-{i}") for i in range(600)]
    with Dashboard.started(home, port=port) as board, board.stream(after=position, last=first[-1].number) as stream:
        wanted.append(new_job(store, "again"))
        rest = stream.events(602)
    numbers = [message.number for message in [*first, *rest]]
    assert numbers == sorted(set(numbers))
    assert [message.data["job"] for message in [*first, *rest]] == wanted
    with closing(sqlite3.connect(home / "nimble-jobs.db")) as database:
        stored = [row[0] for row in database.execute("SELECT seq FROM events WHERE seq > ? ORDER BY seq", (position,))]
    assert numbers == stored


def test_a_page_of_another_database_is_told(board: Dashboard, store: Store) -> None:
    """A position that the store never reached, or that was pruned, is answered with `reset`."""
    newest = store.jobs.event_span()[1]
    with board.stream(after=newest + 1000) as stream:
        names = [message.name for message, _ in zip(stream, range(2), strict=False)]
        assert names == ["hello", "reset"]


def test_progress_is_told(board: Dashboard, store: Store) -> None:
    """Without numbers, with the counts of jobs by state, and soon after a change."""
    new_job(store, "in-progress", priority=1000)
    with store.workers.hold(WORKER) as lease, board.stream() as stream:
        job = store.jobs.claim(lease.id, device="cpu", now=time.time())
        assert job is not None
        store.jobs.progress(job.id, job.attempt, done=5, total=10, bad=0)
        for message in stream:
            rows = {row["id"]: row for row in message.data["jobs"]} if message.name == "progress" else {}
            if job.id in rows and rows[job.id]["records_done"] == 5:
                break
        assert message.number is None
        assert message.data["counts"]["running"] >= 1
        assert rows[job.id]["records_total"] == 10


def test_five_hundred_streams(home: Path, store: Store) -> None:
    """All get each event, while claims go on; a reader that reads nothing takes nothing from the others."""
    with Dashboard.started(home) as board, ExitStack() as opened:
        lease = opened.enter_context(store.workers.hold(WORKER))
        asleep = opened.enter_context(socket.create_connection(("127.0.0.1", board.port)))
        asleep.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asleep.sendall(f"GET /api/stream HTTP/1.1\r\nHost: {board.host}\r\nCookie: {board.cookie}\r\n\r\n".encode())
        streams = [opened.enter_context(board.stream()) for _ in range(500)]
        for stream in streams:
            assert next(iter(stream)).name == "hello"
        jobs = [new_job(store, f"to-all-{i}", priority=5000) for i in range(5)]
        claimed = [store.jobs.claim(lease.id, device="cpu", now=time.time()) for _ in jobs]
        assert [job.id for job in claimed if job is not None] == jobs
        for stream in streams:
            found = [message.data["job"] for message in stream.events(10)]
            assert found == [*jobs, *jobs]
        assert board.get("/api/overview")["counts"]["running"] >= 5
        assert board.stop() == 0


def test_readers_that_read_nothing() -> None:
    """Streams whose clients sleep cost a bounded part of what they were to get, and are closed; claims go on."""
    rounds, size = 60, 16_000
    with folder_in_memory() as folder, open_store(resolve(folder)) as store, ExitStack() as opened:
        board = opened.enter_context(Dashboard.started(store.home))
        server = psutil.Process(board.process.pid)
        lease = opened.enter_context(store.workers.hold(WORKER))
        asleep = set()
        for _ in range(5):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", board.port)))
            client.sendall(f"GET /api/stream HTTP/1.1\r\nHost: {board.host}\r\nCookie: {board.cookie}\r\n\r\n".encode())
            assert client.recv(12) == b"HTTP/1.1 200"
            asleep.add(client.getsockname())
        awake = opened.enter_context(board.stream())
        assert next(iter(awake)).name == "hello"
        before = server.memory_info().rss
        for i in range(rounds):
            add_events(store, 100, "x" * size)
            job = new_job(store, f"round-{i}")
            claimed = store.jobs.claim(lease.id, device="cpu", now=time.time())
            assert claimed is not None
            assert claimed.id == job
            kinds = [message.data["kind"] for message in awake.events(102)]
            assert kinds == ["k"] * 100 + ["submitted", "claimed"]
        assert server.memory_info().rss - before < rounds * 100 * size / 2
        while {tuple(connection.raddr) for connection in server.net_connections() if connection.raddr} & asleep:
            assert board.get("/api/overview")["counts"]["running"] == rounds
            time.sleep(0.2)
        add_events(store, 1)
        assert awake.events(1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_open_streams(home: Path, how: signal.Signals) -> None:
    """A signal ends every stream, and the exit code is 0."""
    with Dashboard.started(home) as board, board.stream() as stream:
        assert next(iter(stream)).name == "hello"
        assert board.stop(how) == 0
        assert all(message.name in ("progress", "event") for message in stream)  # the rest, then a proper end


def test_a_taken_port(home: Path, board: Dashboard, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the option, and what else to do."""
    answer = Cli(home, capsys)("dashboard", "--port", board.port)
    assert answer.code == 2
    assert answer.err == (
        f"nimble-jobs: --port: {board.port} is taken by another process on 127.0.0.1; choose another, or 0 for any "
        "free one\n"
    )


@pytest.mark.parametrize("host", ["no.such.host.invalid", "8.8.8.8", "a b", "\udc80"])
def test_bad_addresses(home: Path, capsys: pytest.CaptureFixture[str], host: str) -> None:
    """An address that is not this machine's."""
    answer = Cli(home, capsys)("dashboard", "--port", "0", "--host", host)
    assert answer.code == 2
    assert "--host: found" in answer.err
    assert len(answer.lines) == 1


def test_bad_names_for_hosts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is served."""
    answer = Cli(home, capsys)("dashboard", "--port", "0", "--allow-host", "http://x")
    assert (answer.code, answer.out) == (2, "")
    assert "--allow-host: found 'http://x'; expected a host name" in answer.err


def test_the_folder_of_somebody_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for every command: a state folder that others can write to is refused."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    answer = Cli(tmp_path / "home", capsys)("dashboard", "--port", "0")
    assert answer.code == 1
    assert "others can write to it" in answer.err


_WITHOUT = """
import importlib.util, sys
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("starlette", "uvicorn") else known(name, *more)
from nimble_jobs.cli.main import main
sys.exit(main(["dashboard", "--port", "0"]))
"""


def test_without_the_extra(tmp_path: Path) -> None:
    """One line says what to install."""
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "nimble-jobs: dashboard: not installed: starlette, uvicorn; "
        "install with: pip install 'nimble-jobs[dashboard]'\n"
    )


def test_others_do_not_load_the_server(tmp_path: Path) -> None:
    """No other command, nor any help, imports what only the dashboard needs."""
    commands = ["--help", "dashboard --help", "ls", "worker ls", "cron ls"]
    servers = ("starlette", "uvicorn", "anyio", "h11", "prometheus_client", "torch")
    assert loaded_by(commands, servers, tmp_path / "home") == [[command, 0, []] for command in commands]


def test_many_jobs(tmp_path: Path) -> None:
    """Every state has its page, and a search for what is rare goes through all pages."""
    with open_store(resolve(str(tmp_path / "home"))) as many:
        many_jobs(many, 3000, now=time.time() - 4000)
        with Dashboard.started(many.home) as board:
            for state in JobState:
                assert len(board.get(f"/api/jobs?state={state.value}")["jobs"]) in (0, 100)
            rows: list[Any] = []
            page: dict[str, Any] = {"next": ""}
            while page["next"] is not None:
                page = board.get("/api/jobs?q=no%20such&limit=500" + (f"&before={page['next']}" if rows else ""))
                rows += page["jobs"]
            assert len({row["id"] for row in rows}) == 300


def test_slow_http_does_not_block(board: Dashboard) -> None:
    """A connection that sends half a request keeps nobody waiting."""
    with socket.create_connection(("127.0.0.1", board.port)) as half:
        half.sendall(b"GET / HTTP/1.1\r\nHo")
        assert board.get("/api/overview")
    with closing(http.client.HTTPConnection("127.0.0.1", board.port, timeout=PATIENCE_S)) as kept:
        for _ in range(3):
            kept.request("GET", "/api/jobs", headers={"Cookie": board.cookie})
            assert kept.getresponse().read()


def test_a_browser_that_takes_long_to_open(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the address, and nobody waits for it: it may be one that runs until the user closes it."""
    script, told = tmp_path / "browser", tmp_path / "told"
    script.write_text(f'#!/bin/sh\nprintf %s "$1" >{told}\nwhile [ -e {told} ]; do sleep 0.1; done\n')
    script.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{script} %s")
    try:
        with Dashboard.started(home, "--open") as board:
            while not told.exists() or not told.read_text().endswith(board.token):
                time.sleep(0.01)
            assert told.read_text() == f"http://{board.host}/?token={board.token}"
            assert board.get("/api/overview")
            assert board.stop() == 0
    finally:
        told.unlink(missing_ok=True)


def test_behind_a_proxy(home: Path, store: Store) -> None:
    """A proxy passes on the name under which it is reached, and adds the token: its users read, and change nothing."""
    job = new_job(store, "behind-a-proxy")
    with Dashboard.started(home, "--allow-host", "jobs.example.org") as board:
        added = {"Host": "jobs.example.org", "Authorization": f"Bearer {board.token}"}
        for path in ("/", "/api/overview", "/robots.txt"):
            assert board.ask("GET", path, added).status == 200
        csrf = board.ask("GET", "/api/overview", added).json["csrf"]
        change = {**added, "Origin": "https://jobs.example.org", "X-CSRF-Token": csrf}
        assert board.ask("POST", f"/api/jobs/{job}/cancel", change).status == 401
    assert store.jobs.get(job).state is JobState.QUEUED


def test_its_own_address_is_allowed(home: Path) -> None:
    """The name or address of --host may be asked for, with the port; the machine's other ones may not."""
    with Dashboard.started(home, "--host", "127.0.0.2") as board:
        assert board.ask("GET", "/api/overview", {"Cookie": board.cookie}).status == 200
        assert board.ask("GET", "/api/overview", {"Host": "127.0.0.2", "Cookie": board.cookie}).status == 403
        assert board.ask("GET", "/api/overview", {"Host": f"127.0.0.3:{board.port}"}).status == 403
