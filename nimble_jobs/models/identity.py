"""Describes, in readable parts, what decides a model's structure. Neither builds the model nor needs torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Collection, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from nimble_jobs import machine
from nimble_jobs.errors import ModelError
from nimble_jobs.models.files_read import state_of, weights_in
from nimble_jobs.models.local_files import local_files
from nimble_jobs.models.source import source_of, weights_entry, weights_file
from nimble_jobs.models.steady import steady
from nimble_jobs.models.unversioned import unversioned_code
from nimble_jobs.regular import NotRegular, check_regular, open_regular, read_regular
from nimble_jobs.sentence import is_folder, transformer_folder
from nimble_jobs.sentence.sources import MODULES, inside, modules_of
from nimble_jobs.spec.model import ModelSpec
from nimble_jobs.spec.paths import Source

# Names under which transformers keeps the weights of a folder.
FOLDER_WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# Entries of torchvision with which its builders set nothing but the 1000 classes that are their default, and the models
# of which they change more: the steps before the first layer, and the auxiliary outputs.
_PLAIN_ENTRIES = ("IMAGENET1K_V1", "IMAGENET1K_V2")
_CHANGED_BY_ENTRIES = ("googlenet", "inception_v3")
_LISTED = re.compile(r'^"?([^/,".]+)(?:/|\.[^/,]+,)', re.MULTILINE)  # what can be imported, in a list of files


def identity(spec: ModelSpec) -> dict[str, str]:
    """Everything that decides which operators the model runs: source, package versions, file digests, arguments, dtype.

    Weights and seed are not in it, and no absolute path: the same model in another folder has the same identity. Names
    of torchvision weights are in it where they may choose sizes and input steps too. Raises ModelError for a missing
    file or package, ModelChanged where this process has imported code of the model that has changed since.
    """
    source = source_of(spec)
    path = Path(source.target)
    parts = {"model.args": _canonical(spec.args), "model.dtype": spec.dtype}
    entry = weights_entry(spec)
    if entry is not None and (entry not in _PLAIN_ENTRIES or source.target in _CHANGED_BY_ENTRIES):
        parts["model.weights_entry"] = entry
    match source.scheme:
        case "torchvision" | "timm":
            parts["model.source"] = str(source)
            parts["model.package"] = _package(source.scheme)
        case "transformers":
            config = existing(transformer_folder(path) / "config.json")
            parts["model.source"] = f"transformers:{_architecture(config)}"
            parts["model.package"] = _package("transformers")
            parts["model.file:config.json"] = _digest(config)
        case "exported":
            parts["model.source"] = f"exported:{path.name}"
            parts[f"model.file:{path.name}"] = _digest(existing(path))
        case _:
            parts.update(python_identity(source))
    return dict(sorted(parts.items()))


def weights_identity(spec: ModelSpec) -> str:
    """Which weights the model gets, found cheaply: path, size, time of change and inode of a file; or the seed.

    Files that arguments of a Python model name count as weights, and so do weights right inside of such folders.
    Raises ModelError if a file that the spec names does not exist.
    """
    entry = weights_entry(spec)
    if entry is not None:
        return f"torchvision:{entry}"
    source, file = source_of(spec), weights_file(spec)
    if file is None and source.scheme == "exported":
        file = Path(source.target)
    if file is None and source.scheme == "transformers":
        files = _weights_of(Path(source.target))
        if files:
            return " ".join(_stat(p) for p in files)
    named = _named_in(spec.args) if source.scheme == "python" else []
    return " ".join([_stat(file) if file is not None else f"seed:{spec.seed}", *named])


def _named_in(value: Any) -> list[str]:
    """The files that arguments name, each with its state."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [found for each in value for found in _named_in(each)]
    paths = weights_in(Path(value)) or [value] if isinstance(value, str) and value else []
    return [_stat(Path(path)) for path in paths if state_of(path) is not None]


def _weights_of(folder: Path) -> list[Path]:
    """The files of weights of a folder of transformers, and of the layers that sentence-transformers put above."""
    places = [transformer_folder(folder)]
    if is_folder(folder):
        said_by = folder / MODULES
        layers = [entry["path"] for entry in modules_of(folder) if entry["type"].endswith(".Dense")]
        places += [inside(folder, path, said_by) for path in layers]
    return [p for place in places for p in sorted(place.glob("*")) if p.suffix in (".safetensors", ".bin")]


def random_weights(spec: ModelSpec) -> str | None:
    """Where the weights come from if not from a file, such as `random, from seed 0`; None if a file has them."""
    identified = weights_identity(spec)
    if identified != f"seed:{spec.seed}":
        return None
    source = source_of(spec)
    made = f"as {source.factory}() returned them, with" if source.scheme == "python" else "random, from"
    return f"{made} seed {spec.seed}"


def existing(path: Path) -> Path:
    """The path itself. Raises ModelError if there is no such file or it is not a regular one."""
    try:
        check_regular(path, path.stat().st_mode)
    except NotRegular as e:
        raise ModelError(f"{path}: {e}") from e
    except (OSError, ValueError) as e:  # ValueError: a NUL in its name
        raise ModelError(f"{path}: no such file") from e
    return path


def opened(path: Path) -> BufferedReader:
    """The file, open for reading. Raises ModelError if it cannot be opened or is not a regular one."""
    try:
        return open_regular(existing(path))
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror}") from e


def python_identity(source: Source) -> dict[str, str]:
    """Digests of the Python file and of what it imports from beside it. Raises as `identity` does."""
    main = existing(Path(source.target)).resolve()
    found = local_files(main)
    parts = {f"model.file:{name}": _digest(path) for name, path in found.files.items()}
    parts["model.source"] = f"python:{main.name}:{source.factory}"
    packages = sorted(found.packages - {"torch"})  # torch has its own part in the key of a schedule
    if packages:
        parts["model.package"] = ", ".join(_imported_package(name) for name in packages)
    parts |= {f"model.code:{name}": digest for name, digest in unversioned_code(packages).items()}
    return parts


def _package(name: str) -> str:
    try:
        return f"{name} {_version(name)}"
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(missing_package(name)) from None


def missing_package(name: str) -> str:
    """What to do when an optional package is not installed."""
    return f"the package {name} is not installed; install it with: pip install 'nimble-jobs[{name}]'"


def _imported_package(name: str) -> str:
    """Versions of the packages that provide an importable name, or `unknown` if no installed package does."""
    try:
        return f"{name} {_version(name)}"
    except importlib.metadata.PackageNotFoundError:
        owners = _owners(name)
        versions = ", ".join(f"{owner} {importlib.metadata.version(owner)}" for owner in owners)
        return f"{name} ({steady(name, 'version', versions)})" if versions else f"{name} (unknown)"


def _version(name: str) -> str:
    return steady(name, "version", machine.installed_version(name))


@functools.cache
def _owners(name: str) -> list[str]:
    """The installed distributions that provide an importable name, sorted."""
    owners = {distribution.metadata["Name"] for distribution, names in importable() if name in names}
    return sorted(filter(None, owners))  # one whose metadata is broken has no name


def importable() -> Iterator[tuple[importlib.metadata.Distribution, Collection[str]]]:
    """Each installed distribution, with the names that can be imported from it.

    As importlib.metadata.packages_distributions finds them, which takes ten times as long, because it parses every list
    of files and, since Python 3.12, asks the disk for each file.
    """
    for distribution in importlib.metadata.distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        yield distribution, declared or set(_LISTED.findall(distribution.read_text("RECORD") or ""))


def _architecture(config: Path) -> str:
    try:
        architectures = json.loads(_read(config)).get("architectures") or ["AutoModel"]
        return str(architectures[0])
    except (ValueError, AttributeError, LookupError, RecursionError) as e:
        raise ModelError(f"{config}: not a model configuration: {e}") from e


def _canonical(args: dict[str, Any]) -> str:
    try:
        return json.dumps(args, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise ModelError(f"model.args: {e}; expected text, numbers, booleans, lists and mappings") from e


def _read(path: Path) -> bytes:
    with opened(path) as file:
        return file.read()


def _stat(path: Path) -> str:
    try:
        s = path.stat()
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror}") from e
    return f"{path}:{s.st_size}:{s.st_mtime_ns}:{s.st_ino}"


def _digest(path: Path) -> str:
    """SHA-256 of a file, in hex. Large files are hashed again only when they changed."""
    try:
        s = path.stat()
        if s.st_size < 1 << 20:
            return hashlib.sha256(read_regular(path)).hexdigest()
        return _large_digest(path, s.st_size, s.st_mtime_ns, s.st_ino)
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror}") from e


@functools.lru_cache(maxsize=64)
def _large_digest(path: Path, size: int, mtime_ns: int, inode: int) -> str:
    with open_regular(path) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
