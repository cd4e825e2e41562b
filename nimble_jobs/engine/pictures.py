"""Decodes JPEGs to rows of pixels on the device, in batches, and resizes and crops them there.

Two decoders in two threads keep the device's decoding engines busy: while one resizes, the other decodes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
import torch

from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine import enqueue, jpeg_engines, nvjpeg, streams
from nimble_jobs.engine.blank import BlankMemory
from nimble_jobs.engine.device import able
from nimble_jobs.engine.jpeg_engines import JpegEngines
from nimble_jobs.engine.resize import Planes, Tables, fitting, resize_into
from nimble_jobs.engine.salvage import portions, salvage
from nimble_jobs.pictures import Pictures

_AT_ONCE_BYTES = 256 << 20  # of decoded pictures in one call, unless one alone is larger
_TAKES = 4  # decoding takes so many times as much: decoded pictures, memory the allocator keeps, nvJPEG's buffers
_SHARE = 64  # a call takes at most this fraction (1/64) of the device's memory
_ALIGNED = 256  # bytes; where the planes of a picture begin
_LARGE_BYTES = 10 << 20  # above it, torch's allocator keeps separate memory for each size


class PictureDecoder:
    """Decodes batches to rows of pixels, as a recipe says.

    For one thread at a time. On the CPU it is a stand-in with the same results up to what decoders differ by.
    Device memory: `memory_bytes` at most, of which torch keeps what it allocated for later decoders, and nvJPEG its own
    buffers to the end of the process.
    """

    def __init__(
        self,
        device: torch.device,
        recipe: Recipe,
        *,
        decode: nvjpeg.Decode | None = None,
        at_once_bytes: int | None = None,
    ) -> None:
        """Raises RuntimeError if torchvision's decoders cannot be loaded; call `picture_trial.available` first."""
        self.device = torch.device(device.type, device.index or 0) if device.type == "cuda" else device
        self.refusals: Counter[str] = Counter()  # how many pictures were not decoded here, by reason
        # Happens when the rows of the last `decode` are complete; None on the CPU.
        self.done: torch.cuda.Event | None = None
        self._recipe = recipe
        self._decode = decode or nvjpeg.decoder(self.device, recipe.channels)
        self._at_once = nvjpeg.together() if decode is None else None
        self._at_once_bytes = at_once_bytes or _at_once_bytes(self.device)
        self._grown_bytes = 0  # what the allocator took for large pictures since its cache was last emptied
        self._stream: torch.cuda.Stream | None = None
        if able(self.device).streams:
            self._stream = streams.take(self.device, urgent=True)
            self.done = torch.cuda.Event()
        self._tables = Tables(self.device)
        self._memory = BlankMemory(self.device, self._at_once_bytes)
        self._used: tuple[torch.Tensor, int, int] | None = None  # the engines' pictures: memory, bytes, number
        self._uses_engines = decode is None
        # While it decodes, and before it first does: making them takes a while, and jobs do that before they begin.
        self._engines = jpeg_engines.take(self.device, recipe.channels) if self._uses_engines else None

    @property
    def memory_bytes(self) -> int:
        """Device memory that decoding may take at most, pictures above `_AT_ONCE_BYTES` apart."""
        return _TAKES * self._at_once_bytes if able(self.device).separate_memory else 0

    def decode(
        self,
        pictures: Pictures,
        out: torch.Tensor,
        *,
        boxes: np.ndarray | None = None,
        after: torch.cuda.Event | None = None,
    ) -> tuple[int, ...]:
        """Fill row i of `out`, uint8 [>= n, height, width, channels] on the device, with picture i.

        Returns the rows that failed, ascending; they hold nothing of use. On a GPU the others are there once `done` has
        happened, while the bytes of `pictures` may be overwritten at once. `out` is written after `after`.
        `boxes` int32 [n, 4] (top, left, height, width): resize only this part of each JPEG, to the whole of its row.
        What holds pixels already is copied as it is.
        Raises OutOfMemory, and DeviceFault or torch.AcceleratorError for a lost device.
        """
        self._check(pictures, out, boxes)
        encoded = np.flatnonzero(~pictures.decoded)
        fits = (
            np.ones(len(encoded), dtype=bool) if boxes is not None else fitting(self._recipe, pictures.sizes[encoded])
        )
        failed = encoded[~fits].tolist()
        if failed:
            self.refusals["its size does not fit"] += len(failed)
        encoded = encoded[fits]
        sizes = pictures.sizes[encoded].astype(np.int64).prod(axis=1) * self._recipe.channels
        with self._at_work():
            for start, stop in portions(sizes.tolist(), self._at_once_bytes):
                large = int(sizes[start:stop].max()) >= _LARGE_BYTES
                rows = encoded[:0]
                try:
                    rows, decoded = self._decoded(pictures, encoded[start:stop], failed, large=large)
                    parts = None if boxes is None else boxes[rows]
                    resize_into(out, decoded, rows, self._recipe, parts, tables=self._tables, after=after)
                finally:
                    failed += self._left_out(rows)
            self._wait(after)
            self._copy(pictures, out)
            if self.done is not None and self._stream is not None:
                enqueue.record(self.done, self._stream)
        return tuple(sorted(failed))

    def close(self) -> None:
        """Wait for all work, and leave stream and engines to the next decoder. May be called more than once."""
        stream, self._stream = self._stream, None
        engines, self._engines = self._engines, None
        if stream is not None:
            stream.synchronize()
            self._memory.drop()
            if engines is not None:
                jpeg_engines.give_back(engines)
            streams.give_back(stream)  # with the memory that the allocator cached for it

    def _check(self, pictures: Pictures, out: torch.Tensor, boxes: np.ndarray | None) -> None:
        shape = self._recipe.shape
        if out.dtype != torch.uint8 or tuple(out.shape[1:]) != shape or not out.is_contiguous():
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; expected contiguous uint8 [n, {shape}]")
        if len(out) < len(pictures) or (boxes is not None and len(boxes) != len(pictures)):
            raise ValueError(f"{len(pictures)} pictures need as many rows, and as many boxes")
        if boxes is not None:
            ends = boxes[:, :2].astype(np.int64) + boxes[:, 2:]
            outside = (boxes[:, :2] < 0) | (boxes[:, 2:] < 1) | (ends > pictures.sizes)
            if (outside.any(axis=1) & ~pictures.decoded).any():
                raise ValueError("boxes must lie in their pictures, and hold at least one pixel")

    def _decoded(
        self, pictures: Pictures, rows: np.ndarray, failed: list[int], *, large: bool
    ) -> tuple[np.ndarray, Planes]:
        """The rows that could be decoded, and their pictures. All other rows are added to `failed`."""
        self._settle()
        self._tables.make(len(rows))
        reserved = torch.cuda.memory_reserved(self.device) if large and self._stream is not None else 0
        if self._engines is None or self._stream is None:
            rows, planes = self._by_torchvision(pictures, rows, failed)
        else:
            rows, planes = self._by_engines(self._engines, self._stream, pictures, rows, failed)
        if reserved:
            self._grown_bytes += max(0, torch.cuda.memory_reserved(self.device) - reserved)
        return rows, planes

    def _by_engines(
        self,
        engines: JpegEngines,
        stream: torch.cuda.Stream,
        pictures: Pictures,
        rows: np.ndarray,
        failed: list[int],
    ) -> tuple[np.ndarray, Planes]:
        """`_decoded` by the GPU's JPEG engines; torchvision decodes what they do not take."""
        addresses = pictures.data.ctypes.data + pictures.spans[rows, 0]
        lengths, sizes = pictures.spans[rows, 1], pictures.sizes[rows].astype(np.int64)
        verdicts = engines.judge(addresses, lengths, sizes, pictures.alike[rows])
        takes = verdicts == jpeg_engines.TAKES
        broken, others = rows[verdicts == jpeg_engines.BROKEN], rows[verdicts == jpeg_engines.OTHERS]
        if len(broken):
            failed += broken.tolist()
            self.refusals["nvJPEG cannot read its header"] += len(broken)
        room = -(-self._recipe.channels * sizes.prod(axis=1) // _ALIGNED) * _ALIGNED * takes
        # A damaged picture may leave part of its memory as it was, which must not be another picture.
        nbytes = int(room.sum())
        flat = self._memory.take(nbytes, stream)
        targets = flat.data_ptr() + np.cumsum(room) - room
        mine = np.flatnonzero(takes)
        if len(mine):
            self._used = flat, nbytes, len(mine)
            try:
                engines.decode(addresses[mine], lengths[mine], sizes[mine], targets[mine], stream.cuda_stream)
            except RuntimeError as e:
                self._engines = None  # what failed may never finish again, so nobody gets these any more
                stream.synchronize()  # the host's bytes have been read, and nothing is written any more
                self.refusals[nvjpeg.refusal(e, self.device)] += len(mine)
                failed += rows[mine].tolist()
                mine, self._used = mine[:0], None
                self._engines = jpeg_engines.take(self.device, self._recipe.channels)
        planes = Planes(addresses=targets[mine], sizes=sizes[mine], held=(flat,))
        if not len(others):
            return rows[mine], planes
        more, theirs = self._by_torchvision(pictures, others, failed)
        return np.concatenate([rows[mine], more]), planes.and_(theirs)

    def _left_out(self, rows: np.ndarray) -> list[int]:
        """Those of the rows just resized whose pictures the engines did not write, though they reported success.

        A grey picture may look like them; another decoder then has to decode it. Waits for the stream, after which the
        host's bytes have been read.
        """
        used, self._used = self._used, None
        if used is None or self._stream is None:
            return []
        flat, nbytes, count = used
        self._memory.give_back(flat, nbytes, self._stream)
        blank = np.flatnonzero(self._tables.blank(min(count, len(rows))))
        if len(blank):
            self.refusals["the device reported a picture that it had not decoded"] += len(blank)
        left_out: list[int] = rows[blank].tolist()
        return left_out

    def _by_torchvision(self, pictures: Pictures, rows: np.ndarray, failed: list[int]) -> tuple[np.ndarray, Planes]:
        """`_decoded` by torchvision."""
        data = torch.from_numpy(pictures.data)
        planes = self._together(data, pictures, rows)
        if planes is not None:
            return rows, planes
        self._settle()
        return self._one_by_one(data, pictures, rows, failed)

    def _one_by_one(
        self, data: torch.Tensor, pictures: Pictures, rows: np.ndarray, failed: list[int]
    ) -> tuple[np.ndarray, Planes]:
        """`_decoded` in ever smaller batches, until each picture that fails is alone."""
        spans = [data[offset : offset + length] for offset, length in pictures.spans[rows].tolist()]
        decoded = salvage(spans, self._decode, self._refused)
        kept, good = [], []
        for row, size, picture in zip(rows.tolist(), pictures.sizes[rows].tolist(), decoded, strict=True):
            if picture is not None and picture.shape == (self._recipe.channels, *size):
                kept.append(row)
                good.append(picture)
                continue
            failed.append(row)
            if picture is not None:
                self.refusals["its header gives another size"] += 1
        return np.array(kept, dtype=np.int64), Planes.of(good)

    def _together(self, data: torch.Tensor, pictures: Pictures, rows: np.ndarray) -> Planes | None:
        """All pictures by one call; None if one of them cannot be decoded, or is not what its header says."""
        if self._at_once is None or not len(rows):
            return None
        offsets, lengths = (pictures.spans[rows, i].tolist() for i in (0, 1))
        try:
            flat, shapes = self._at_once(data, offsets, lengths, nvjpeg.mode_of(self._recipe.channels), self.device)
        except RuntimeError:  # decoding one by one shows which picture is at fault
            return None
        sizes = np.array(shapes, dtype=np.int64).reshape(-1, 3)
        if (sizes[:, 0] != self._recipe.channels).any() or (sizes[:, 1:] != pictures.sizes[rows]).any():
            return None
        return Planes.together(flat, self._recipe.channels, sizes[:, 1:])

    def _refused(self, _: int, error: RuntimeError) -> None:
        self.refusals[nvjpeg.refusal(error, self.device)] += 1

    def _settle(self) -> None:
        """Wait until no kernel reads decoded pictures: nvJPEG is about to write to their memory, and asks no stream."""
        if self._stream is None:
            return
        if not enqueue.idle(self._stream):
            self._stream.synchronize()
        if self._grown_bytes > 2 * self._at_once_bytes:
            torch.cuda.empty_cache()  # memory kept for other sizes would add up
            self._grown_bytes = 0

    def _copy(self, pictures: Pictures, out: torch.Tensor) -> None:
        """Copy records that hold pixels already; the host's bytes may be overwritten when this returns."""
        rows = np.flatnonzero(pictures.decoded)
        if not len(rows):
            return
        data, row_bytes = torch.from_numpy(pictures.data), out[0].numel()
        offsets = pictures.spans[rows, 0]
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(offsets) != row_bytes)) + 1
        for run in np.split(np.arange(len(rows)), breaks):
            first, offset = int(rows[run[0]]), int(offsets[run[0]])
            pixels = data[offset : offset + len(run) * row_bytes].view(len(run), *out.shape[1:])
            out[first : first + len(run)].copy_(pixels, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _wait(self, after: torch.cuda.Event | None) -> None:
        if self._stream is not None and after is not None:
            enqueue.wait(self._stream, after)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Inside, the decoder's stream is the current one, and it has engines that nobody else uses."""
        if not able(self.device).streams:
            yield
            return
        assert self._stream is not None, "the decoder was closed"
        if self._uses_engines and self._engines is None:
            self._engines = jpeg_engines.take(self.device, self._recipe.channels)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                yield
            if self._engines is not None:
                jpeg_engines.give_back(self._engines)  # not after an error: they may still be at work
        finally:
            self._engines = None


def memory_bytes(device: torch.device) -> int:
    """Device memory that a decoder there may take at most; see `PictureDecoder.memory_bytes`."""
    return _TAKES * _at_once_bytes(device) if able(device).separate_memory else 0


def _at_once_bytes(device: torch.device) -> int:
    if not able(device).separate_memory:
        return _AT_ONCE_BYTES
    return min(_AT_ONCE_BYTES, int(torch.cuda.get_device_properties(device).total_memory) // _SHARE)


def decoder_name() -> str:
    """Name and version of the device's decoder, for the manifest."""
    return f"torchvision {version('torchvision')} (nvJPEG)"
