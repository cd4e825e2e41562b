"""Whose listing of pictures a member of a job takes: the first member's, if both read the same folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nimble_jobs.workloads import attempt


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        ({"joined": False}, False),
        ({"origins": {"/in": "an object store"}}, False),  # each machine has a copy of its own
        ({"fetching": SimpleNamespace(arriving=None)}, False),
        ({"work": SimpleNamespace(files="listed")}, False),
    ],
)
def test_who_takes_it(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], takes: bool) -> None:
    given: dict[str, Any] = {}
    reader = SimpleNamespace(label_names=None)
    monkeypatch.setattr(attempt, "open_reader", lambda spec, **options: given.update(options) or reader)
    monkeypatch.setattr(attempt, "listing_for_member", lambda output, job, number: (output, job, number))
    asked = {"joined": True, "origins": {}, "fetching": None, "work": None} | changes
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(input=SimpleNamespace(source="/in"), output="out"),
        job=SimpleNamespace(id="j", attempt=2, joined=asked["joined"]),
        origins=asked["origins"],
        fetching=asked["fetching"],
    )
    attempt.opened(context, asked["work"], column=None)  # type: ignore[arg-type]  # no texts
    assert given["listing"] == (("out", "j", 2) if takes else None)
