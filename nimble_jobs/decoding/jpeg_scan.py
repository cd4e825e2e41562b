"""Checks tables, scan header and markers of a baseline JPEG (ITU-T T.81, annex B), as the engines of GPUs do not.

The engines take any table as it comes. From wrong ones they may make other pixels each time, or never finish. Nothing
is decoded here, so data that is damaged between its markers passes.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Final

from nimble_jobs.decoding.jpeg import DHT, DQT, DRI, Jpeg

_MARKER: Final = re.compile(rb"\xff[^\x00]")  # in a scan; 0xFF as data is followed by 0x00
_EOI, _RST0 = 0xD9, 0xD0
_END_OF_BLOCK, _SIXTEEN_ZEROS = 0x00, 0xF0  # AC symbols without a value
_MOST_DC_BITS, _MOST_AC_BITS = 11, 10  # of a value, with 8 bits a sample
_WHOLE_SPECTRUM: Final = bytes((0, 63, 0))


def end_of(view: memoryview, header: Jpeg) -> int | None:
    """Bytes up to the end of a baseline JPEG's image; None if its tables or markers are not as the standard wants them.

    What follows the image, another one say, does not count.
    """
    if header.scan is None:
        return None
    defined: dict[int, set[int]] = {DQT: set(), DHT: set()}
    interval = 0
    for marker, body in header.tables:
        if marker == DRI:
            if len(body) != 2:
                return None
            interval = int.from_bytes(body)
            continue
        found = _READERS[marker](body)
        if found is None:
            return None
        defined[marker] |= found
    if not header.quantizers <= defined[DQT] or (start := _start(view, header, defined[DHT])) is None:
        return None
    return _end(view, start, _restarts(header, interval) if interval else 0)


@functools.lru_cache(256)
def _quantizers(body: bytes) -> frozenset[int] | None:
    """The tables that a DQT segment defines."""
    found = set()
    for at in range(0, len(body), 65):
        table = body[at + 1 : at + 65]
        if body[at] > 3 or len(table) != 64 or 0 in table:
            return None
        found.add(body[at])
    return frozenset(found)


@functools.lru_cache(256)
def _coders(body: bytes) -> frozenset[int] | None:
    """The tables that a DHT segment defines: 0 and 1 for DC, 16 and 17 for AC."""
    found, at = set(), 0
    while at < len(body):
        counts = body[at + 1 : at + 17]
        symbols = body[at + 17 : at + 17 + sum(counts)]
        if body[at] not in (0, 1, 16, 17) or len(counts) != 16 or len(symbols) != sum(counts) or not symbols:
            return None
        if len(set(symbols)) != len(symbols) or not _are_codes(counts):
            return None
        if not all(map(_is_dc if body[at] < 16 else _is_ac, symbols)):
            return None
        found.add(body[at])
        at += 17 + len(symbols)
    return frozenset(found)


def _are_codes(counts: bytes) -> bool:
    """Whether there can be so many codes of 1, 2, ... 16 bits: no more than leaves of a tree."""
    return sum(count << (16 - bits) for bits, count in enumerate(counts, 1)) <= 1 << 16


_READERS: Final = {DQT: _quantizers, DHT: _coders}


def _is_dc(symbol: int) -> bool:
    return symbol <= _MOST_DC_BITS


def _is_ac(symbol: int) -> bool:
    return 1 <= symbol & 15 <= _MOST_AC_BITS or symbol in (_END_OF_BLOCK, _SIXTEEN_ZEROS)


def _start(view: memoryview, header: Jpeg, coders: set[int]) -> int | None:
    """Where the scan's data begins. All components must be in it, with tables that are defined."""
    assert header.scan is not None
    names = [name for name, _, _ in header.components]
    count = len(names)
    body = bytes(view[header.scan + 2 : header.scan + 8 + 2 * count])
    if len(body) != 6 + 2 * count or int.from_bytes(body[:2]) != len(body) or body[2] != count:
        return None
    if list(body[3:-3:2]) != names or body[-3:] != _WHOLE_SPECTRUM:
        return None
    if not all({both >> 4, 16 + (both & 15)} <= coders for both in body[4:-3:2]):
        return None
    return header.scan + 2 + len(body)


def _restarts(header: Jpeg, interval: int) -> int:
    """How many restart markers a scan has, one after each `interval` of its units but the last."""
    wide = high = 1
    if len(header.components) > 1:
        wide, high = max(h for _, h, _ in header.components), max(v for _, _, v in header.components)
    units = math.ceil(header.width / (8 * wide)) * math.ceil(header.height / (8 * high))
    return math.ceil(units / interval) - 1


def _end(view: memoryview, start: int, restarts: int) -> int | None:
    """Where the scan ends with its image, if so many restart markers come before, in turn."""
    for number, marker in enumerate(_MARKER.finditer(view, start)):
        expected = _RST0 + number % 8 if number < restarts else _EOI
        if view[marker.end() - 1] != expected:
            return None
        if number == restarts:
            return int(marker.end())
    return None
