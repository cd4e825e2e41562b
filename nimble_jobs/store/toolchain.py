"""Tells which schedules fit this machine's software. It reads files, and does not load torch.

A schedule's key names the software that it was measured with, so after an upgrade no job uses it any more.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs import machine
from nimble_jobs.schedule import FORMAT_VERSION

_NAMES = {
    "format": "format",
    "torch": "torch",
    "cuda": "CUDA",
    "driver": "driver",
    "triton": "triton",
    "cudnn": "cuDNN",
}
_PACKAGES = ("model.package", "train.loss.package")  # parts of a key
_PACKAGE = re.compile(r"([^\s,()]+) ([^\s,()]+)")


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The software of a process on this machine, by kind of device (cpu, cuda)."""

    versions: Mapping[str, Mapping[str, str]]  # by kind, the parts of a key that can be read from files
    devices: Mapping[str, frozenset[str]]  # device names by kind; a kind whose names cannot be read is left out
    package: Callable[[str], str]  # the version of an installed package

    def outdated(self, parts: Mapping[str, str]) -> str | None:
        """How the software here differs from the one that made a schedule for a device of this machine, in words.

        None if nothing differs, or if the schedule is for a device of another machine.
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
        differ += [
            f"{name} {made}, here {here}"
            for name, made in {p: v for part in _PACKAGES for p, v in _packages(parts.get(part, "")).items()}.items()
            if (here := self.package(name)) != made
        ]
        return "made with " + "; ".join(differ) if differ else None


@functools.cache
def toolchain() -> Toolchain:
    """This machine's software, read once."""
    torch, cuda = _torch()
    common = {"format": str(FORMAT_VERSION)} | ({"torch": torch} if torch else {})
    versions = {"cpu": common}
    devices = {}
    cpu = machine.cpu_name()
    if cpu is not None:
        devices["cpu"] = frozenset({cpu})
    gpus = _gpu_names()
    if gpus is not None:
        devices["cuda"] = gpus
    driver, cudnn = machine.driver_version(), machine.cudnn_version()
    versions["cuda"] = (
        common
        | ({"cuda": cuda} if cuda else {})
        | ({"driver": driver} if driver else {})
        | ({"cudnn": cudnn} if cudnn else {})
        | {"triton": machine.package_version("triton")}
    )
    return Toolchain(versions=versions, devices=devices, package=_installed)


@functools.cache
def _installed(package: str) -> str:
    return machine.package_version(package)


def _packages(text: str) -> dict[str, str]:
    """Versions by package, of a key's part such as `timm 1.0.9, yaml (PyYAML 6.0.2), mine (unknown)`."""
    return dict(_PACKAGE.findall(text.replace("(unknown)", "")))


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
    matched = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", code, re.MULTILINE)
    return matched.group(1) if matched else None


def _gpu_names() -> frozenset[str] | None:
    """Names of this machine's GPUs; None if the driver does not tell them."""
    if not machine.NVIDIA.is_dir():
        return None if Path("/dev/nvidiactl").exists() else frozenset()
    names = set()
    for path in machine.NVIDIA.glob("gpus/*/information"):
        try:
            matched = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if matched:
            names.add(matched.group(1).strip())
    return frozenset(names) or None
