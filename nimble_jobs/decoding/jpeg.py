"""Parses the header of a JPEG (ITU-T T.81, annex B), as far as it decides which decoder may take the file.

It accepts any bytes, decodes nothing and reads no byte twice.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

_SOI: Final = b"\xff\xd8"
_EOI: Final = b"\xff\xd9"
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF markers; these three are tables and reserved
_ALONE: Final = frozenset((0x01, *range(0xD0, 0xD8)))  # markers without a segment: TEM, RST0 to RST7
_SOS, _APP1, _APP14, _DNL = 0xDA, 0xE1, 0xEE, 0xDC
DHT, DQT, DRI = 0xC4, 0xDB, 0xDD  # segments with tables, and with the interval of restart markers
# All that a picture of one frame has. Decoders skip those of applications and comments; others they refuse or obey.
_SEGMENTS: Final = _FRAMES | {DHT, DQT, DRI, _DNL, 0xFE, *range(0xE0, 0xF0)}
_ORIENTATION: Final = 0x0112  # EXIF tag
UNSURE: Final = 0  # an orientation that this parser cannot read

BASELINE, PROGRESSIVE = 0xC0, 0xC2
# Sampling factors of the first component if the others have 1x1: 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1, 4:1:0.
_SAMPLINGS: Final = frozenset(((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2)))


@dataclass(frozen=True, kw_only=True)
class Jpeg:
    """The header of one file."""

    kind: int  # low byte of the SOF marker: 0xC0 baseline, 0xC2 progressive, ...
    precision: int  # bits per sample
    height: int  # pixels, before the orientation is applied
    width: int
    components: tuple[tuple[int, int, int], ...]  # id, horizontal and vertical sampling factor
    orientation: int  # from EXIF, 1 if there is none; UNSURE: another parser must look
    adobe: int | None  # colour transform in Adobe's segment: 0 none, 1 YCbCr, 2 YCCK; None: no such segment
    jfif: bool
    complete: bool  # the file ends with EOI
    quantizers: frozenset[int]  # numbers of the quantization tables of the components
    tables: tuple[tuple[int, bytes], ...]  # low byte of the marker and contents of DHT, DQT and DRI segments
    scan: int | None  # offset of the marker of the first scan, if only segments come before

    @property
    def plain(self) -> bool:
        """Whether all decoders agree on the file: 8 bits, baseline or progressive, grey or YCbCr, upright, complete."""
        if self.kind not in (BASELINE, PROGRESSIVE) or self.precision != 8 or not (self.height and self.width):
            return False
        if not self.complete or self.orientation != 1:
            return False
        if len(self.components) == 1:
            return True
        first, *others = [(h, v) for _, h, v in self.components]
        if len(others) != 2 or first not in _SAMPLINGS or set(others) != {(1, 1)}:
            return False
        return self._is_ycbcr()

    def _is_ycbcr(self) -> bool:
        """libjpeg's rule for three components. Adobe's segment counts unless there is a JFIF segment."""
        if self.jfif:
            return self.adobe in (None, 1)
        if self.adobe is not None:
            return self.adobe == 1
        return [name for name, _, _ in self.components] in ([1, 2, 3], [0, 1, 2])


def alike(view: memoryview, header: Jpeg) -> int:
    """A number that files share if their headers differ only in what decoders skip: EXIF, comments, thumbnails.

    It is a positive 63-bit hash of frame, tables, colour transform and first scan's header, which must follow nothing
    but segments.
    """
    assert header.scan is not None
    length = view[header.scan + 2] << 8 | view[header.scan + 3]
    facts = (header.kind, header.precision, header.height, header.width, header.components)
    digest = hashlib.blake2b(
        repr((facts, sorted(header.quantizers), header.adobe, header.jfif)).encode(), digest_size=8
    )
    for marker, body in header.tables:
        digest.update(struct.pack(">BH", marker, len(body)))
        digest.update(body)
    digest.update(view[header.scan : header.scan + 2 + length])
    return int.from_bytes(digest.digest()) >> 1 or 1


def parse(data: bytes | bytearray | memoryview) -> Jpeg | None:
    """The header of a file; None if it is not a JPEG or its header cannot be read. Raises nothing."""
    view = memoryview(data).cast("B")  # bytes of a table come signed
    if bytes(view[:2]) != _SOI:
        return None
    frame: _Frame | None = None
    orientation, adobe, jfif = 1, None, False
    segments, scan = _segments(view)
    for marker, body in segments:
        if marker in _FRAMES:
            if frame is not None or (frame := _frame(marker, body)) is None:
                return None
        elif marker == _APP1:
            found = _orientation(body)
            orientation = found if orientation == 1 else UNSURE if found != 1 else orientation
        elif marker == _APP14 and bytes(body[:5]) == b"Adobe" and len(body) >= 12:
            adobe = body[11]
        elif marker == 0xE0 and bytes(body[:5]) == b"JFIF\0":
            jfif = True
        elif marker == _DNL:
            return None  # the height comes later
    if frame is None:
        return None
    kind, precision, height, width, components, quantizers = frame
    return Jpeg(
        kind=kind,
        precision=precision,
        height=height,
        width=width,
        components=components,
        quantizers=quantizers,
        tables=tuple((marker, bytes(body)) for marker, body in segments if marker in (DHT, DQT, DRI)),
        scan=scan,
        orientation=orientation,
        adobe=adobe,
        jfif=jfif,
        complete=bytes(view[-2:]) == _EOI and len(view) >= 4,
    )


def _segments(view: memoryview) -> tuple[list[tuple[int, memoryview]], int | None]:
    """Markers and the contents of their segments, up to the first scan or to bytes that make no sense. Second, where
    the scan's marker is, if there is nothing but segments before.
    """
    found: list[tuple[int, memoryview]] = []
    at, alone = 2, False
    while at + 4 <= len(view) and view[at] == 0xFF:
        marker = view[at + 1]
        if marker == 0xFF:  # a fill byte
            at, alone = at + 1, True
        elif marker in _ALONE:
            at, alone = at + 2, True
        elif marker == _SOS:
            return found, None if alone else at
        elif marker not in _SEGMENTS:
            break
        else:
            length = view[at + 2] << 8 | view[at + 3]
            if length < 2 or at + 2 + length > len(view):
                return [], None
            found.append((marker, view[at + 4 : at + 2 + length]))
            at += 2 + length
    return found, None


# Marker, bits, height and width; components as in `Jpeg`; quantizers.
_Frame: TypeAlias = tuple[int, int, int, int, tuple[tuple[int, int, int], ...], frozenset[int]]


def _frame(marker: int, body: memoryview) -> _Frame | None:
    if len(body) < 6 or len(body) != 6 + 3 * body[5]:
        return None
    precision, height, width, count = struct.unpack_from(">BHHB", body)
    components = tuple((body[i], body[i + 1] >> 4, body[i + 1] & 15) for i in range(6, 6 + 3 * count, 3))
    return marker, precision, height, width, components, frozenset(body[8::3])


def _orientation(body: memoryview) -> int:
    """The orientation in an APP1 segment, 1 if it has none. UNSURE for XMP, which may have one as text."""
    if bytes(body[:6]) != b"Exif\0\0":
        return UNSURE if b"Orientation" in bytes(body) else 1
    tiff = body[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(tiff[:4]))
    if order is None or len(tiff) < 8:
        return UNSURE
    (at,) = struct.unpack_from(order + "I", tiff, 4)
    if at + 2 > len(tiff):
        return UNSURE
    (count,) = struct.unpack_from(order + "H", tiff, at)
    if at + 2 + 12 * count > len(tiff):
        return UNSURE
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, values, value = struct.unpack_from(order + "HHIH", tiff, entry)
        if tag == _ORIENTATION:
            return value if (kind, values) == (3, 1) and 1 <= value <= 8 else UNSURE
    return 1
