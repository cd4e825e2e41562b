"""The source of records with several inputs: one source for each, whose values are packed into rows of bytes.

An input is an image if it holds encoded pictures, or uint8 arrays of two or three axes and is no mask. Images take
`input.transform`; everything else reaches the model as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from nimble_jobs.data.blocks import Give
from nimble_jobs.data.finite import not_finite
from nimble_jobs.data.records import Signature
from nimble_jobs.data.source import READY, Loaded, Source, Unblocked, Wanted, placed
from nimble_jobs.data.transform import OfImages
from nimble_jobs.errors import DataError
from nimble_jobs.packing import Gives, Part
from nimble_jobs.packing import Layout as Packing
from nimble_jobs.plural import count
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.picture_model import OfModel
from nimble_jobs.spec.transform import TransformSpec

_NO_IMAGES = ("mask", "ids")  # end the names of arguments whose bytes are flags or numbers of tokens


class Column(Protocol):
    """Where the values of one input come from, or of those that a text makes."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a row that it fills."""

    @property
    def source(self) -> Source: ...

    @property
    def is_image(self) -> bool:
        """Whether `input.transform` applies to it."""

    def fill(self, fields: np.ndarray, indexes: np.ndarray, give: Give | None, *, allow_nan: bool) -> dict[int, str]:
        """Write the good ones of these records into their rows of `fields`, a structured array [n] with a field for
        each part; why others are bad, by row.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One input of the model, and where its values come from."""

    part: Part
    source: Source
    stored: bool  # whether the values are packed as they are stored; else as the host makes them ready

    @classmethod
    def of(cls, path: str, source: Source, *, scalar: bool = False) -> Member:
        """The part that a source's records make. With `scalar` these are one number each, in a vector of one."""
        steps = source.preprocess
        if steps is None:  # only the host can prepare these
            shape, dtype = source.signature.shape, source.signature.dtype
            gives: Gives = "float" if dtype.startswith("float") else "integer"
            part = Part(path=path, shape=() if scalar else shape, dtype=dtype, gives=gives)
            return cls(part=part, source=source, stored=False)
        plain = steps.layout is None and steps.scale in (None, 1.0) and steps.mean is None and steps.std is None
        part = Part(
            path=path,
            shape=() if scalar else steps.shape,
            dtype=steps.dtype,
            gives="float" if not steps.whole else "bool" if plain and steps.dtype == "bool" else "integer",
            preprocess=None if plain else steps,
        )
        return cls(part=part, source=source, stored=True)

    @property
    def parts(self) -> tuple[Part, ...]:
        """As `Column` says."""
        return (self.part,)

    @property
    def is_image(self) -> bool:
        """As `Column` says."""
        return self.part.preprocess is not None

    def fill(self, fields: np.ndarray, indexes: np.ndarray, give: Give | None, *, allow_nan: bool) -> dict[int, str]:
        """As `Column` says."""
        field = fields[self.part.path]
        loaded = self.source.load(indexes, Wanted(stored=self.stored), give=give)
        bad = {row: f"{self.part.path}: {why}" for row, why in loaded.bad.items()}
        x = loaded.x.reshape(len(loaded.x), *self.part.stored)
        if not bad:
            field[...] = x
            rows = np.arange(len(indexes))
        else:
            rows = np.delete(np.arange(len(indexes)), list(bad))
            field[rows] = x
        if not allow_nan:
            for row, why in not_finite(loaded.x, self.source.preprocess if self.stored else None).items():
                at = int(rows[row])
                where = "" if self.source.lines else f"{self.source.place(int(indexes[at]))}: "
                bad[at] = f"{where}{self.part.path}: {why}"
        return bad


class OfArgument(FieldsSpec):
    """The fields of one of several inputs."""

    argument: str

    @property
    def which(self) -> str:
        return f"x.{self.argument}"


class SeveralSource(Unblocked):
    """Records of several inputs of one file. A record is bad if one of its inputs is."""

    def __init__(self, spec: InputSpec, members: Sequence[Column]) -> None:
        """The first member has the ids and labels. Raises DataError if a transform has no image to apply to."""
        first = members[0].source
        given = spec.transform != TransformSpec() and not isinstance(spec.transform, OfModel)
        if given and not any(member.is_image for member in members):
            raise DataError(
                f"{first.stamps[0].path}: input.transform: none of the inputs is an image; "
                "expected encoded pictures or uint8 arrays of 2 or 3 axes, or no transform"
            )
        self._members = members
        self._first = first
        self._allow_nan = spec.allow_nan
        self.packing = Packing(tuple(part for member in members for part in member.parts))
        self.signature = Signature(shape=(self.packing.nbytes,), dtype="uint8")
        self.preprocess: Preprocess | None = None
        self.total = first.total
        self.ids, self.labels, self.stamps, self.lines = first.ids, first.labels, first.stamps, first.lines
        self.piece = min((m.source.piece for m in members if m.source.piece is not None), default=None)
        self.notes = tuple(dict.fromkeys(note for member in members for note in member.source.notes))

    def place(self, index: int) -> str:
        return self._first.place(index)

    def check(self, indexes: np.ndarray) -> None:
        for member in self._members:
            member.source.check(indexes)

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        assert wanted == READY
        rows = self.packing.empty(len(indexes)) if into is None else into
        fields = self.packing.fields(rows)
        bad = self._odd(indexes)
        for number, member in enumerate(self._members):
            found = member.fill(fields, indexes, self._give(number, give), allow_nan=self._allow_nan)
            for row, why in found.items():
                bad.setdefault(row, why)
        if bad:
            rows = placed(np.delete(rows, list(bad), axis=0), rows)
        return Loaded(x=rows, bad=bad)

    def _give(self, number: int, give: Give | None) -> Give | None:
        """The blocks of one member; None: it keeps its own."""
        return None

    def _odd(self, indexes: np.ndarray) -> dict[int, str]:
        """Why some of these are no records at all."""
        return {}


def open_each(spec: InputSpec, path: Path, open_one: Callable[[InputSpec, Path], Source]) -> SeveralSource:
    """Several inputs of one file, each opened by itself. Raises DataError, also if they differ in their numbers."""
    sources = {argument: open_one(part, path) for argument, part in parts_of(spec).items()}
    (name, first), *others = sources.items()
    for argument, source in others:
        if source.total != first.total:
            raise DataError(
                f"{path}: input.fields.x: {argument} has {count(source.total, 'record')}; "
                f"expected {first.total:,}, as {name} has"
            )
    return SeveralSource(spec, [Member.of(argument, source) for argument, source in sources.items()])


def parts_of(spec: InputSpec) -> dict[str, InputSpec]:
    """For each argument, the spec of a job with this input alone. The first one has the ids and labels."""
    made: dict[str, InputSpec] = {}
    of_model = spec.transform if isinstance(spec.transform, OfModel) else None
    images = {} if of_model is not None else spec.transform.model_dump()
    for argument, name in (spec.fields.arguments or {}).items():
        others = {} if made else {"id": spec.fields.id, "label": spec.fields.label}
        fields = OfArgument(x=name, argument=argument, **others)
        transform = OfImages(**images, arrays=not argument.endswith(_NO_IMAGES), of_model=of_model)
        made[argument] = spec.model_copy(update={"fields": fields, "transform": transform})
    return made
