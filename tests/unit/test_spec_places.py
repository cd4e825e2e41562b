"""Where an output may not lie: in the state folder or around it, nor around what the job reads, by any name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nimble_jobs import client
from nimble_jobs import spec as specs
from nimble_jobs.errors import SpecError
from nimble_jobs.spec.places import about_home, holds
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.cli import Cli

SPEC = """\
version: 1
name: n
kind: score
model: {{source: torchvision:resnet18}}
input: {{source: data/x.npy, format: npy}}
output: {{path: {path}, if_exists: replace}}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = resolve(str(tmp_path / "state" / "home"))
    (home / "artifacts" / "ab").mkdir()
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "x.npy", np.ones((2, 3), np.float32))
    (tmp_path / "link").symlink_to(home)
    (tmp_path / "link-to-workers").symlink_to(home / "workers")
    (tmp_path / "link-above").symlink_to(home.parent)
    return home


BAD = {
    "state/home": "is the state folder {home}",
    "state": "contains the state folder {home}",
    "link": "is the state folder {home}",
    "link-above": "contains the state folder {home}",
    "state/home/out": "lies in the state folder {home}",
    "state/home/workers/7.lock": "lies in the state folder {home}",
    "state/home/artifacts/ab/out": "lies in the state folder {home}",
    "link/deep/er/out": "lies in the state folder {home}",
    "link-to-workers/7.lock": "lies in the state folder {home}",
    "link-above/home/logs": "lies in the state folder {home}",
    "data/../state/./home/out": "lies in the state folder {home}",
    "link-to-workers/../out": "lies in the state folder {home}",
}


@pytest.mark.parametrize("path", BAD)
def test_in_or_around_the_state_folder(tmp_path: Path, home: Path, path: str) -> None:
    """Through links and `..`, whether it exists or not."""
    assert about_home(tmp_path / path, home) == BAD[path].format(home=home)


def test_beside_the_state_folder(tmp_path: Path, home: Path) -> None:
    """Neighbours, and names that begin alike, are free."""
    for path in ("out", "state/out", "state/home2", "state/home.out/deep", "data/out"):
        assert about_home(tmp_path / path, home) is None
    assert about_home(tmp_path / "out", tmp_path / "no-home-yet") is None


def test_by_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """A second mount of a folder, or a file system that does not tell cases apart, gives other names for one inode."""
    from nimble_jobs.spec import places

    (tmp_path / "mounted" / "out").mkdir(parents=True)
    real = places._identity

    def mounted(of: Path) -> Callable[[str | Path], tuple[int, int] | None]:
        return lambda path: real(of if Path(path) == tmp_path / "mounted" else path)

    for of in (home, home / "artifacts" / "ab", home / "workers"):
        monkeypatch.setattr(places, "_identity", mounted(of))
        assert about_home(tmp_path / "mounted" / "out", home) == f"lies in the state folder {home}"
    monkeypatch.setattr(places, "_identity", mounted(home.parent))
    assert about_home(tmp_path / "mounted", home) == f"contains the state folder {home}"
    monkeypatch.setattr(places, "_identity", mounted(tmp_path / "data"))
    assert holds(tmp_path / "mounted", tmp_path / "data" / "x.npy")


@pytest.mark.parametrize("command", ["submit", "run"])
@pytest.mark.parametrize("path", ["state/home/workers/7.lock", "state", "link/out"])
def test_the_commands_refuse_it(
    command: str, path: str, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, with file, line and field; no job is queued. A dry run says the same."""
    spec = tmp_path / "job.yaml"
    spec.write_text(SPEC.format(path=path))
    cli = Cli(home, capsys)
    for options in ([], ["--dry-run"]) if command == "submit" else ([],):
        answer = cli(command, spec, *options)
        problem = BAD[path].format(home=home) if path in BAD else f"lies in the state folder {home}"
        assert (answer.code, answer.out) == (2, "")
        assert answer.lines == [f"{spec}:6: output.path: {problem}; expected a folder of its own"]
    with cli.store() as store:
        assert store.jobs.list() == []


def test_the_library_refuses_it(tmp_path: Path, home: Path) -> None:
    """A spec that was read elsewhere is looked at, too."""
    spec = tmp_path / "job.yaml"
    spec.write_text(SPEC.format(path="link/out"))
    with open_store(home) as store, pytest.raises(SpecError, match=r"job n: output\.path: lies in the state folder"):
        client.submit(specs.load(spec), store=store)


def test_a_link_that_comes_later(tmp_path: Path, home: Path) -> None:
    """The job looks again: a folder above the output that became a link into the state folder fails it."""
    (tmp_path / "m.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    spec = tmp_path / "job.yaml"
    spec.write_text(
        SPEC.format(path="later/out").replace("torchvision:resnet18", '"python:m.py:make"') + "# a comment\n"
    )
    program = f"""
import sys, os
from pathlib import Path
from nimble_jobs import client
from nimble_jobs.store import open_store
from nimble_jobs.worker.foreground import run_inline
with open_store(Path({str(home)!r})) as store:
    job = client.submit(Path({str(spec)!r}), store=store, foreground=True, allow_python=[{str(tmp_path)!r}])
    os.symlink({str(home / "workers")!r}, {str(tmp_path / "later")!r})
    ended = run_inline(store, job.id)
    print(ended.state, ended.error)
"""
    answer = prefork.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    path = tmp_path / "later" / "out"
    assert (
        answer.stdout == f"failed output.path: {path} lies in the state folder {home}; expected a folder of its own\n"
    )
    assert not (home / "workers" / "out").exists()
    assert not [p for p in (home / "workers").iterdir() if "out" in p.name]
