"""The timer of `docs/how-to/nightly-scoring.md`, with a clock that is an argument: what each night scores of a growing
folder.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from nimble_jobs import cron
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, Tick, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import execute, real_station
from tests.cli import Cli
from tests.inbox import age

DOCS = Path(__file__).resolve().parents[2] / "docs"
HOW_TO, TIMERS = DOCS / "how-to" / "nightly-scoring.md", DOCS / "timers.md"
QUICK = ("schedule.on_miss=eager",)


def at(text: str) -> float:
    """A moment of November 2026 by the clocks of Berlin: `24 02:15`."""
    moment = datetime.fromisoformat(f"2026-11-{text.replace(' ', 'T')}")
    return moment.replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The spec as the page has it."""
    found = re.search(r"```yaml\n(version: 1\n.*?)```", HOW_TO.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "pictures").mkdir()
    path = tmp_path / "nightly.yaml"
    path.write_text(found[1])
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(resolve(str(tmp_path / "home")))) as opened:
        yield opened


@dataclass(kw_only=True)
class Scene:
    """A folder, a timer, and somebody who is there at times."""

    store: Store
    spec: Path

    def arrives(self, *names: str, age_s: float = 3600.0) -> None:
        for name in names:
            path = self.spec.parent / "pictures" / name
            Image.fromarray(np.full((8, 8, 3), len(name), dtype=np.uint8)).save(path)
            age(path, age_s)

    def add(self, now: str, *overrides: str) -> str:
        added = cron.add(self.spec, store=self.store, overrides=(*QUICK, *overrides), now=at(now))
        return str(added.change)

    def there(self, now: str) -> list[tuple[str, str]]:
        """A worker at this time: it fires what is due and runs the jobs. Kind and outcome of the ticks."""
        ticks = cron.fire(store=self.store, now=at(now))
        for _ in ticks:
            self._work()
        by_due = {tick.due: tick for tick in cron.history("nightly", store=self.store)}
        return [(tick.kind.value, by_due[tick.due].outcome.value) for tick in ticks]

    def _work(self) -> Job | None:
        job = self.store.jobs.claim("w", device="cpu", now=time.time() + 1e9)
        if job is None:
            return None
        execute(job, real_station(self.store, "w", "cpu", None))
        done = self.store.jobs.get(job.id)
        assert done.state is JobState.SUCCEEDED, done.error
        return done

    def scores(self) -> dict[str, list[str]]:
        """The pictures in each night's output."""
        folders = sorted((self.spec.parent / "scores").glob("*"))
        return {folder.name: sorted(_ids(folder)) for folder in folders}


def _ids(folder: Path) -> list[str]:
    return [name for part in folder.glob("*.parquet") for name in pq.read_table(part)["id"].to_pylist()]


def test_nightly_scoring(store: Store, spec: Path) -> None:
    """Only new pictures, one output a night, a missed night caught up, an edit without a surprise."""
    scene = Scene(store=store, spec=spec)
    scene.arrives("a.png", "b.png")
    assert scene.add("23 20:00") == "added"
    assert scene.there("23 23:59") == []

    assert scene.there("24 02:15") == [("scheduled", "submitted")]
    assert scene.scores() == {"2026-11-24": ["a.png", "b.png"]}

    scene.arrives("c.png")
    scene.arrives("late.png", age_s=1e7)  # its time lies before the last night
    scene.arrives("half-written.png", age_s=0.0)
    assert scene.there("25 02:15") == [("scheduled", "submitted")]
    assert scene.scores()["2026-11-25"] == ["c.png", "late.png"]

    scene.arrives("half-written.png", "d.png")
    assert scene.there("26 09:30") == [("catch-up", "submitted")]  # the machine was off in the night
    assert scene.scores()["2026-11-26"] == ["d.png", "half-written.png"]

    scene.arrives("e.png")
    assert scene.add("26 10:00") == "unchanged"
    assert scene.add("26 10:00", "cron.expression=45 1 * * *", "input.batch_size=8") == "edited"
    assert scene.there("26 10:01") == []  # 01:45 of this morning is over
    assert scene.there("27 01:45") == [("scheduled", "submitted")]
    assert scene.scores()["2026-11-27"] == ["e.png"]

    assert scene.there("28 01:45") == [("scheduled", "empty")]
    assert sorted(scene.scores()) == ["2026-11-24", "2026-11-25", "2026-11-26", "2026-11-27"]
    assert [_told(tick) for tick in reversed(cron.history("nightly", store=store))] == [
        ("24 02:15", "scheduled", "submitted"),
        ("25 02:15", "scheduled", "submitted"),
        ("26 02:15", "catch-up", "submitted"),
        ("27 01:45", "scheduled", "submitted"),
        ("28 01:45", "scheduled", "empty"),
    ]
    assert len(store.jobs.list()) == 5


def _told(tick: Tick) -> tuple[str, str, str]:
    return (
        f"{datetime.fromtimestamp(tick.due, ZoneInfo('Europe/Berlin')):%d %H:%M}",
        tick.kind.value,
        tick.outcome.value,
    )


def test_several_missed_nights_are_one_job(store: Store, spec: Path) -> None:
    """The latest one scores what came in all of them; the others say why they have no job."""
    scene = Scene(store=store, spec=spec)
    scene.add("23 20:00")
    scene.arrives("a.png")
    assert scene.there("27 12:00") == [("scheduled", "missed")] * 3 + [("catch-up", "submitted")]
    assert scene.scores() == {"2026-11-27": ["a.png"]}
    missed = [tick for tick in cron.history("nightly", store=store) if tick.outcome == "missed"]
    assert all(tick.reason and "catch_up: latest" in tick.reason for tick in missed)


def test_the_commands_of_the_page(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the timers' page can be typed as it stands, in this order, once the how-to's timer is added."""
    monkeypatch.chdir(tmp_path)
    cli = Cli(tmp_path / "home", capsys)
    assert cli("cron", "add", spec).code == 0
    blocks = re.findall(r"```sh\n(.*?)```", TIMERS.read_text(), re.DOTALL)
    lines = [line.partition("#")[0].split() for block in blocks for line in block.splitlines()]
    assert len(lines) > 8
    for program, *words in lines:
        assert program == "nimble-jobs"
        answer = cli(*words)
        assert answer.code == 0, (words, answer.err)
