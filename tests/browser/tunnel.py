"""A tunnel to a server on this machine, whose connections can die without anybody being told."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Event, Thread


class Tunnel:
    """Listens on a port of its own and copies bytes both ways, once `target` is set."""

    def __init__(self) -> None:
        self.target = 0  # port of the server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._dead = Event()  # of the connections that are open now
        self._open: list[socket.socket] = []
        Thread(target=self._accept, daemon=True).start()

    def die(self) -> None:
        """Open connections stay open, but nothing goes through them any more. So do new ones, until `revive`."""
        self._dead.set()

    def revive(self) -> None:
        """New connections work again; the old ones stay dead."""
        self._dead = Event()

    def close(self) -> None:
        """End everything."""
        for each in [self._listener, *self._open]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:  # closed
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self._open += [near, far]
            for ends in ((near, far), (far, near)):
                Thread(target=self._copy, args=(*ends, self._dead), daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket, dead: Event) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not dead.is_set():
                    to.sendall(data)
        if not dead.is_set():
            for end in (source, to):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
