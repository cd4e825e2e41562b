"""The stream's poller and hub, without sockets: cost of a beat, slow readers, and databases that change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from nimble_jobs.dashboard.stream import hub as hub_module
from nimble_jobs.dashboard.stream import response
from nimble_jobs.dashboard.stream.hub import Hub
from nimble_jobs.dashboard.stream.poller import AT_ONCE, Poller
from nimble_jobs.dashboard.stream.response import StreamResponse
from nimble_jobs.errors import StoreTrouble
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.store_samples import add_events


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def numbers_in(data: bytes) -> list[int]:
    """The numbers of the events in what a client got."""
    blocks = data.decode().split("\n\n")
    return [int(block.split("id: ")[1].split("\n")[0]) for block in blocks if "event: event" in block]


def test_a_beat_without_commits_reads_no_table(store: Store) -> None:
    """As long as nobody commits, no statement reaches the database but the look at its counter."""
    add_events(store, 3)
    poller = Poller(store)
    assert [e.seq for e in poller.beat(0).events] == [1, 2, 3]
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        statements.append(statement)

    event.listen(store.jobs._db._engine, "before_cursor_execute", note)
    for _ in range(20):
        assert poller.beat(3).events == ()
    assert statements == []
    add_events(store, 1)
    assert [e.seq for e in poller.beat(3).events] == [4]
    assert 0 < len(statements) < 10
    poller.close()


def test_one_commit_with_more_events_than_are_read_at_once(store: Store) -> None:
    """The following beats read the rest, though nobody commits again."""
    add_events(store, 2 * AT_ONCE + 7)
    poller = Poller(store)
    last, sizes = 0, []
    for _ in range(4):
        news = poller.beat(last)
        sizes.append(len(news.events))
        last = news.events[-1].seq if news.events else last
    assert sizes == [AT_ONCE, AT_ONCE, 7, 0]
    poller.close()


def test_events_that_could_not_be_read_are_read_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat that fails has already taken note of the commit; the next one reads it all the same."""
    poller = Poller(store)
    poller.beat(0)
    add_events(store, 1)
    with monkeypatch.context() as broken:
        broken.setattr(store.jobs, "events", _fail)
        with pytest.raises(StoreTrouble):
            poller.beat(0)
    assert [e.seq for e in poller.beat(0).events] == [1]
    poller.close()


def _fail(**_more: Any) -> None:
    raise StoreTrouble("locked")


def test_two_streams_that_join_at_once_lose_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one learns of the newest event before the first one was told of it."""

    async def scenario() -> list[int]:
        hub = Hub(store)
        real, first_asked, joined = hub._span, asyncio.Event(), asyncio.Event()

        async def slow() -> tuple[int, int]:
            first_asked.set()
            await joined.wait()
            return await real()

        monkeypatch.setattr(hub, "_span", slow)
        late = asyncio.create_task(_kept_open(hub))
        await first_asked.wait()
        monkeypatch.setattr(hub, "_span", real)
        async with hub.joined(None) as messages:
            await _collected(messages, lambda got: b"event: hello" in got)
            add_events(store, 3)
            joined.set()
            while hub.readers < 2:
                await asyncio.sleep(0.01)
            running = asyncio.create_task(hub.run())
            add_events(store, 1)
            got = await asyncio.wait_for(_collected(messages, lambda got: 4 in numbers_in(got)), 60)
        for task in (late, running):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        hub.close()
        return numbers_in(got)

    assert asyncio.run(scenario()) == [1, 2, 3, 4]


async def _kept_open(hub: Hub) -> None:
    async with hub.joined(None):
        await asyncio.Event().wait()


def test_progress_once_a_second_and_only_if_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the test turns."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    poller = Poller(store)
    assert poller.beat(0).progress is not None
    add_events(store, 1)
    assert poller.beat(1).progress is None  # too early
    clock[0] += 1.1
    assert poller.beat(1).progress is None  # nothing in it has changed
    poller.forget()
    assert poller.beat(1).progress is not None
    poller.close()


def test_a_database_that_was_replaced(store: Store) -> None:
    """If the newest event is older than what was told, numbers begin anew."""
    add_events(store, 5)
    poller = Poller(store)
    news = poller.beat(77)
    assert news.events == ()
    assert news.restarted_at == 5
    poller.close()


async def _collected(messages: AsyncIterator[bytes], enough: Any) -> bytes:
    got = b""
    async for message in messages:
        got += message
        if enough(got):
            break
    return got


def test_a_reader_that_does_not_keep_up_is_dropped_and_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets what it had when it comes back with the last number; other readers notice nothing."""
    monkeypatch.setattr(hub_module, "_WAITING", 60)
    monkeypatch.setattr(hub_module, "BEAT_S", 0.01)

    async def scenario() -> tuple[list[int], list[int]]:
        hub = Hub(store)
        running = asyncio.create_task(hub.run())
        everything: list[int] = []

        async def read(messages: AsyncIterator[bytes]) -> None:
            async for message in messages:
                everything.extend(numbers_in(message))

        async with hub.joined(0) as quick, hub.joined(None) as slow:
            first = await _collected(slow, lambda got: b"event: hello" in got)
            reading = asyncio.create_task(read(quick))
            for added in range(10, 201, 10):
                add_events(store, 10)
                while len(everything) < added and not reading.done():
                    await asyncio.sleep(0.01)
            reading.cancel()
            rest = first + await asyncio.wait_for(_collected(slow, lambda got: False), 60)  # ends: it was dropped
        last = max(numbers_in(rest), default=0)
        assert last < 200  # what waited for it was thrown away
        async with hub.joined(last) as again:
            got = await _collected(again, lambda got: len(numbers_in(got)) == 200 - last)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        hub.close()
        return everything, numbers_in(rest) + numbers_in(got)

    everything, in_two_parts = asyncio.run(scenario())
    assert everything == list(range(1, 201))
    assert in_two_parts == everything


def test_a_stream_on_which_nothing_happens_beats(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an event that scripts can hear, without a number, so that the last number stays that of the last event."""
    monkeypatch.setattr(hub_module, "HEARTBEAT_S", 0.01)

    async def scenario() -> bytes:
        hub = Hub(store)
        async with hub.joined(None) as messages:
            got = await asyncio.wait_for(_collected(messages, lambda got: got.count(b"event: beat") == 2), 60)
        hub.close()
        return got

    beat = b"event: beat\ndata: {}\n\n"
    assert asyncio.run(scenario()).endswith(b"\n\n" + beat + beat)


def test_a_client_that_takes_nothing_is_cut_off(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its buffers stay full, the connection is closed with all that waits for it."""
    monkeypatch.setattr(response, "SEND_S", 0.05)
    aborted: list[Any] = []

    async def scenario() -> None:
        hub = Hub(store)

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {"type": "http", "client": ("127.0.0.1", 1)}
        await asyncio.wait_for(StreamResponse(hub, None, aborted.append)(scope, receive, send), 60)
        assert hub.readers == 0
        hub.close()

    asyncio.run(scenario())
    assert [scope["client"] for scope in aborted] == [("127.0.0.1", 1)]
