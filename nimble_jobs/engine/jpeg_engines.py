"""nvJPEG's batched decoder for the JPEG engines of a GPU, called through its C interface.

torchvision ships the library and decodes with it, but under one lock for the whole process, and with several calls and
allocations for each picture. One call for a whole batch decodes more pictures a second, to the same pixels.

What matters about nvJPEG 13 (`nvjpeg.h`):

- Only some GPUs have engines. On others no decoder can be made.
- The engines take baseline JPEGs. `nvjpegDecodeBatched` fails as a whole if one file is not a JPEG. It does not notice
  truncated files.
- After a failed call, its work goes on. The stream must be idle before anything else uses the memory.
- A state has its own buffers, which grow with the largest batch. One state serves one thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Final

import numpy as np
import torch

from nimble_jobs.engine import nvjpeg
from nimble_jobs.engine.device import able

_HARDWARE: Final = 3  # NVJPEG_BACKEND_HARDWARE
_GREY, _PLANES = 2, 3  # NVJPEG_OUTPUT_Y, NVJPEG_OUTPUT_RGB
_COMPONENTS: Final = 4  # NVJPEG_MAX_COMPONENT

_UNKNOWN: Final = -1  # NVJPEG_CSS_UNKNOWN
_MOST_KNOWN: Final = 1 << 14  # verdicts that a decoder keeps
TAKES, OTHERS, BROKEN = range(3)  # the engines decode the file; the GPU's cores must; it is no JPEG, or damaged

_IDLE: dict[tuple[int, int], list[JpegEngines]] = {}  # by device index and channels
_WITHOUT: set[tuple[int, int]] = set()  # those for which none can be made
_LOCK = threading.Lock()


class NoEngines(Exception):
    """The GPU has no JPEG engines, or nvJPEG is missing."""


class JpegEngines:
    """One decoder, for one thread at a time."""

    def __init__(self, device: torch.device, channels: int) -> None:
        """`channels`: 1 (grey) or 3 (RGB). Raises NoEngines if the GPU has no engines or nvJPEG is missing."""
        self.device, self.channels = device, channels
        self._format = _GREY if channels == 1 else _PLANES
        self._library, self._quick = _libraries()
        self._given: tuple[np.ndarray, ...] = ()
        self._known: dict[int, int] = {}  # verdicts by `Pictures.alike`
        self._handle, self._state, self._parsed = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # makes torch create the context that nvJPEG needs
            status = self._library.nvjpegCreateEx(_HARDWARE, None, None, 0, ctypes.byref(self._handle))
            if status == 0:
                status = self._library.nvjpegJpegStateCreate(self._handle, ctypes.byref(self._state))
            if status == 0:
                status = self._library.nvjpegJpegStreamCreate(self._handle, ctypes.byref(self._parsed))
        if status:
            self._destroy()
            raise NoEngines(f"nvJPEG cannot use the GPU's JPEG engines: status {status}")

    def _destroy(self) -> None:
        """Free what a constructor that fails has made. Others are kept: see `give_back`."""
        if self._state:
            self._library.nvjpegJpegStateDestroy(self._state)
        if self._handle:
            self._library.nvjpegDestroy(self._handle)

    def judge(self, addresses: np.ndarray, lengths: np.ndarray, sizes: np.ndarray, alike: np.ndarray) -> np.ndarray:
        """Who can decode files that lie on the host: TAKES, OTHERS or BROKEN for each, int64 [n].

        `addresses` and `lengths`, int64 [n], say where the files lie. `sizes`, int64 [n, 2], holds the height and width
        that we read from their headers. If nvJPEG reads another size the file is BROKEN, since nvJPEG could write past
        the memory that it gets. `alike`, int64 [n], is as in `Pictures`: of files with the same positive number nvJPEG
        reads one header, because each takes 14 microseconds with the interpreter's lock held.
        """
        files = zip(addresses.tolist(), lengths.tolist(), sizes.tolist(), alike.tolist(), strict=True)
        return np.array([self._judged(*file) for file in files], dtype=np.int64)

    def _judged(self, at: int, nbytes: int, size: list[int], alike: int) -> int:
        known = self._known.get(alike) if alike > 0 else None
        if known is not None:
            return known
        verdict = self._judge(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), size)
        if alike > 0:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[alike] = verdict
        return verdict

    def _judge(self, at: ctypes.c_void_p, nbytes: ctypes.c_size_t, size: list[int]) -> int:
        components, sampling, refused = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        widths, heights = (ctypes.c_int * _COMPONENTS)(), (ctypes.c_int * _COMPONENTS)()
        said = ctypes.byref(components), ctypes.byref(sampling), widths, heights
        if (
            self._quick.nvjpegGetImageInfo(self._handle, at, nbytes, *said)
            or [heights[0], widths[0]] != size
            or sampling.value == _UNKNOWN
            or self._quick.nvjpegJpegStreamParseHeader(self._handle, at, nbytes, self._parsed)
        ):
            return BROKEN
        unsupported = self._quick.nvjpegDecodeBatchedSupported(self._handle, self._parsed, ctypes.byref(refused))
        return OTHERS if unsupported or refused.value else TAKES

    def decode(
        self, addresses: np.ndarray, lengths: np.ndarray, sizes: np.ndarray, targets: np.ndarray, stream: int
    ) -> None:
        """Queue the decoding of files on a stream; all must be TAKES. Arguments are as in `judge`.

        The planes of each picture, uint8 [channels, height, width], go to its address in `targets`, int64 [n], on the
        device. Nothing else may use this memory until the stream is done. Raises RuntimeError if a file cannot be
        decoded; targets may still be written to afterwards.
        """
        count = len(addresses)
        # Prepare the state for each batch: after a damaged picture, an old state may never finish.
        self._check(
            self._library.nvjpegDecodeBatchedInitialize(self._handle, self._state, count, 1, self._format), "prepare"
        )
        images = np.zeros((count, 2, _COMPONENTS), dtype=np.int64)  # nvjpegImage_t: addresses, then bytes a row
        plane = sizes.prod(axis=1)
        for channel in range(self.channels):
            images[:, 0, channel] = targets + channel * plane
            images[:, 1, channel] = sizes[:, 1]
        self._given = addresses, lengths, images  # nothing says that nvJPEG's threads do not read them later
        self._check(
            self._library.nvjpegDecodeBatched(
                self._handle,
                self._state,
                _pointer(addresses),
                _pointer(lengths),
                _pointer(images),
                ctypes.c_void_p(stream),
            ),
            "decode",
        )

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"nvJPEG failed to {what} a batch: {status}")


def take(device: torch.device, channels: int) -> JpegEngines | None:
    """A decoder that nobody uses; None where there can be none: torchvision then decodes on the GPU's cores."""
    if not able(device).decoder:
        return None
    kind = device.index or 0, channels
    with _LOCK:
        if kind in _WITHOUT:
            return None
        idle = _IDLE.setdefault(kind, [])
        if idle:
            return idle.pop()
    try:
        return JpegEngines(device, channels)
    except NoEngines:
        with _LOCK:
            _WITHOUT.add(kind)
        return None


def give_back(engines: JpegEngines) -> None:
    """Return a decoder for others to use. Its work must be done."""
    with _LOCK:
        _IDLE[(engines.device.index or 0, engines.channels)].append(engines)


def _pointer(values: np.ndarray) -> ctypes.c_void_p:
    assert values.dtype == np.int64
    assert values.flags.c_contiguous
    return ctypes.c_void_p(values.ctypes.data)


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """nvJPEG as torchvision ships it, loaded twice: for long calls, and for short calls.

    Short calls keep the interpreter's lock, since a thread that releases it has to wait to get it back.
    """
    try:
        shipped = sorted((nvjpeg.torchvision_folder().parent / "torchvision.libs").glob("libnvjpeg*.so*"))
    except RuntimeError as e:
        raise NoEngines(str(e)) from e
    if not shipped:
        raise NoEngines("torchvision was built without nvJPEG")
    try:
        return ctypes.CDLL(str(shipped[0])), ctypes.PyDLL(str(shipped[0]))
    except OSError as e:
        raise NoEngines(f"nvJPEG cannot be loaded: {e}") from e
