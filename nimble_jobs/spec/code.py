"""Python files of a spec, which may run only from allowed folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nimble_jobs.errors import UsageError
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import parse_source


def refused(spec: JobSpec, folders: Sequence[Path]) -> list[str]:
    """A message for each `python:` source outside the allowed folders."""
    return [why_refused(field, path) for field, path in _python_files(spec) if not allowed(path, folders)]


def check(spec: JobSpec, folders: Sequence[Path]) -> None:
    """Raises UsageError if a `python:` source of the spec is outside the allowed folders."""
    if messages := refused(spec, folders):
        raise UsageError("\n".join(messages))


def allowed(path: Path, folders: Sequence[Path]) -> bool:
    """Whether the file, symbolic links resolved, lies below one of the folders."""
    real = path.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def why_refused(field: str, path: Path) -> str:
    """The message about a file that is not allowed; `field` is the spec's."""
    return f"{field}: {path.resolve()} may not be run; {how_to_allow(path)}"


def how_to_allow(path: Path) -> str:
    """How to allow the folder of the file, for a message."""
    folder = path.resolve().parent
    return f"allow its folder with --allow-python {folder} or NIMBLE_JOBS_ALLOW_PYTHON={folder}"


def _python_files(spec: JobSpec) -> Iterator[tuple[str, Path]]:
    """The field and the file of each source that is Python."""
    sources = {"model.source": spec.model.source}
    if spec.train is not None and ":" in spec.train.loss:
        sources["train.loss"] = spec.train.loss
    for field, text in sources.items():
        source = parse_source(text)
        if source.scheme == "python":
            yield field, Path(source.target)
