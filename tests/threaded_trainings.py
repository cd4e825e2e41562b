"""Trainings on several ranks that are threads of one process, in place of processes."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nimble_jobs.store import open_store
from nimble_jobs.workloads.training import follower
from nimble_jobs.workloads.training import job as training_job
from nimble_jobs.workloads.training.ranks.followers import Part
from nimble_jobs.workloads.training.ranks.gang import Gang
from nimble_jobs.workloads.training.session import Session

_LONG_S = 120.0


class Team:
    """The other ranks of a session, each a thread. They begin when the leader has prepared its step: much that a
    preparation looks at belongs to the whole process.
    """

    def __init__(self, session: Session, count: int, folder: str) -> None:
        self._session, self._count, self._meeting = session, count, Path(folder) / "meeting"
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.said: list[Mapping[str, Any]] = []

    def meet(self, order: Mapping[str, Any], device: torch.device, check: Callable[[], None]) -> Gang:
        """As `Followers.meet`."""
        check()
        for rank in range(1, self._count):
            ready = threading.Event()
            thread = threading.Thread(target=self._run, args=(rank, order, ready), daemon=True)
            self._threads.append(thread)
            thread.start()
            assert ready.wait(_LONG_S), self.errors
        return Gang.connect(self._meeting, 0, self._count, device, timeout_s=_LONG_S)

    def telling(self) -> AbstractContextManager[None]:
        """As `Followers.telling`."""
        return nullcontext()

    def join(self) -> None:
        """Wait for all of them."""
        for thread in self._threads:
            thread.join(_LONG_S)
            assert not thread.is_alive()

    def _run(self, rank: int, order: Mapping[str, Any], ready: threading.Event) -> None:
        try:
            given = self._session.context
            with open_store(given.store.home, create=False) as store:
                context: Any = SimpleNamespace(**vars(given))
                context.store, context.decoders = store, None
                context.report, context.event = (lambda **_: None), (lambda *_: None)
                part = Part(
                    home=str(store.home),
                    job=given.job.id,
                    attempt=given.job.attempt,
                    rank=rank,
                    count=self._count,
                    device=given.device,
                    threads=1,
                    meeting=str(self._meeting),
                    timeout_s=_LONG_S,
                )

                def say(line: Mapping[str, Any]) -> None:
                    self.said.append(line)
                    ready.set()

                follower.take_part(part, context, lambda: dict(order), say)
        except BaseException as e:  # noqa: BLE001 - the leader hears of it
            self.errors.append(e)


@pytest.fixture
def threaded_ranks(monkeypatch: pytest.MonkeyPatch) -> list[Team]:
    """Trainings of this test run their other ranks as threads; each team is listed."""
    teams: list[Team] = []

    @contextmanager
    def started(session: Session, count: int) -> Iterator[Team]:
        with tempfile.TemporaryDirectory() as folder:
            team = Team(session, count, folder)
            teams.append(team)
            yield team
            team.join()

    monkeypatch.setattr(training_job, "started", started)
    return teams
