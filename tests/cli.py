"""Calls the command line in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.cli.main import main
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one command line gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """Lines of stderr."""
        return self.err.splitlines()


class Cli:
    """The command line over one state folder."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self._capsys = capsys

    def __call__(self, *args: str | Path) -> Answer:
        self._capsys.readouterr()
        code = main(["--home", str(self.home), *map(str, args)])
        captured = self._capsys.readouterr()
        return Answer(code=code, out=captured.out, err=captured.err)

    def store(self) -> Store:
        """The store behind it, opened; the caller closes it."""
        return open_store(resolve(str(self.home)))


def beside(spec: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Commands that run from the spec's folder, whose Python files may run."""
    monkeypatch.chdir(spec.parent)
    monkeypatch.setenv("NIMBLE_JOBS_ALLOW_PYTHON", str(spec.parent))
    return Cli(home, capsys)
