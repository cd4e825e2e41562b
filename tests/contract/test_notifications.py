"""Notifications from the change of a job to the receiver: which are written, which arrive, and how failures end."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.courier import Courier
from nimble_jobs.job import Job
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.notices import NoticeState
from tests import timers
from tests.configured import configure
from tests.receiver import Receiver, receiving
from tests.store_samples import queued
from tests.waiting import PATIENCE_S

NOW = 1_800_000_000.0
slow_whatever_the_database = pytest.mark.parametrize("url", [None], ids=["sqlite"])


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        yield store


def submit(store: Store, notify: Mapping[str, Any] | None = None, *, name: str = "nightly", **more: Any) -> Job:
    spec = {"version": 1, "name": name, "notify": notify}
    return queued(store, spec=spec, name=name, kind="score", now=NOW, **more)


def run(store: Store, notify: Mapping[str, Any] | None = None, *, error: str | None = None, now: float = NOW) -> Job:
    """A job that ends at once."""
    job = submit(store, notify)
    assert store.jobs.claim("w", device="cpu", now=now) is not None
    if error is None:
        store.jobs.finish(job.id, 1, outputs={"path": "/out/nightly"}, timings={}, schedule={}, now=now)
    else:
        store.jobs.fail(job.id, 1, error=error, retry=False, lost=False, now=now)
    return job


def events(store: Store) -> list[tuple[str, str]]:
    return [(notice.channel, notice.event) for notice in reversed(store.outbox.list())]


def courier(store: Store, clock: Callable[[], float] = lambda: NOW, **environ: str) -> Courier:
    return Courier(store, "sender", environ=environ, clock=clock, chance=lambda: 1.0)


def hook(receiver: Receiver, path: str = "/hook", **more: Any) -> dict[str, Any]:
    return {"on": ["failed", "succeeded"], "webhook": receiver.url + path, "command": None, "ping": None, **more}


def allow(store: Store, receiver: Receiver, extra: str = "", *, timeout: str = "20s") -> None:
    configure(store.home, f"notify:\n  hosts: ['{receiver.host}']\n  timeout: {timeout}\n  give_up: 1h\n{extra}")


def test_nothing_is_written_where_nobody_listens(store: Store) -> None:
    """A job without targets costs no row."""
    run(store, error="bad")
    assert store.outbox.list() == []


def test_a_webhook_gets_what_happened(store: Store, receiver: Receiver) -> None:
    """The message says what ended how, in JSON and in one line, with an id and the number of the attempt."""
    allow(store, receiver)
    job = run(store, hook(receiver), error="no such file")
    assert courier(store).deliver() == 1
    (message,) = receiver.messages
    assert message.path == "/hook"
    assert message.headers["content-type"] == "application/json"
    assert message.headers["nimble-jobs-attempt"] == "1"
    (notice,) = store.outbox.list()
    assert message.headers["nimble-jobs-delivery"] == notice.id
    assert message.json == {
        "id": notice.id,
        "event": "failed",
        "text": f"nightly: failed: no such file (job {job.id})",
        "job": job.id,
        "name": "nightly",
        "kind": "score",
        "state": "failed",
        "attempt": 1,
        "error": "no such file",
        "output": None,
        "at": "2027-01-15T08:00:00Z",
        "delivery_attempt": 1,
    }
    assert (notice.state, notice.sent_at, notice.error) == (NoticeState.SENT, NOW, None)
    assert courier(store).deliver() == 0, "once is enough"


def test_only_what_was_asked_for(store: Store, receiver: Receiver) -> None:
    """`on` decides; attempts that are tried again and cancelled jobs are no end."""
    run(store, hook(receiver, on=["failed"]))
    cancelled = submit(store, hook(receiver))
    store.jobs.cancel(cancelled.id, NOW)
    again = submit(store, hook(receiver))
    store.jobs.claim("w", device="cpu", now=NOW)
    store.jobs.fail(again.id, 1, error="lost", retry=True, lost=True, now=NOW)
    assert store.outbox.list() == []


def test_dependents_that_never_run_are_no_news(store: Store, receiver: Receiver) -> None:
    """The failure of the job that they waited for is told, not that they are cancelled."""
    parent = submit(store, name="first")
    submit(store, hook(receiver), name="second", after=[parent.id])
    store.jobs.claim("w", device="cpu", now=NOW)
    store.jobs.fail(parent.id, 1, error="bad", retry=False, lost=False, now=NOW)
    assert store.outbox.list() == []


def test_recovered(store: Store, receiver: Receiver) -> None:
    """The first success after a failure of that name, and only that; who did not ask for it hears of a success."""
    both = hook(receiver, on=["recovered", "failed"])
    run(store, both)
    run(store, both, error="bad")
    run(store, both)
    run(store, both)
    assert events(store) == [("webhook", "failed"), ("webhook", "recovered")]
    run(store, error="bad")
    run(store, hook(receiver, on=["succeeded"]))
    assert events(store)[2:] == [("webhook", "succeeded")]


def test_the_configuration_hears_of_all_jobs(store: Store, receiver: Receiver) -> None:
    """Its targets get what its `on` says; a spec's `on` without targets asks them for more; each address once."""
    allow(store, receiver, f"  webhook: {receiver.url}/all\n  on: [failed]\n")
    run(store, error="bad")
    run(store)
    run(store, {"on": ["succeeded"]})
    run(store, hook(receiver, "/all"), error="bad")
    run(store, hook(receiver, "/own"), error="bad")
    found = [(notice.event, notice.target.rpartition("/")[2]) for notice in reversed(store.outbox.list())]
    assert found == [("failed", "all"), ("succeeded", "all"), ("failed", "all"), ("failed", "all"), ("failed", "own")]


def test_none_before_its_change_is_durable(store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that fails after the notification was written leaves neither; then both are there."""
    allow(store, receiver)
    job = submit(store, hook(receiver))
    store.jobs.claim("w", device="cpu", now=NOW)

    def full(*_args: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr("nimble_jobs.store.totals.write", full)
        with pytest.raises(OSError, match="no space"):
            store.jobs.fail(job.id, 1, error="bad", retry=False, lost=False, now=NOW)
    assert store.outbox.list() == []
    assert courier(store).deliver() == 0
    store.jobs.fail(job.id, 1, error="bad", retry=False, lost=False, now=NOW)
    assert courier(store).deliver() == 1
    assert len(receiver.messages) == 1


def test_it_is_tried_until_it_is_taken(store: Store, receiver: Receiver) -> None:
    """500 and 503 are answers to wait for a better one, with growing pauses and the pause that was asked for."""
    allow(store, receiver)
    run(store, hook(receiver), error="bad")
    now = [NOW]
    sender = courier(store, lambda: now[0])
    receiver.status = 500
    assert sender.deliver() == 1
    (notice,) = store.outbox.list()
    assert (notice.state, notice.attempts, notice.error) == (NoticeState.PENDING, 1, "answered 500 Answer")
    assert notice.next_at == NOW + 5
    assert sender.deliver() == 0, "not yet"
    receiver.status, receiver.headers = 503, {"Retry-After": "120"}
    now[0] = NOW + 5
    sender.deliver()
    assert store.outbox.list()[0].next_at == NOW + 125
    receiver.status = 204
    now[0] = NOW + 125
    sender.deliver()
    assert [message.json["delivery_attempt"] for message in receiver.messages] == [1, 2, 3]
    assert len({message.json["id"] for message in receiver.messages}) == 1
    assert store.outbox.list()[0].state is NoticeState.SENT


def test_given_up(store: Store, receiver: Receiver) -> None:
    """After notify.give_up it is given up, with an event; `retry` begins anew."""
    allow(store, receiver)
    job = run(store, hook(receiver), error="bad")
    receiver.status = 404
    sender = courier(store, lambda: NOW + 3600)
    assert sender.deliver() == 1
    (notice,) = store.outbox.list()
    assert notice.state is NoticeState.GIVEN_UP
    assert store.jobs.events(job.id)[-1].message == "webhook of failed given up after 1 attempts: answered 404 Answer"
    assert sender.deliver() == 0
    assert store.outbox.retry(None, NOW + 3600) == [notice.id]
    receiver.status = 200
    assert sender.deliver() == 1
    assert store.outbox.list()[0].state is NoticeState.SENT


@slow_whatever_the_database
@pytest.mark.parametrize(
    ("trouble", "error"), [("hang_s", "no answer within 1.5 s"), ("drip_s", "no answer within 4.5 s")]
)
def test_receivers_that_keep_one_waiting(store: Store, receiver: Receiver, trouble: str, error: str) -> None:
    """One that never answers, and one that answers a byte at a time, are left."""
    allow(store, receiver, timeout="1.5s")
    run(store, hook(receiver), error="bad")
    setattr(receiver, trouble, 0.2 if trouble == "drip_s" else 600.0)
    began = time.monotonic()
    courier(store).deliver()
    assert time.monotonic() - began < PATIENCE_S
    assert store.outbox.list()[0].error == error


def test_nobody_there(store: Store, receiver: Receiver) -> None:
    """A port that nobody listens on is an error like others."""
    with receiving() as gone:
        pass
    allow(store, gone)
    run(store, hook(gone), error="bad")
    courier(store).deliver()
    assert "ConnectError" in str(store.outbox.list()[0].error)


@slow_whatever_the_database
def test_one_that_hangs_does_not_hold_up_the_others(store: Store, receiver: Receiver) -> None:
    """Two at most are sent to one address at once."""
    with receiving() as slow:
        slow.hang_s = 60.0
        configure(store.home, f"notify: {{hosts: ['{receiver.host}', '{slow.host}'], timeout: 2s}}")
        for _ in range(20):
            run(store, hook(slow), error="bad")
        run(store, hook(receiver), error="bad")
        assert courier(store).deliver() == 3
        assert len(receiver.messages) == 1


def test_redirects(store: Store, receiver: Receiver) -> None:
    """They are followed to hosts that are allowed, and to no other."""
    with receiving() as elsewhere:
        configure(store.home, f"notify: {{hosts: ['{receiver.host}', '{elsewhere.host}']}}")
        receiver.status, receiver.headers = 308, {"Location": f"{elsewhere.url}/moved"}
        run(store, hook(receiver), error="bad")
        courier(store).deliver()
        assert [message.path for message in elsewhere.messages] == ["/moved"]
        assert elsewhere.messages[0].json["event"] == "failed"
        allow(store, receiver)
        run(store, hook(receiver), error="bad")
        courier(store).deliver()
        assert len(elsewhere.messages) == 1
        error = f"the host {elsewhere.host} is not allowed; allow it under notify.hosts in config.yaml"
        assert store.outbox.list()[0].error == error


def test_redirects_in_a_circle(store: Store, receiver: Receiver) -> None:
    """They end."""
    allow(store, receiver)
    receiver.status, receiver.headers = 307, {"Location": "/hook"}
    run(store, hook(receiver), error="bad")
    courier(store).deliver()
    assert store.outbox.list()[0].error == "redirected more than 3 times"


def test_hosts_that_are_not_allowed(store: Store, receiver: Receiver) -> None:
    """By default nothing is sent anywhere, and the outbox says why."""
    run(store, hook(receiver), error="bad")
    courier(store).deliver()
    assert receiver.messages == []
    error = f"the host {receiver.host} is not allowed; allow it under notify.hosts in config.yaml"
    assert store.outbox.list()[0].error == error


def test_secrets_stay_in_the_environment(store: Store, receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """The receiver gets them; neither the database, nor an error, nor the log holds them."""
    caplog.set_level(logging.DEBUG)
    allow(store, receiver)
    secret = "s3cr3t-t0k3n"
    run(store, hook(receiver, "/${HOOK_TOKEN}?x=1"), error="bad")
    receiver.status = 500
    courier(store, HOOK_TOKEN=secret).deliver()
    run(store, hook(receiver, on=["failed"], webhook="${HOOK_URL}"), error="bad")
    courier(store, HOOK_URL=f"http://{secret}.invalid/").deliver()
    courier(store, lambda: NOW + 10, HOOK_URL=f"http://{secret} /").deliver()
    assert receiver.messages[0].path == f"/{secret}?x=1"
    held = [file.read_bytes() for file in store.home.rglob("*") if file.is_file()]
    assert not any(secret.encode() in content for content in held)
    assert secret not in caplog.text
    assert all(notice.error for notice in store.outbox.list())
    because = "the host of ${HOOK_URL} is not allowed; allow it under notify.hosts in config.yaml"
    assert because in caplog.text


def test_a_missing_variable(store: Store, receiver: Receiver) -> None:
    """The outbox names it; once it is set the notification goes."""
    allow(store, receiver)
    run(store, hook(receiver, "/${HOOK_TOKEN}"), error="bad")
    courier(store).deliver()
    error = "the variable HOOK_TOKEN is not set in the environment of the sending process"
    assert store.outbox.list()[0].error == error
    courier(store, lambda: NOW + 10, HOOK_TOKEN="x").deliver()
    assert [message.path for message in receiver.messages] == ["/x"]


def test_pings(store: Store, receiver: Receiver) -> None:
    """A dead man's switch hears of each start and end, in their order, though the start was refused at first."""
    allow(store, receiver)
    ping = {"on": ["failed"], "webhook": None, "command": None, "ping": receiver.url + "/ping/${CHECK}?rid=1"}
    now = [NOW]
    sender = courier(store, lambda: now[0], CHECK="c")
    submit(store, ping)
    job = store.jobs.claim("w", device="cpu", now=NOW)
    assert job is not None
    receiver.status = 500
    sender.deliver()
    store.jobs.finish(job.id, 1, outputs={}, timings={}, schedule={}, now=NOW)
    receiver.status = 200
    assert sender.deliver() == 0, "the end waits for the start"
    now[0] += 5
    assert [sender.deliver(), sender.deliver()] == [1, 1]
    run(store, ping, error="bad", now=now[0])
    assert [sender.deliver(), sender.deliver()] == [1, 1]
    paths = ["/ping/c/start?rid=1", "/ping/c?rid=1", "/ping/c/start?rid=1", "/ping/c/fail?rid=1"]
    assert [message.path for message in receiver.taken] == paths
    assert receiver.taken[-1].text.startswith("nightly: failed: bad")


def script(folder: Path, text: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    path = folder / "tell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return [str(path), "one word"]


def told(store: Store, command: list[str], allowed: str, timeout: str = "30s") -> str | None:
    configure(store.home, f"notify: {{commands: [{allowed}], command_timeout: {timeout}}}")
    run(store, {"on": ["failed"], "webhook": None, "command": command, "ping": None}, error="bad; rm -rf $HOME")
    courier(store).deliver()
    return store.outbox.list()[0].error


def test_a_command(store: Store, tmp_path: Path) -> None:
    """It gets the JSON on standard input, and its words as they are."""
    folder = tmp_path / "hooks"
    command = script(folder, f'cat > {tmp_path}/got; echo "$1" > {tmp_path}/word; ps -o pgid= $$ > {tmp_path}/group')
    assert told(store, command, str(folder)) is None
    got = json.loads((tmp_path / "got").read_text())
    assert (got["event"], got["error"], got["delivery_attempt"]) == ("failed", "bad; rm -rf $HOME", 1)
    assert (tmp_path / "word").read_text() == "one word\n"


def test_commands_that_may_not_run(store: Store, tmp_path: Path) -> None:
    """Only those in folders that were allowed, links resolved, that nobody else can write to."""
    folder, other = tmp_path / "hooks", tmp_path / "other"
    command = script(other, f"touch {tmp_path}/ran")
    other.chmod(0o700)
    folder.mkdir()
    (folder / "link").symlink_to(command[0])
    because = "may not be run; allow its folder under notify.commands in config.yaml"
    assert told(store, command, str(folder)) == f"{command[0]} {because}"
    assert told(store, [str(folder / "link")], str(folder)) == f"{folder / 'link'} {because}"
    other.chmod(0o777)
    assert told(store, command, str(other)) == f"{command[0]} may not be run, because others can write to {other}"
    other.chmod(0o700)
    assert (
        told(store, [str(other / "none")], str(other)) == f"{other / 'none'} cannot be run (No such file or directory)"
    )
    assert not (tmp_path / "ran").exists()


@slow_whatever_the_database
def test_commands_that_fail(store: Store, tmp_path: Path) -> None:
    """Exit code and last line are kept; one that takes too long is killed with what it started."""
    folder = tmp_path / "hooks"
    command = script(folder, "echo first >&2; echo cannot reach it >&2; exit 3")
    assert told(store, command, str(folder)) == f"{command[0]}: exit code 3: cannot reach it"
    command = script(folder, f"(sleep 2; touch {tmp_path}/late) & sleep 60")
    assert told(store, command, str(folder), "0.5s") == f"{command[0]} took longer than 0.5 s and was killed"
    command = script(folder, "kill -9 $$")
    assert told(store, command, str(folder)) == f"{command[0]}: was killed by SIGKILL"
    assert not (tmp_path / "late").exists()


def test_leases(store: Store, receiver: Receiver) -> None:
    """Two senders never get the same one; that of a dead one is free after its lease, also if the clock is set back."""
    for _ in range(3):
        run(store, hook(receiver), error="bad")
    first = store.outbox.lease("a", NOW, lease_s=60)
    second = store.outbox.lease("b", NOW, lease_s=60)
    assert [len(first), len(second)] == [2, 1]
    assert {notice.id for notice in first}.isdisjoint(notice.id for notice in second)
    assert store.outbox.lease("b", NOW + 59, lease_s=60) == []
    assert not store.outbox.waiting(NOW + 59)
    again = store.outbox.lease("b", NOW + 60, lease_s=60)
    assert [notice.attempts for notice in again] == [2, 2]
    assert not store.outbox.failed(first[0], "late", next_at=NOW, now=NOW), "another attempt has begun"
    assert store.outbox.sent(first[0].id, NOW), "but what arrived has arrived"
    assert store.outbox.lease("c", NOW - 86400, lease_s=60), "the clock was set back by a day"


def test_a_broken_configuration_loses_none(store: Store, receiver: Receiver) -> None:
    """Who is told is found out once it is mended."""
    configure(store.home, "notify: {hosts: 1}")
    run(store, hook(receiver), error="bad")
    run(store)
    assert {channel for channel, _ in events(store)} == {"unrouted"}
    assert courier(store).deliver() == 0
    allow(store, receiver, f"  webhook: {receiver.url}/all\n")
    assert courier(store).deliver() == 2
    assert sorted(message.path for message in receiver.messages) == ["/all", "/hook"]
    assert {channel for channel, _ in events(store)} == {"webhook"}


def test_prune(store: Store, receiver: Receiver) -> None:
    """What was sent long ago goes; what is pending stays."""
    allow(store, receiver)
    run(store, hook(receiver), error="bad")
    courier(store).deliver()
    run(store, hook(receiver), error="bad")
    assert store.outbox.prune_some(NOW + 1) == 1
    assert store.outbox.counts() == {NoticeState.PENDING: 1}


def test_missed_ticks(store: Store, receiver: Receiver, tmp_path: Path) -> None:
    """One look at a timer that missed several ticks makes one notification, in the transaction of their rows."""
    allow(store, receiver)
    timers.add(store, tmp_path / "work", catch_up="none", **{"notify.on": ["missed"], "notify.webhook": receiver.url})
    timers.fire(store, timers.NOON + 3 * timers.HOUR + 600)
    (notice,) = store.outbox.list()
    assert (notice.event, notice.name, notice.body["ticks"]) == ("missed", "nightly", 3)
    assert notice.body["text"].startswith(
        "nightly: missed: 3 ticks, 2027-03-01 13:00 UTC to 2027-03-01 15:00 UTC: no process fired it in time"
    )
    timers.fire(store, timers.NOON + 6 * timers.HOUR + 600)
    (longer,) = store.outbox.list()  # nobody has sent it yet: it tells of the next look, too
    assert (longer.id, longer.body["id"], longer.body["ticks"]) == (notice.id, notice.id, 6)
    assert longer.body["text"].startswith("nightly: missed: 6 ticks, 2027-03-01 13:00 UTC to 2027-03-01 18:00 UTC: ")
    assert store.outbox.lease("sender", timers.NOON + 6 * timers.HOUR + 600, lease_s=60.0)
    timers.fire(store, timers.NOON + 7 * timers.HOUR + 600)
    newest, older = store.outbox.list()
    assert (newest.body["ticks"], older.body["ticks"]) == (1, 6)


def test_what_sends_is_loaded_late() -> None:
    """A worker's child imports the worker's module, and needs none of it: httpx2 takes longer than all the rest."""
    text = "import sys, nimble_jobs.worker.serve, nimble_jobs.worker.cron; sys.exit('httpx2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
