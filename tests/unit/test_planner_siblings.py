"""A bucket of texts takes over the choice made for another one, and is searched for where that does not hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.cli.cache_spec import _line
from nimble_jobs.cli.explained import explained as sections
from nimble_jobs.errors import CheckFailed, OutOfMemory
from nimble_jobs.families import batch_words, bucket_of, family_of, rows_of
from nimble_jobs.packing import text_layout
from nimble_jobs.planner import Request, explained, prepare
from nimble_jobs.planner.forward import build as builds
from nimble_jobs.planner.forward.target import ForwardTarget
from nimble_jobs.planner.jobs.ahead import build_ahead, look_up
from nimble_jobs.planner.jobs.loaded import Loaded
from nimble_jobs.planner.keys.request import key_parts, schedule_key
from nimble_jobs.planner.lookup.siblings import choice_words, precedent_of
from nimble_jobs.planner.search.contest import VARIABLE, Contest
from nimble_jobs.planner.search.search import Search
from nimble_jobs.schedule import Schedule
from nimble_jobs.sentence import Pooling
from nimble_jobs.spec import ModelSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve as home
from nimble_jobs.views.schedules import look
from nimble_jobs.worker.residency import Residents
from nimble_jobs.workloads.text.job import TextPlan
from tests.one_batch import outputs_of
from tests.text_models import write_bert

pytest.importorskip("transformers")

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Where eager is only the reference, so that noise decides nothing."""
    monkeypatch.setenv(VARIABLE, "reference")
    with open_store(home(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = write_bert(tmp_path_factory.mktemp("models") / "m")
    return found


def asked(folder: Path, length: int, rows: int, *, pairs: bool = False, **fields: Any) -> Request:
    layout = text_layout(length, vocabulary=40, token_types=pairs)
    given = {"shape": (layout.nbytes,), "dtype": "uint8", "packing": layout, "batch_size": rows}
    model = ModelSpec(source=f"transformers:{folder}", dtype=fields.pop("dtype", "fp32"))
    return Request(model=model, pooling=Pooling(modes=("mean",)), **given, **fields)


def built(request: Request, store: Store) -> Loaded:
    made = prepare(request, device=CPU, store=store, residents=Residents(2**30)).loaded
    assert (made.fallback, bool(made.instances)) == (None, True)
    return made


def schedule_of(request: Request, store: Store) -> Schedule:
    schedule = built(request, store).schedule
    assert schedule is not None
    return schedule


def nearest(request: Request, store: Store) -> str | None:
    found = precedent_of(key_parts(request, CPU), store)
    return None if found is None else found.batch


def test_a_bucket_takes_over_the_candidate_of_another_one(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone is built and checked, and the table says whose it is and what was not tried."""
    first = schedule_of(asked(folder, 8, 4), store)
    assert first.taken_from is None
    monkeypatch.setattr(Search, "run", None)
    request = asked(folder, 16, 2)
    loaded = built(request, store)
    second = loaded.schedule
    assert second is not None
    assert second.taken_from == (first.key, "4×8 tokens")
    same = ("kernels", "layout", "folded", "merged", "in_flight")
    assert [getattr(second, name) for name in same] == [getattr(first, name) for name in same]
    assert second.error is not None
    assert second.error <= second.tolerance
    sibling = f"4×8 tokens ({first.key[:12]})"
    measured = [c for c in second.candidates if c.replay_us is not None and c.name != "eager"]
    assert [c.chosen for c in measured] == [True]
    assert measured[0].reason == f"the candidate that was chosen for {sibling}, and passed its check here too"
    others = {c.name: c.reason for c in first.candidates if c.name not in ("eager", measured[0].name)}
    assert others
    left = {c.name: c.reason for c in second.candidates if c.replay_us is None}
    assert left == {name: f"not tried; for {sibling}: {reason}" for name, reason in others.items()}
    assert choice_words(second) == f"; its candidate was taken over from that of 4×8 tokens ({first.key[:12]})"
    assert choice_words(first) == ""
    values = {"input_ids": np.full((2, 16), 5), "attention_mask": np.array([16, 3])}
    rows = torch.from_numpy(text_layout(16, vocabulary=40).pack(values))
    with torch.no_grad():
        expected = loaded.module(rows)["embedding"]
    torch.testing.assert_close(outputs_of(loaded, rows)["embedding"], expected, rtol=1e-4, atol=1e-5)
    answer = explained(look_up(request, device=CPU, store=store))
    assert answer["taken_from"] == {"key": first.key, "batch": "4×8 tokens"}
    made = build_ahead(request, device=CPU, store=store)
    assert made.taken_from == answer["taken_from"] == look(store, second.key).json()["taken_from"]
    assert ", taken over from 4×8 tokens" in _line(made)
    head = dict(dict(sections(answer))["Schedule"])  # type: ignore[arg-type]
    assert head["choice"] == f"taken over from that of 4×8 tokens ({first.key[:12]}); see Candidates"


def test_what_was_taken_over_is_stored() -> None:
    """Schedules that were stored before anything could be taken over are read as well."""
    fields = {"key": "k", "taken_from": ["other", "4×8 tokens"]}
    plain = json.loads(_EMPTY) | fields
    assert Schedule.from_json(json.dumps(plain)).taken_from == ("other", "4×8 tokens")
    del plain["taken_from"]
    old = Schedule.from_json(json.dumps(plain))
    assert old.taken_from is None
    assert Schedule.from_json(old.to_json()) == old


def test_the_nearest_searched_sibling_is_asked(folder: Path, store: Store) -> None:
    """By length and by the tokens of a batch, up to a factor of four. What was itself taken over is asked by nobody."""
    schedule_of(asked(folder, 8, 4), store)
    assert nearest(asked(folder, 16, 2), store) == "4×8 tokens"
    assert nearest(asked(folder, 32, 1), store) == "4×8 tokens"
    assert nearest(asked(folder, 34, 1), store) is None
    assert nearest(asked(folder, 8, 17), store) is None
    assert nearest(asked(folder, 8, 4), store) is None
    assert nearest(asked(folder, 16, 2, dtype="bf16"), store) is None
    assert nearest(asked(folder, 16, 2, pairs=True), store) is None
    assert schedule_of(asked(folder, 32, 1), store).taken_from is not None
    assert nearest(asked(folder, 36, 1), store) is None
    far = schedule_of(asked(folder, 36, 1), store)
    assert far.taken_from is None
    assert nearest(asked(folder, 24, 1), store) == "1×36 tokens"
    store.schedules.quarantine(far.key, "in doubt", 0.0)
    assert nearest(asked(folder, 24, 1), store) == "4×8 tokens"


def test_a_candidate_that_disagrees_here_is_not_taken_over(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are tried then, and a row says why."""
    first = schedule_of(asked(folder, 8, 4), store)
    real, errors = ForwardTarget.compare, [CheckFailed("embedding differs by 1", error=1.0)]

    def compare(*args: Any, **kwargs: Any) -> float:
        if errors:
            raise errors.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(ForwardTarget, "compare", compare)
    second = schedule_of(asked(folder, 16, 2), store)
    assert second.taken_from is None
    (row,) = [c for c in second.candidates if c.name == f"as for 4×8 tokens ({first.key[:12]})"]
    assert row.reason.startswith("not taken over: ")
    assert row.reason.endswith("embedding differs by 1")
    assert {c.name for c in first.candidates} <= {c.name for c in second.candidates}
    assert sum(c.chosen for c in second.candidates) == 1


def test_a_candidate_that_cannot_be_built_here_is_not_taken_over(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may be short, for instance."""
    schedule_of(asked(folder, 8, 4), store)
    real, errors = ForwardTarget.capture, [OutOfMemory("full")]

    def capture(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args)

    monkeypatch.setattr(ForwardTarget, "capture", capture)
    second = schedule_of(asked(folder, 16, 2), store)
    assert second.taken_from is None
    (row,) = [c for c in second.candidates if c.name.startswith("as for")]
    assert row.reason.endswith("not built: not enough memory on the device")


@pytest.mark.parametrize("before", ["schedule", "eager"])
def test_eager_must_be_faster_in_both_or_in_none(
    before: str, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only here eager is faster, another candidate may still beat it."""
    request = asked(folder, 16, 2)
    schedule_of(asked(folder, 8, 4), store)
    precedent = precedent_of(key_parts(request, CPU), store)
    assert precedent is not None
    precedent = replace(precedent, schedule=replace(precedent.schedule, runs=before))
    monkeypatch.setattr("nimble_jobs.planner.jobs.building.precedent_of", lambda *_: precedent)
    lost = Contest(eager_us=1.0, replay_us=2.0, noise=0.02)
    monkeypatch.setattr(builds._Build, "_against_eager", lambda *_: lost)
    made = prepare(request, device=CPU, store=store, residents=Residents(2**30)).loaded.schedule
    assert made is not None
    assert made.runs == "eager"
    names = [c.name for c in made.candidates if c.name.startswith("as for")]
    if before == "eager":
        assert made.taken_from == (precedent.schedule.key, "4×8 tokens")
        assert not names
    else:
        assert made.taken_from is None
        (row,) = [c for c in made.candidates if c.name in names]
        assert row.reason == "not taken over: slower than eager"


def test_what_a_key_says_of_its_bucket(folder: Path) -> None:
    """Rows and length; families leave out both, and nothing else."""
    parts = key_parts(asked(folder, 16, 2), CPU)
    assert (bucket_of(parts), rows_of(parts), batch_words(parts)) == (16, 2, "2×16 tokens")
    other = key_parts(asked(folder, 8, 4), CPU)
    assert family_of(parts) == family_of(other) is not None
    assert schedule_key(parts) != schedule_key(other)
    assert family_of(key_parts(asked(folder, 8, 4, pairs=True), CPU)) not in (None, family_of(parts))
    image = {**parts, "input": "x:float32[2, 3]"}
    del image["input.part.attention_mask"]
    assert (bucket_of(image), rows_of(image), family_of(image)) == (None, None, None)


def test_the_bucket_with_most_batches_is_built_first(folder: Path) -> None:
    """Of unknown numbers the shortest one."""
    requests = [replace(asked(folder, 8, 4), batches=n) for n in (3.0, 9.0, 1.0)]
    plan = TextPlan(setup=None, buckets=(), requests=tuple(requests), shares=(), window=1)  # type: ignore[arg-type]
    assert plan.in_turn == [1, 0, 2]
    unknown = replace(plan, requests=tuple(replace(request, batches=None) for request in requests))
    assert unknown.in_turn == [0, 1, 2]


_EMPTY = """{"format_version": 5, "key": "k", "program": {"buffers": [], "tasks": [], "inputs": [], "state": [],
"constants": [], "outputs": []}, "plan": {"order": [], "stream_of": [], "syncs": []}, "facts": {"tasks": 0, "edges": 0,
"meg_edges": 0, "matching": 0, "width": 0, "streams": 1, "syncs_needed": 0, "syncs_used": 0}, "offsets": [],
"durations_us": [], "folded": [], "compiled": [], "candidates": [], "tolerance": 0.001, "error": 0.0, "device": "cpu",
"eager_us": 1.0, "replay_us": 1.0, "peak_bytes": 0, "build_s": 1.0, "stages": []}"""
