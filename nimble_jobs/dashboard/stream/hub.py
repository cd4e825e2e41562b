"""Hands the poller's news to every open stream, and drops those that do not keep up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from anyio import CapacityLimiter, to_thread

from nimble_jobs.dashboard.stream import messages
from nimble_jobs.dashboard.stream.poller import AT_ONCE, News, Poller
from nimble_jobs.errors import NimbleError
from nimble_jobs.store import Store

log = logging.getLogger(__name__)

BEAT_S = 0.25
HEARTBEAT_S = 15.0  # a stream on which nothing happens says so this often; stream.js waits for some of them
_TROUBLE_S = 5.0  # between two tries while the store cannot be read
_WAITING = 1000  # messages that wait for a slow reader before it is dropped
STREAMS = 1000  # open at once


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message as it is sent."""

    data: bytes
    number: int | None = None  # of the event that it tells
    resets: bool = False  # numbers begin anew after it


@dataclass(eq=False)
class Reader:
    """One open stream."""

    inbox: asyncio.Queue[Message] = field(default_factory=lambda: asyncio.Queue(_WAITING))
    dropped: bool = False  # it did not keep up; once it comes back, it gets the rest from the store


class Hub:
    """All open streams. Everything but the poller's beat happens in the server's event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._poller = Poller(store)
        self._thread = CapacityLimiter(1)
        self._readers: set[Reader] = set()
        self._seen = 0  # the newest event that was handed out
        self._progress: bytes | None = None  # the message that was handed out last
        self._awake = asyncio.Event()
        self.closed = asyncio.Event()  # set once the server stops: every stream ends

    @property
    def readers(self) -> int:
        """How many streams are open."""
        return len(self._readers)

    async def run(self) -> None:
        """Read news and hand them out until cancelled. Does nothing while no stream is open."""
        while True:
            await self._awake.wait()
            try:
                news = await to_thread.run_sync(self._poller.beat, self._seen, limiter=self._thread)
            except NimbleError as e:
                log.warning("the store cannot be read: %s", e)
                await asyncio.sleep(_TROUBLE_S)
                continue
            self._hand_out(news)
            if not news.more:
                await asyncio.sleep(BEAT_S)

    def _hand_out(self, news: News) -> None:
        if news.restarted_at is not None:
            self._seen = news.restarted_at
            self._tell(Message(data=messages.reset(self._seen), number=self._seen, resets=True))
        for event in news.events:
            self._seen = event.seq
            self._tell(Message(data=messages.happened(event), number=event.seq))
        if news.progress is not None:
            self._progress = messages.progress(news.progress.jobs, news.progress.counts)
            self._tell(Message(data=self._progress))

    def _tell(self, message: Message) -> None:
        for reader in list(self._readers):
            try:
                reader.inbox.put_nowait(message)
            except asyncio.QueueFull:
                self._readers.discard(reader)
                reader.dropped = True

    @asynccontextmanager
    async def joined(self, after: int | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """The messages of a new stream, which begins after this event; None: after the newest."""
        if not self._readers:  # nobody has polled for a while
            newest = (await self._span())[1]
            if not self._readers:  # another stream may have joined meanwhile, and is still to be told what lies between
                self._seen, self._progress = newest, None
                self._poller.forget()
        reader = Reader()
        self._readers.add(reader)  # from here on nothing is missed
        self._awake.set()
        try:
            yield self._messages(reader, after)
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._awake.clear()

    async def _messages(self, reader: Reader, after: int | None) -> AsyncIterator[bytes]:
        oldest, newest = await self._span()
        position = newest if after is None else min(after, newest)
        yield messages.hello(position)
        if after is not None and (after > newest or after < oldest - 1):  # of another database, or pruned
            position = newest
            yield messages.reset(position)
        if self._progress is not None:
            yield self._progress
        # First what the store has already, then what comes in. The numbers tell what is in both.
        more = after is not None
        while more:
            events = await to_thread.run_sync(partial(self._store.jobs.events, since=position, limit=AT_ONCE))
            for event in events:
                position = event.seq
                yield messages.happened(event)
            more = len(events) == AT_ONCE
        while not reader.dropped:
            try:
                message = await asyncio.wait_for(reader.inbox.get(), HEARTBEAT_S)
            except TimeoutError:
                yield messages.beat()
                continue
            if message.number is None or message.number > position or message.resets:
                position = position if message.number is None else message.number
                yield message.data

    async def _span(self) -> tuple[int, int]:
        return await to_thread.run_sync(self._store.jobs.event_span)

    def close(self) -> None:
        """Close the connection that looks for commits."""
        self._poller.close()
