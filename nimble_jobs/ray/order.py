"""What the starting command tells Ray's driver, and the driver the actors: frozen values, sent as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from dataclasses import dataclass
from typing import Any, Self

from nimble_jobs.machine import misfit
from nimble_jobs.version import __version__

EXTRA = "pip install 'nimble-jobs[ray]'"


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What must be equal on all nodes."""

    python: str  # such as 3.11
    nimble_jobs: str
    torch: str
    ray: str

    @classmethod
    def here(cls) -> Self:
        """The versions of this process's installation, read from files."""
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        packages = {name: importlib.metadata.version(name) for name in ("torch", "ray")}
        return cls(python=python, nimble_jobs=__version__, **packages)

    def difference(self, other: Versions) -> str | None:
        """What is another version in `other`, in words; None if nothing is."""
        return misfit(dataclasses.asdict(other), expected=dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class SqliteHome:
    """The one state folder that holds the jobs, on the one machine that may use it."""

    identity: str  # what marks the folder
    boot: str  # tells this machine from others


@dataclass(frozen=True, kw_only=True)
class Order:
    """Equal workers, one an actor."""

    address: str  # of the cluster: HOST:PORT, or auto
    count: int | None  # of actors; None: one for each GPU of the cluster
    gpu: bool  # whether each has a GPU; otherwise it works on the CPU
    home: str  # state folder on the nodes, absolute
    database: str | None  # that the nodes' state folders share, without a password; None: SQLite
    sqlite: SqliteHome | None  # where there is no shared database
    versions: Versions
    max_idle_s: float | None
    gpu_memory_bytes: int | None
    grace_s: float

    def dump(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, line: str) -> Self:
        """The order that `dump` has written."""
        value: dict[str, Any] = json.loads(line)
        sqlite = value["sqlite"] and SqliteHome(**value["sqlite"])
        return cls(**value | {"versions": Versions(**value["versions"]), "sqlite": sqlite})
