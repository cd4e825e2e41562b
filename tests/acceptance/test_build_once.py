"""Several real processes that miss on one key: one builds, the others wait, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs.models.build import build
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.acceptance import builders

PATIENCE_S = 240
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(builders.CODE)
    return path


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Start:
    resolve(str(tmp_path / "home"))

    def begin(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.acceptance.builders", str(tmp_path / "home"), str(model), how]
        root = Path(__file__).parents[2]
        return prefork.start(command, stdout=subprocess.PIPE, text=True, cwd=root)

    return begin


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def builds(model: Path) -> list[int]:
    file = model.parent / "builds"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def expected(model: Path) -> str:
    module = build(builders.request(model).model, allowed_python=(model.parent,))
    with torch.no_grad():
        return builders.digest(module(builders.example()))


def test_eight_processes_build_one_key_once(start: Start, model: Path) -> None:
    """All ask at once: one build, one miss, seven stored hits, eight outputs with the bits of eager."""
    processes = [start("slow") for _ in range(8)]
    answers = [answer(process) for process in processes]
    assert len(builds(model)) == 1
    assert sorted(a["hit"] for a in answers) == ["miss"] + ["stored"] * 7
    assert {a["runs"] for a in answers} == {"schedule"}
    assert {a["sha256"] for a in answers} == {expected(model)}
    with open_store(resolve(str(model.parent / "home"))) as store:
        (entry,) = store.schedules.list()
        assert entry.state == "ready"
        assert store.check() == []


@pytest.mark.parametrize("where", ["hang", "hang-saving"])
def test_a_builder_killed_in_the_middle_blocks_nobody(start: Start, model: Path, where: str) -> None:
    """Its lock goes with it: one of those who waited builds, the others take what it stored."""
    first = start(where)
    deadline = time.monotonic() + PATIENCE_S
    while not (model.parent / "hangs").exists():
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.05)
    others = [start("slow") for _ in range(3)]
    with open_store(resolve(str(model.parent / "home"))) as store:
        while not all((model.parent / f"waits-{process.pid}").exists() for process in others):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
        answers = [answer(process) for process in others]
        assert len(builds(model)) == 2
        assert any(a["waited"] for a in answers)
        assert sorted(a["hit"] for a in answers) == ["miss", "stored", "stored"]
        assert {a["sha256"] for a in answers} == {expected(model)}
        assert store.check() == []
