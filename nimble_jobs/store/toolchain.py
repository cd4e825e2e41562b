"""Which schedules the software of this machine can still use. Read from files, without torch.

A schedule's key names the software that it was measured with, so after an upgrade no job asks for it any more.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from nimble_jobs.schedule import FORMAT_VERSION

_NVIDIA = Path("/proc/driver/nvidia")
_NAMES = {"format": "format", "torch": "torch", "cuda": "CUDA", "driver": "driver", "triton": "triton"}


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """What a process on this machine would run a schedule with, by kind of device (cpu, cuda)."""

    versions: Mapping[str, Mapping[str, str]]  # by kind, the parts of a key that can be read; the others are not known
    devices: Mapping[str, frozenset[str]]  # by kind, names; a kind whose names cannot be read is left out

    def outdated(self, parts: Mapping[str, str]) -> str | None:
        """How the software here differs from the one that made a schedule for a device of this machine, in words.

        None where nothing differs, or where the schedule is for a device of another machine.
        """
        kind = parts.get("device", "")
        names = self.devices.get(kind)
        if names is not None and parts.get("device.name") not in names:
            return None
        differ = [
            f"{_NAMES[name]} {parts[name]}, here {here}"
            for name, here in self.versions.get(kind, {}).items()
            if name in parts and parts[name] != here
        ]
        return "made with " + "; ".join(differ) if differ else None


@functools.cache
def toolchain() -> Toolchain:
    """This machine's. Read once."""
    torch, cuda = _torch()
    common = {"format": str(FORMAT_VERSION)} | ({"torch": torch} if torch else {})
    versions = {"cpu": common}
    devices = {}
    cpu = cpu_name()
    if cpu is not None:
        devices["cpu"] = frozenset({cpu})
    gpus = _gpu_names()
    if gpus is not None:
        devices["cuda"] = gpus
    driver = driver_version()
    versions["cuda"] = (
        common
        | ({"cuda": cuda} if cuda else {})
        | ({"driver": driver} if driver else {})
        | {"triton": package_version("triton")}
    )
    return Toolchain(versions=versions, devices=devices)


def package_version(package: str) -> str:
    """The version of an installed package, as keys name it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def driver_version() -> str | None:
    """The NVIDIA driver's version, where the kernel tells it."""
    try:
        text = (_NVIDIA / "version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def cpu_name() -> str | None:
    """The processor's model name, where the kernel tells it."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return found.group(1).strip() if found else None


def _torch() -> tuple[str | None, str | None]:
    """torch's version, with its local part, and the CUDA version that it was built for."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None, None
    version, cuda = (_assigned(name, text) for name in ("__version__", "cuda"))
    return version, cuda


def _assigned(name: str, code: str) -> str | None:
    """The text that a line of Python assigns to a name."""
    found = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", code, re.MULTILINE)
    return found.group(1) if found else None


def _gpu_names() -> frozenset[str] | None:
    """Names of this machine's GPUs; None where the driver is there but tells none."""
    if not _NVIDIA.is_dir():
        return None if Path("/dev/nvidiactl").exists() else frozenset()
    names = set()
    for path in _NVIDIA.glob("gpus/*/information"):
        try:
            found = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            names.add(found.group(1).strip())
    return frozenset(names) or None
