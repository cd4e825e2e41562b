"""Runs the server until SIGTERM or Ctrl-C, and ends its open streams then."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from anyio import CapacityLimiter
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from nimble_jobs.dashboard.app import application
from nimble_jobs.dashboard.desk import THREADS, Desk
from nimble_jobs.dashboard.gate.hosts import Hosts
from nimble_jobs.dashboard.gate.keys import Keys, token_of
from nimble_jobs.dashboard.gate.limits import HEAD_BYTES
from nimble_jobs.dashboard.stream.hub import STREAMS, Hub
from nimble_jobs.errors import UsageError
from nimble_jobs.store import open_store

_LEAVE_S = 3  # for open requests to end
_PATIENCE_S = 5.0  # while others hold the database; a page that waits for longer says what is wrong
_CONNECTIONS = STREAMS + 200
_BACKLOG = 1024


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How to serve."""

    home: Path  # from `store.home.resolve`
    host: str = "127.0.0.1"
    port: int = 8765
    allow_hosts: Sequence[str] = ()
    read_only: bool = False
    open_metrics: bool = False


def run(wish: Wish, *, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `ready` gets the address, with its token, once the server takes requests.

    Raises UsageError for a host or port that cannot be used, and StoreError.
    """
    with (
        _log_on_stderr(),
        closing(_listening(wish.host, wish.port)) as listener,
        closing(open_store(wish.home, patience_s=_PATIENCE_S)) as store,
    ):
        port = listener.getsockname()[1]
        keys = Keys(token_of(store.home), port)
        hosts = Hosts(port, [*wish.allow_hosts, f"{_name(wish.host)}:{port}"])

        async def serve() -> None:
            desk = Desk(
                store=store,
                keys=keys,
                hub=Hub(store),
                limiter=CapacityLimiter(THREADS),
                read_only=wish.read_only,
            )
            server: _Server
            app = application(desk, hosts, abort=lambda s: server.abort(s), open_metrics=wish.open_metrics)
            server = _Server(_config(app), desk.hub)
            await asyncio.gather(server.serve([listener]), _tell(server, ready, _address(wish.host, port, keys)))

        asyncio.run(serve())


class _Server(uvicorn.Server):
    """A uvicorn server that ends its streams first, and after a signal leaves the exit code alone."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit  # a second signal does not wait
        self.should_exit = True
        self._hub.closed.set()

    def abort(self, scope: Scope) -> None:
        """Close the connection of a request at once, with what waits for its client."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, H11Protocol) and connection.client == scope["client"]:
                connection.transport.abort()


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        cast(Any, app),  # two libraries' types of one protocol
        http=H11Protocol,
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # who asks does not matter; what a proxy says about it could be forged
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        limit_concurrency=_CONNECTIONS,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_LEAVE_S,
    )


async def _tell(server: _Server, ready: Callable[[str], None], address: str) -> None:
    while not server.started:
        if server.should_exit:
            return
        await asyncio.sleep(0.01)
    ready(address)


def _listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError."""
    name = host.strip("[]")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as e:
        raise UsageError(f"--host: found {host!r}, which is no address of this machine; expected 127.0.0.1") from e
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        raise UsageError(_refused(host, port, e)) from e
    return listener


def _refused(host: str, port: int, error: OSError) -> str:
    match error:
        case OSError(errno=98):
            return f"--port: {port} is taken by another process on {host}; choose another, or 0 for any free one"
        case OSError(errno=99):
            return f"--host: found {host!r}, which is no address of this machine; expected 127.0.0.1"
        case PermissionError():
            return f"--port: {port} needs more rights; expected 1024 or more"
        case _:
            return f"--port: {port} on {host}: {error.strerror or error}"


def _address(host: str, port: int, keys: Keys) -> str:
    """The address to open, with the token."""
    return f"http://{_name(host)}:{port}/?token={keys.token}"


def _name(host: str) -> str:
    """The name under which the server can be asked on this machine."""
    everywhere = host in ("0.0.0.0", "::", "[::]")  # noqa: S104  # a comparison
    return "127.0.0.1" if everywhere else f"[{host.strip('[]')}]" if ":" in host else host


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """While inside, our log goes to stderr and nowhere else, and uvicorn's errors are not logged."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    # The routes answer and log their own errors; uvicorn would log each client that goes away.
    wanted = {"nimble_jobs": logging.INFO, "uvicorn": logging.CRITICAL, "asyncio": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in wanted}
    ours = logging.getLogger("nimble_jobs")
    for name, level in wanted.items():
        logging.getLogger(name).setLevel(level)
    ours.addHandler(handler)
    ours.propagate = False
    try:
        yield
    finally:
        ours.propagate = True
        ours.removeHandler(handler)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
