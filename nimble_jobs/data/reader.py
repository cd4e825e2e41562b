"""One reader for every format: batches in order with read-ahead, or records at any positions; bad records apart."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np

from nimble_jobs.chance import RandomCrops
from nimble_jobs.data import labels as label_values
from nimble_jobs.data.answers import Requests
from nimble_jobs.data.batches import Ahead, Part, Room, read_ahead
from nimble_jobs.data.blocks import Window, shuffle_note, window_over
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.data.crew import FEW, FEW_RUNNING, PIECE_AWAY, PIECE_ENCODED, Crew
from nimble_jobs.data.encoded import decoders_of, pictures_of, row_bytes
from nimble_jobs.data.finite import not_finite
from nimble_jobs.data.ids import check_ids
from nimble_jobs.data.labels import Targets
from nimble_jobs.data.object_inputs import Origin
from nimble_jobs.data.records import BadRecord, Batch, Signature
from nimble_jobs.data.source import READY, Form, Loaded, Source, Wanted, form_of, packing_of, placed
from nimble_jobs.data.stamps import Stamps, fingerprint, shared
from nimble_jobs.errors import DataError
from nimble_jobs.packing import Layout as Packing
from nimble_jobs.pipeline import Meter
from nimble_jobs.preprocess import Preprocess

if TYPE_CHECKING:  # imported here, so that only jobs with pictures load Pillow
    from nimble_jobs.data.text.reading import Texts
    from nimble_jobs.decoding.pool import Decoders
    from nimble_jobs.decoding.recipe import Recipe


class Reader:
    """Records of one input. Counts and types come from headers; records are read on demand.

    `signature` describes one record after the transform, `label_names` holds the class names if labels are text, and
    `fingerprint` changes with every file of the input. `preprocess` lists the steps that remain for stored records;
    None: records are available only after the transform. `packing` is the layout of records with several inputs.
    """

    def __init__(
        self,
        source: Source,
        *,
        allow_nan: bool,
        label_names: Sequence[str] | None = None,
        targets: Targets = "classes",
        origin: Origin | None = None,
    ) -> None:
        if source.total == 0:
            raise DataError(f"{source.stamps[0].path}: no records; expected at least one")
        where = source.stamps[0].path
        self._ids = source.ids
        if source.ids is not None:
            self._ids = check_ids(source.ids, f"{where}: input.fields.id", source.place if source.lines else None)
        self._labels: label_values.Labels | None = None
        if source.labels is not None:
            why = getattr(source, "unlabelled", None)
            at = f"{where}: input.fields.label"
            self._labels = label_values.read(source.labels, source.total, targets, label_names, where=at, why=why)
        self._source = source
        self.origin = origin  # if it was fetched from an object store
        self._allow_nan = allow_nan
        self.total: int = source.total
        self.signature: Signature = source.signature
        self.preprocess: Preprocess | None = source.preprocess
        self.packing: Packing | None = packing_of(source)
        self.listing = source.stamps if isinstance(source.stamps, Stamps) else None  # if each file is a record
        self._crew: Crew | None = None  # processes that decode pictures
        self.left_out: dict[str, str] = getattr(source, "left_out", {})  # listed files without records, and the reasons

    @property
    def requests(self) -> Requests | None:
        """The requests that the records belong to, if the input is a batch file."""
        found: Requests | None = getattr(self._source, "requests", None)
        return found

    @property
    def has_labels(self) -> bool:
        return self._labels is not None

    @property
    def quick(self) -> bool:
        """Whether records are taken from arrays and need no decoding."""
        return self._source.piece is None

    @property
    def in_blocks(self) -> bool:
        """Whether records are decoded in blocks, which costs little only in order."""
        return self._source.layout is not None

    @property
    def label_names(self) -> tuple[str, ...] | None:
        return self._labels.names if self._labels is not None else None

    def number_labels(self, names: Sequence[str]) -> None:
        """Number labels as a model numbers these names. Numbers, and names that it has none of, stay as they are."""
        labels = self._labels
        if labels is not None and labels.names is not None and not set(labels.names).isdisjoint(names):
            self._labels = labels.numbered_as(names)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self._source.stamps) if self.origin is None else self.origin.digest

    def files_of(self, other: Reader) -> list[str]:
        """The files of another reader that this one reads, too."""
        found = [other._source.stamps[i].path for i in shared(other._source.stamps, self._source.stamps)]
        return found if other.origin is None else [other.origin.shown(path) for path in found]

    def id(self, index: int) -> str:
        """The stable id of the record at a position: its path, the id column's value, or the position itself."""
        return str(index) if self._ids is None else self._ids[index]

    def place(self, index: int) -> str:
        """The place of a record for messages: FILE:LINE, FILE: record N, or an image's file."""
        place = self._source.place(int(index))
        return place if self.origin is None else self.origin.shown(place)

    def listed_file(self, index: int) -> str:
        """The file that holds a record, as it was listed. Only for inputs that were opened by a list of files."""
        return str(self._source.file_of(int(index)))  # type: ignore[attr-defined]  # only such sources have it

    def notes(self, *, shuffled: bool = False) -> list[str]:
        """Notes for users about memory or time; `shuffled`: records are read in random order."""
        texts = list(self._source.notes)
        layout = self._source.layout
        if shuffled and layout is not None and layout.count > 1:
            whole = self.total * form_of(self._source, stored=self.preprocess is not None).nbytes
            texts.append(shuffle_note(whole))
        return texts

    def batches(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        batch_size: int,
        order: np.ndarray | None = None,
        bounds: Iterable[tuple[int, int]] | None = None,
        wanted: Wanted = READY,
        buffers: Buffers | None = None,
        meter: Meter | None = None,
    ) -> Generator[Batch]:
        """Batches over positions [start, stop), the last one possibly short; or exactly those of `bounds`, which may be
        found out one by one as they are read, if not `in_blocks`.

        With `order`, positions in that array of record indexes. `wanted.stored` needs `preprocess`. `wanted.encoded`
        needs `decodes`: `x` has no rows then, and a buffer takes `encoded_bytes` for each record. `wanted.crops` needs
        `decodes` too; of encoded pictures the device is to take the part (`RandomCrops.rectangles`). With `buffers`,
        each batch is at the beginning of one of them, and its consumer releases it. `meter` counts the
        work of those who read and decode.

        Closing the generator ends its threads. It ends early once the buffers do. Raises DataError when the input
        changed or vanished.
        """
        end = self.total if order is None else len(order)
        stop = end if stop is None else min(stop, end)
        if bounds is None:
            bounds = [(a, min(a + batch_size, stop)) for a in range(start, stop, batch_size)]

        def indexes(first: int, last: int) -> np.ndarray:
            if order is None:
                if window is not None:
                    window.want(first, last)
                return np.arange(first, last, dtype=np.int64)
            return np.asarray(order[first:last], dtype=np.int64)

        form = form_of(self._source, stored=wanted.stored)
        if wanted.encoded:
            form = Form(shape=(self.encoded_bytes,), dtype="uint8")
        if self._crew is not None:
            ahead = Ahead.away(_piece(encoded=wanted.encoded), self._crew.decoders.workers, batch_size)
        else:
            several = not isinstance(bounds, Sequence) or len(bounds) > 1
            ahead = Ahead.of(self._source.piece, batch_size, form, several=several)
        window = window_over(self._source, bounds) if order is None else None
        load = partial(self._load, wanted=wanted, window=window)
        with ExitStack() as opened:
            if self._crew is not None:
                opened.enter_context(self._crew.lend(buffers))
            if window is not None:
                opened.callback(window.close)
            rooms = read_ahead(load, bounds, indexes, form, ahead=ahead, buffers=buffers, meter=meter)
            opened.callback(rooms.close)
            for room, parts in rooms:
                yield self._batch(room, parts, encoded=wanted.encoded)

    def texts(self, ranges: Sequence[tuple[int, int]], *, meter: Meter | None = None) -> Generator[Texts]:
        """The texts of ascending ranges of positions, read ahead, with the reasons for bad records by position.

        Only if the input's format is text. Closing the generator ends its threads. Raises DataError when the input
        changed or vanished.
        """
        from nimble_jobs.data.text.reading import read_texts

        unlabelled = self._labels.bad if self._labels is not None else {}
        for texts in read_texts(self._source, ranges, meter=meter):
            for index, why in unlabelled.items():
                if texts.start <= index < texts.stop:
                    texts.bad.setdefault(index, why)
            yield texts

    def ids(self, indexes: np.ndarray) -> list[str]:
        """The ids of the records at these positions."""
        return [str(i) for i in indexes.tolist()] if self._ids is None else self._ids.take(indexes)

    def labels(self, indexes: np.ndarray) -> np.ndarray | None:
        """The labels of the records at these positions; None if the input has none."""
        return None if self._labels is None else self._labels.values[indexes]

    def in_field(self, index: int, why: str) -> str:
        """What is wrong with a text, behind the field of its request if the input is a batch file."""
        field: Callable[[int], str] | None = getattr(self._source, "field", None)
        return why if field is None else f"{field(index)}: {why}"

    def bad_record(self, index: int, why: str) -> BadRecord:
        """The record at a position, left out for this reason."""
        reason = f"{self.place(index)}: {why}" if self._source.lines else why
        return BadRecord(index=index, id=self.id(index), reason=reason)

    def take(self, indexes: np.ndarray) -> Batch:
        """The records at these positions, in this order, as one batch."""
        positions = np.asarray(indexes, dtype=np.int64)
        if positions.size and (positions.min() < 0 or positions.max() >= self.total):
            raise IndexError(f"record indexes must lie in [0, {self.total})")
        (batch,) = self.batches(batch_size=max(1, positions.size), order=positions, bounds=[(0, positions.size)])
        return batch

    def _load(self, indexes: np.ndarray, into: np.ndarray, *, wanted: Wanted, window: Window | None) -> Loaded:
        """Load records into `into`. Good rows are packed to its beginning, unless they are encoded."""
        loaded = self._source.load(indexes, wanted, into=into, give=window)
        if window is not None:
            window.done(int(indexes[0]), int(indexes[-1]) + 1)
        bad = dict(loaded.bad)
        if self._labels is not None and self._labels.bad:
            bad.update(
                {
                    i: self._labels.bad[n]
                    for i, n in enumerate(indexes.tolist())
                    if i not in bad and n in self._labels.bad
                }
            )
        if wanted.encoded:
            return replace(loaded, bad=bad)
        x = loaded.x
        rows = np.array([i for i in range(len(indexes)) if i not in loaded.bad], dtype=np.int64) if bad else None
        if not self._allow_nan:
            places = np.arange(len(indexes)) if rows is None else rows
            for row, reason in not_finite(x, self.preprocess if wanted.stored else None).items():
                bad.setdefault(int(places[row]), reason)
        if len(bad) > len(loaded.bad):
            places = np.arange(len(indexes)) if rows is None else rows
            x = placed(x[[int(p) not in bad for p in places]], into)
        return Loaded(x=x, bad=bad, busy_s=loaded.busy_s)

    def _batch(self, room: Room, parts: Sequence[Part], *, encoded: bool) -> Batch:
        try:
            self._source.check(np.concatenate([indexes for indexes, _ in parts]) if parts else np.empty(0, np.int64))
            return self._whole(room, parts, encoded=encoded)
        except BaseException:
            if room.buffer is not None:
                room.buffer.release()
            raise

    def _whole(self, room: Room, parts: Sequence[Part], *, encoded: bool) -> Batch:
        bad: list[BadRecord] = []
        good: list[np.ndarray] = []
        for indexes, loaded in parts:
            for i in sorted(loaded.bad):
                bad.append(self.bad_record(int(indexes[i]), loaded.bad[i]))
            good.append(np.delete(indexes, list(loaded.bad)) if loaded.bad else indexes)
        kept = np.concatenate(good) if good else np.empty(0, dtype=np.int64)
        return Batch(
            start=room.start,
            stop=room.stop,
            indexes=kept,
            ids=self.ids(kept),
            x=room.rows[: 0 if encoded else len(kept)],
            labels=self.labels(kept),
            bad=tuple(bad),
            buffer=room.buffer,
            pictures=pictures_of(room.rows, parts) if encoded else None,
        )

    @property
    def decodes(self) -> bool:
        """Whether records are encoded pictures."""
        return bool(decoders_of(self._source))

    def hire(self, decoders: Decoders) -> None:
        """Let processes decode pictures until `close`, if there are enough pictures. Results are the same."""
        few = FEW_RUNNING if decoders.running else FEW
        if self._crew is None and self.decodes and self.total >= few:
            decoders.start()
            found = decoders_of(self._source)
            self._crew = Crew(decoders, max(PIECE_AWAY * self.recipe.nbytes, self.encoded_bytes))
            for decoder in found:
                decoder.crew = self._crew

    def at_once(self, batch_size: int, *, encoded: bool) -> int:
        """How many batches must be read at once so that each reading process has work; 0 if threads read."""
        if self._crew is None:
            return 0
        pieces = -(-batch_size // _piece(encoded=encoded))  # of a batch
        return -(-self._crew.decoders.workers // pieces)

    @property
    def recipe(self) -> Recipe:
        """How each picture is decoded and resized. Only if `decodes`."""
        return decoders_of(self._source)[0].recipe

    @property
    def encoded_bytes(self) -> int:
        """Bytes for a picture in a batch of encoded pictures. Larger ones are decoded on the host."""
        return row_bytes(self._source)

    def redo(self, index: int, crops: RandomCrops | None = None) -> np.ndarray | str:
        """uint8 [H, W, C] of one picture, decoded on the host, or why it is a bad record. Thread-safe."""
        loaded = self._source.load(np.array([index]), Wanted(stored=True, crops=crops))
        return loaded.bad[0] if loaded.bad else loaded.x[0]

    def close(self) -> None:
        """Release files and processes."""
        if self._crew is not None:
            for decoder in decoders_of(self._source):
                decoder.crew = None
            self._crew.close()
            self._crew = None
        del self._source

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _piece(*, encoded: bool) -> int:
    """Pictures that a process is given at a time."""
    return PIECE_ENCODED if encoded else PIECE_AWAY
