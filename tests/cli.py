"""Calls the command line in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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


_LOADED = """
import json, sys
from nimble_jobs.cli.main import main
home, commands, names = json.loads(sys.argv[1])
loaded = lambda: [name for name in names if name in sys.modules]
answers = [[words, main(["--home", home, *words.split()]), loaded()] for words in commands]
print(json.dumps(answers), file=sys.stderr)
"""


def loaded_by(commands: Sequence[str], names: Sequence[str], home: Path) -> Any:
    """For each command its words, its exit code, and which of these modules it or one before has imported.

    They run one after another in one process that is not forked.
    """
    order = json.dumps([str(home), commands, names])
    done = subprocess.run([sys.executable, "-c", _LOADED, order], capture_output=True, text=True, check=True)
    return json.loads(done.stderr.splitlines()[-1])


def beside(spec: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Commands that run from the spec's folder, whose Python files may run."""
    monkeypatch.chdir(spec.parent)
    monkeypatch.setenv("NIMBLE_JOBS_ALLOW_PYTHON", str(spec.parent))
    return Cli(home, capsys)
