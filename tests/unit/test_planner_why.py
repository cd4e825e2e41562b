"""Which stored schedule comes nearest to a key, and what differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.planner.lookup.why import Difference, Why, differences, nearest
from nimble_jobs.store import ScheduleEntry, ScheduleState

NAMES = ("model.source", "input", "torch", "model.file:net.py")
PARTS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from("ab"), max_size=4)


def entry(parts: dict[str, str], state: ScheduleState = ScheduleState.READY, used: float = 0.0) -> ScheduleEntry:
    """An entry of which only parts, state and last use matter."""
    texts = dict.fromkeys(("key", "sha256", "model", "device", "input", "dtype", "mode", "runs"), "")
    counts = dict.fromkeys(("streams", "syncs", "bytes", "hits", "resident_hits"), 0)
    times = dict.fromkeys(("replay_us", "eager_us", "created_at", "build_s"), 0.0)
    return ScheduleEntry(
        **texts, **counts, **times, parts=parts, provenance={}, last_used_at=used, state=state, reason=None
    )


@given(wanted=PARTS, stored=PARTS)
def test_differences(wanted: dict[str, str], stored: dict[str, str]) -> None:
    """Exactly the parts that are not equal, with both values; applied to the stored parts they give the wanted ones."""
    found = differences(wanted, stored)
    assert {d.part for d in found} == {name for name in NAMES if wanted.get(name) != stored.get(name)}
    patched = stored | {d.part: d.wanted for d in found if d.wanted is not None}
    for difference in found:
        if difference.wanted is None:
            patched.pop(difference.part)
    assert patched == wanted


@given(wanted=PARTS, stored=st.lists(PARTS, max_size=6))
def test_nearest(wanted: dict[str, str], stored: list[dict[str, str]]) -> None:
    """Of the same model if there is one, and then none of that kind differs in fewer parts."""
    entries = [entry(parts) for parts in stored]
    found = nearest(wanted, entries)
    if not entries:
        assert found is None
        return
    assert found is not None
    model = wanted.get("model.source")
    same = [e for e in entries if e.parts.get("model.source") == model]
    assert not same or found in same
    fewest = min(len(differences(wanted, e.parts)) for e in same or entries)
    assert len(differences(wanted, found.parts)) == fewest


def test_among_equals() -> None:
    """A ready one before one that was set aside, then the one that was used last."""
    parts = {"model.source": "m", "input": "1"}
    bad = entry(parts, ScheduleState.QUARANTINED, used=9.0)
    old, new = entry(parts, used=1.0), entry(parts, used=2.0)
    assert nearest(parts | {"input": "2"}, [bad, old, new]) is new
    assert nearest(parts, [bad]) is bad


def test_files_that_changed_are_those_of_the_same_model() -> None:
    """Another model's files are no news."""
    file = Difference(part="model.file:blocks.py", wanted="1", stored="2")
    same, other = ({"model.source": source} for source in ("python:net.py:net", "python:other.py:net"))
    known = {"key": "", "parts": same, "hit": False, "reason": "", "differences": (file,)}
    assert Why(**known, nearest=entry(same)).changed_files == ["blocks.py"]
    assert Why(**known, nearest=entry(other)).changed_files == []
    assert Why(**known, nearest=None).changed_files == []
