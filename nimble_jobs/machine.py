"""Facts about this machine and its software, read from files without loading torch. Schedule keys use them too."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from nimble_jobs.version import __version__

NVIDIA = Path("/proc/driver/nvidia")

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = 32  # CUDA takes no more; by default it makes 8

# Versions, and what else decides over the bytes of an output, by name. Members of a job must have equal ones.
Software = Mapping[str, str]

# And torch, which says more about itself.
_DECIDE = ("numpy", "pyarrow", "pillow", "simplejpeg", "cykooz-resizer", "tokenizers")

_Stamp = tuple[int, int, int]
_known: dict[str, tuple[str, dict[Path, _Stamp]]] = {}  # versions by package, and the files that would tell of another


def before_cuda() -> None:
    """Set what CUDA reads when it starts, unless the user has set it. Call this in processes that run jobs.

    Streams beyond the number of queues share them, and work of one then waits for all that lies before it in another:
    a decoder of JPEGs for whole steps of a training.
    """
    os.environ.setdefault(QUEUES, str(MOST_QUEUES))
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does


def installed_version(package: str) -> str:
    """The version of an installed package. Raises importlib.metadata.PackageNotFoundError.

    Its metadata are read again once they, or the folder that they lie in, have changed: an installer writes both.
    """
    known = _known.get(package)
    if known is not None and known[1] == {path: _stamp(path) for path in known[1]}:
        return known[0]
    path = getattr(metadata.distribution(package), "_path", None)  # not there in an archive
    files = (path.parent, path, path / "METADATA", path / "PKG-INFO") if isinstance(path, Path) else ()
    before = {file: _stamp(file) for file in files}
    found = metadata.version(package)
    if before:
        _known[package] = found, before
    return found


def _stamp(path: Path) -> _Stamp:
    try:
        info = os.stat(path)  # noqa: PTH116 - for every job
    except OSError:
        return 0, 0, 0
    return info.st_mtime_ns, info.st_ino, info.st_size


def package_version(package: str) -> str:
    """The version of an installed package, or words to say that it is not installed."""
    try:
        return installed_version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def host_software() -> dict[str, str]:
    """The software that reads records, prepares them and writes outputs."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"nimble-jobs": __version__, "python": python} | {name: package_version(name) for name in _DECIDE}


def misfit(found: Software, expected: Software) -> str | None:
    """In words, how `found` differs from what is `expected`; None if it does not."""
    names = [*expected, *(name for name in found if name not in expected)]
    wrong = [
        f"{name} {found.get(name, 'unknown')}, expected {expected.get(name, 'unknown')}"
        for name in names
        if found.get(name) != expected.get(name)
    ]
    return "; ".join(wrong) or None


def driver_version() -> str | None:
    """The NVIDIA driver's version, from the kernel; None if it has none."""
    try:
        text = (NVIDIA / "version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def cpu_name() -> str | None:
    """The processor's model name, from the kernel; None if it has none."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return found.group(1).strip() if found else None


def cudnn_version() -> str | None:
    """The version of the cuDNN that torch was installed with, as torch counts it (9.10.2 is 91002); None where torch
    brings its own or none.
    """
    try:
        required = metadata.requires("torch") or []
        names = {found[0] for line in required if (found := re.match(r"nvidia-cudnn-cu\d+", line))}
        numbers = [metadata.version(name).split(".") for name in names]
    except metadata.PackageNotFoundError:
        return None
    if len(numbers) != 1:
        return None
    major, minor, patch = (int(number) for number in numbers[0][:3])
    return str(major * (10_000 if major >= 9 else 1_000) + minor * 100 + patch)
