"""Brings texts to the device: read → tokenise → sort into batches of equal length → upload.

Records are taken in windows of several shards. In a window they are sorted by length, so batches span shards, and the
window's shards are complete after its last batch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from nimble_jobs.data import BadRecord, Batch, Reader
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.data.ragged import Ragged
from nimble_jobs.data.records import TokenRows
from nimble_jobs.data.text.fixed import fill
from nimble_jobs.data.text.reading import Texts
from nimble_jobs.data.text.tokenizer import Tokens
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.packing import Layout
from nimble_jobs.pipeline import ahead, mapped
from nimble_jobs.planner import Loaded
from nimble_jobs.workloads.bad_records import BadRecords
from nimble_jobs.workloads.cuts import Bounds, Span
from nimble_jobs.workloads.parts import Part
from nimble_jobs.workloads.record_feed import UPLOADED, upload
from nimble_jobs.workloads.stages import Stages
from nimble_jobs.workloads.text.setup import TextSetup
from nimble_jobs.workloads.text.windows import plan

_WINDOWS = 1  # windows that wait to be cut into batches
_READY = 2  # batches that wait to be uploaded


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Texts of up to `length` tokens, `rows` of them in a batch."""

    length: int
    rows: int
    layout: Layout

    @property
    def nbytes(self) -> int:
        """The size of a batch."""
        return self.rows * self.layout.nbytes


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How the texts of an attempt are fed."""

    pads: bool  # whether short batches are padded
    threads: int  # that tokenize
    last: int  # the last shard that is to be written; -1: not known
    no_dimensions: str | None = None  # why no request of a batch file may choose the length of its vectors


@dataclass(kw_only=True)
class Counts:
    """What became of the texts that this attempt scored on this device."""

    records: int = 0
    cut: int = 0  # records that lost tokens
    tokens: int = 0
    padded: int = 0  # tokens with padding: all that the model was given
    by_bucket: list[int] = field(default_factory=list)  # records

    @property
    def padding_share(self) -> float:
        """0 to 1."""
        return 1 - self.tokens / self.padded if self.padded else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    texts: Texts
    first: int  # of the texts
    stop: int
    span: Span  # the window
    left: int  # records to be scored from the window's first on

    @property
    def last(self) -> bool:
        return self.stop >= len(self.texts.values)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Window:
    """The tokens of a window's records."""

    texts: Texts
    span: Span
    left: int  # records to be scored from its first on
    ids: np.ndarray  # int32 [tokens]
    types: np.ndarray | None
    offsets: np.ndarray | None  # int32 [tokens, 2]
    lengths: np.ndarray  # int32 [records]
    shortened: np.ndarray  # bool [records], those that lost tokens
    bad: dict[int, str]  # by position in the input

    def without(self, bad: dict[int, str]) -> _Window:
        """The window without the tokens of these records, which become its bad ones."""
        out = np.zeros(len(self.lengths), dtype=bool)
        out[np.fromiter(bad, dtype=np.int64, count=len(bad)) - self.texts.start] = True
        kept = ~np.repeat(out, self.lengths)
        return replace(
            self,
            ids=self.ids[kept],
            types=None if self.types is None else self.types[kept],
            offsets=None if self.offsets is None else self.offsets[kept],
            lengths=np.where(out, 0, self.lengths).astype(np.int32),
            shortened=self.shortened & ~out,
            bad=bad,
        )


class TextFeed:
    """The batches of texts, each for the lane of its bucket."""

    def __init__(
        self,
        reader: Reader,
        setup: TextSetup,
        lanes: Sequence[tuple[Bucket, Loaded]],
        turns: Iterable[tuple[Sequence[Span], int]],
        stages: Stages,
        *,
        bad: BadRecords,
        counts: Counts,
        manner: Manner,
    ) -> None:
        """`lanes` are buckets with their models. `turns` are windows that are known together, each time with how many
        records are to be scored after them: all windows at once, or those of one claim after another. `counts` is
        added to.
        """
        self.total = reader.total
        self.last = manner.last
        self._counts = counts
        self._reader, self._setup, self._turns = reader, setup, turns
        self._buckets, self._lanes = [bucket for bucket, _ in lanes], [loaded for _, loaded in lanes]
        self._stages, self.bad = stages, bad
        self._pads, self._threads = manner.pads, manner.threads
        self._requests, self._no_dimensions = reader.requests, manner.no_dimensions
        stages.tokenise.workers = manner.threads
        self._buffers: Buffers | None = None

    def arrived(self) -> Generator[tuple[Arrived | None, Part]]:
        """As `Feed` says."""
        for loaded in self._lanes:
            loaded.arrivals.begin()
        windows: Iterator[_Window] = self._tokenised()
        if self._stages.alone:
            return upload(self._parts(windows), self._lanes, pads=self._pads)
        self._buffers = self._lanes[0].buffers(max(bucket.nbytes for bucket in self._buckets))
        self._buffers.begin()
        windows = ahead(windows, _WINDOWS, name="nimble-windows")
        parts = ahead(self._parts(windows), _READY, name="nimble-batches")
        return ahead(upload(parts, self._lanes, pads=self._pads), UPLOADED, name="nimble-upload")

    def end(self) -> None:
        """As `Feed` says."""
        for loaded in self._lanes:
            loaded.arrivals.end()
        if self._buffers is not None:
            self._buffers.end()

    def close(self) -> None:
        """Nothing decodes."""

    def _tokenised(self) -> Generator[_Window]:
        """The tokens of whole windows. Pieces of the next window are tokenized meanwhile."""
        made: list[Tokens] = []
        done = mapped(
            self._tokens,
            self._pieces(),
            threads=self._threads,
            depth=2 * self._threads,
            name="nimble-tokenise",
        )
        with closing(done):
            for piece, tokens in done:
                made.append(tokens)
                if piece.last:
                    window = self._whole(piece, made)
                    self._counts.cut += int(window.shortened.sum())
                    yield window
                    made = []

    def _pieces(self) -> Generator[_Piece]:
        for spans, beyond in self._turns:
            ranges = [(span.start, span.stop) for span in spans]
            left = beyond + sum(stop - start for start, stop in ranges)
            with closing(self._reader.texts(ranges, meter=self._stages.read)) as windows:
                for span, texts in zip(spans, windows, strict=False):
                    if self._requests is not None and (why := self._no_dimensions) is not None:
                        texts.bad.update(self._requests.with_dimensions(texts.start, texts.stop, why))
                    piece = self._setup.tokenizer.piece
                    for first in range(0, len(texts.values), piece):
                        yield _Piece(texts=texts, first=first, stop=first + piece, span=span, left=left)
                    left -= span.stop - span.start

    def _tokens(self, piece: _Piece) -> tuple[_Piece, Tokens]:
        texts, first = piece.texts, piece.first
        some = texts.values[first : piece.stop]
        if texts.bad:
            some = [None if texts.start + first + i in texts.bad else text for i, text in enumerate(some)]
        with self._stages.tokenise.busy():
            return piece, self._setup.tokenizer(some)

    def _whole(self, piece: _Piece, made: Sequence[Tokens]) -> _Window:
        """A window from the tokens of its pieces. A request is left out whole if one of its texts is bad."""
        texts = piece.texts
        bad = dict(texts.bad)
        types = [one.types for one in made if one.types is not None]
        offsets = [one.offsets for one in made if one.offsets is not None]
        first = texts.start
        for tokens in made:
            bad.update({first + row: self._reader.in_field(first + row, why) for row, why in tokens.bad.items()})
            first += len(tokens.lengths)
        window = _Window(
            texts=texts,
            span=piece.span,
            left=piece.left,
            ids=np.concatenate([one.ids for one in made]),
            types=np.concatenate(types) if types else None,
            offsets=np.concatenate(offsets) if offsets else None,
            lengths=np.concatenate([one.lengths for one in made]),
            shortened=np.concatenate([one.shortened for one in made]),
            bad=bad,
        )
        return window if self._requests is None or not bad else window.without(self._requests.whole(bad))

    def _parts(self, windows: Iterator[_Window]) -> Generator[Part]:
        """Batches of each window, each bucket's together. Raises DataError for too many bad records."""
        lengths, rows = [b.length for b in self._buckets], [b.rows for b in self._buckets]
        with closing(windows):  # type: ignore[type-var]  # a generator
            for number, window in enumerate(windows):
                bad = tuple(self._reader.bad_record(index, why) for index, why in sorted(window.bad.items()))
                self.bad.add(bad)
                planned = plan(window.lengths, lengths, rows, pads=self._pads, descending=number % 2 == 1)
                starts = np.cumsum(window.lengths) - window.lengths
                left = window.left
                for one in planned:
                    batch = self._batch(window, starts, one.rows, one.bucket, bad if one is planned[0] else ())
                    if batch is None:  # the pipeline is closing
                        return
                    yield _placed(batch, one.bucket, window.span, left, last=one is planned[-1])
                    left -= len(batch) + len(batch.bad)
                if not planned:
                    yield _placed(self._empty(window, bad), 0, window.span, left, last=True)

    def _batch(
        self, window: _Window, starts: np.ndarray, some: np.ndarray, number: int, bad: tuple[BadRecord, ...]
    ) -> Batch | None:
        """A batch of these records of a window; None once there are no more buffers."""
        bucket = self._buckets[number]
        buffer = None
        if self._buffers is None:
            rows = bucket.layout.empty(len(some))
        elif (buffer := self._buffers.take()) is None:
            return None
        else:
            rows = buffer.array[: len(some) * bucket.layout.nbytes].reshape(len(some), bucket.layout.nbytes)
            rows[:] = 0
        lengths, padding = window.lengths[some], self._setup.padding
        fill(bucket.layout.fields(rows), window.ids, window.types, starts[some], lengths, padding)
        indexes = window.texts.start + some
        counts, taken = self._counts, int(lengths.sum())
        counts.records += len(some)
        counts.tokens += taken
        counts.padded += (bucket.rows if self._pads else len(some)) * bucket.length
        counts.by_bucket[number] += len(some)
        return Batch(
            start=window.texts.start,
            stop=window.texts.stop,
            indexes=indexes,
            ids=self._reader.ids(indexes),
            x=rows,
            labels=self._reader.labels(indexes),
            bad=bad,
            buffer=buffer,
            tokens=TokenRows(
                lengths=lengths,
                shortened=window.shortened[some],
                ids=Ragged(window.ids, window.lengths).take(some) if self._setup.wants_tokens else None,
                offsets=None if window.offsets is None else Ragged(window.offsets, window.lengths).take(some),
            ),
        )

    def _empty(self, window: _Window, bad: tuple[BadRecord, ...]) -> Batch:
        return Batch(
            start=window.texts.start,
            stop=window.texts.stop,
            indexes=np.empty(0, dtype=np.int64),
            ids=[],
            x=self._buckets[0].layout.empty(0),
            labels=None,
            bad=bad,
        )


def _placed(batch: Batch, lane: int, span: Span, left: int, *, last: bool) -> Part:
    at = Bounds(shard=span.last, since=span.first, start=span.start, stop=span.stop, last=last, left=left)
    return Part(at=at, batch=batch, lane=lane)
