"""Messages between the pool and its processes: JSON, followed by bytes and sometimes a file descriptor.

Pixels never go this way. A message is a head of two lengths, the JSON, tables, and the bytes of pictures that are no
files.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<IQ")
_LARGEST = 1 << 34  # bytes; none of our messages is larger
_CHUNK = 1 << 20


def pack(message: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> list[memoryview]:
    """The pieces of a message, in the order in which to send them."""
    text = json.dumps(message | {"blobs": [len(b) for b in blobs]}, separators=(",", ":")).encode()
    head = _HEAD.pack(len(text), sum(map(len, blobs)))
    return [memoryview(head + text), *(memoryview(b) for b in blobs)]


class Inbox:
    """Puts messages together from what arrives in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._descriptors: list[int] = []

    def read(self, link: socket.socket) -> bool:
        """Read what has arrived; waits if the socket is blocking. False once the other side is gone."""
        data, ancillary, _, _ = link.recvmsg(_CHUNK, socket.CMSG_SPACE(16 * 4))
        for level, kind, held in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(held[: len(held) - len(held) % numbers.itemsize])
                self._descriptors.extend(numbers)
        self._data += data
        return bool(data)

    def take(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """The next complete message and its bytes; None if none is complete."""
        if len(self._data) < _HEAD.size:
            return None
        text, rest = _HEAD.unpack_from(self._data)
        if text + rest > _LARGEST:
            raise ValueError("no message")
        end = _HEAD.size + text
        if len(self._data) < end + rest:
            return None
        message: dict[str, Any] = json.loads(bytes(self._data[_HEAD.size : end]))
        blobs = []
        for length in message.pop("blobs"):
            blobs.append(bytes(self._data[end : end + length]))
            end += length
        del self._data[:end]
        return message, blobs

    def descriptor(self) -> int:
        """The oldest file descriptor that has not been taken yet."""
        return self._descriptors.pop(0)

    def close(self) -> None:
        """Close descriptors that nobody took."""
        for number in self._descriptors:
            os.close(number)
        self._descriptors.clear()
