"""Opens the input of a spec for reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nimble_jobs.addresses import is_address
from nimble_jobs.data.arriving import Arriving
from nimble_jobs.data.joined import Joined, open_all
from nimble_jobs.data.labels import Targets
from nimble_jobs.data.listed import open_listed
from nimble_jobs.data.object_inputs import Origin
from nimble_jobs.data.reader import Reader
from nimble_jobs.data.source import Source, list_files
from nimble_jobs.data.stamps import Stamps
from nimble_jobs.data.text.fixed import AsTokens
from nimble_jobs.errors import DataError
from nimble_jobs.seen import FileList
from nimble_jobs.spec.formats import SUFFIXES
from nimble_jobs.spec.model import InputSpec


def open_reader(
    spec: InputSpec,
    *,
    label_names: Sequence[str] | None = None,
    targets: Targets = "classes",
    files: FileList | None = None,
    tokens: AsTokens | None = None,
    origin: Origin | None = None,
    arriving: Arriving | None = None,
    listing: Stamps | None = None,
) -> Reader:
    """A reader for `input` of a spec. `label_names` gives text labels the numbers that a training gave them.

    `files`: only these, as they were listed. A file that has changed or cannot be read makes bad records.
    `targets` says what labels are: classes, numbers (float32), shares (numbers from 0 to 1), or what the file holds:
    numbers if it holds fractions.
    `arriving`: images that are still being fetched, whose size the transform says; reading one waits for it.
    `listing`: all images of a folder, as another process has just found them.
    `origin`: the object store from which the input was fetched, which messages name.
    `tokens` is called if one of several inputs is a column of text, and says how that becomes tokens.
    Raises what `tokens` raises, and DataError, naming the file and the field, when the input is missing, empty or not
    what the spec says.
    """
    if is_address(spec.source):
        raise DataError(
            f"{spec.source}: is read by jobs only, which fetch it first; expected a local copy of some records"
        )
    try:
        source = _open(spec, files, tokens, arriving, listing)
        return Reader(source, allow_nan=spec.allow_nan, label_names=label_names, targets=targets, origin=origin)
    except DataError as e:
        if origin is None:
            raise
        raise DataError(origin.shown(str(e))) from e


def _open(
    spec: InputSpec,
    files: FileList | None,
    tokens: AsTokens | None,
    arriving: Arriving | None,
    listing: Stamps | None,
) -> Source:
    # Formats are imported here, because importing pyarrow and Pillow takes longer than running a small job.
    if spec.format == "images":
        from nimble_jobs.data.images import open_images

        return open_images(spec, files, arriving, listing)
    if spec.format == "openai-batch":
        from nimble_jobs.data.text.requests import open_requests

        return open_requests(list_files(spec.source, SUFFIXES[spec.format]))
    if spec.format == "text":
        from nimble_jobs.data.text.opening import open_texts

        return open_texts(spec, files)
    open_one = _opener(spec, tokens)
    if files is not None:
        return open_listed(files, open_one)
    found, empty = open_all(list_files(spec.source, SUFFIXES[spec.format]), open_one)
    parts = list(found.values())
    return parts[0] if len(parts) == 1 and not empty else Joined(parts, empty=empty)


def _opener(spec: InputSpec, tokens: AsTokens | None) -> Callable[[Path], Source]:
    if spec.format in ("npy", "npz"):
        from nimble_jobs.data.arrays import open_arrays

        if spec.fields.arguments is not None:
            from nimble_jobs.data.several import open_each

            return lambda path: open_each(spec, path, open_arrays)
        return lambda path: open_arrays(spec, path)
    if spec.format == "parquet":
        from nimble_jobs.data.parquet import open_parquet

        return lambda path: open_parquet(spec, path, tokens)
    from nimble_jobs.data.csv_file import open_csv

    return lambda path: open_csv(spec, path, tokens)
