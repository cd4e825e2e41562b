"""Finds a stored sibling whose choice of candidate a build may take over. Siblings differ only in the bucket of texts.

The same kernels tend to win over a range of lengths, so one search serves it. At the ends of that range others may win,
and a length beyond it is searched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nimble_jobs.errors import Damaged
from nimble_jobs.families import batch_words, bucket_of, family_of, rows_of
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import ScheduleState, Store

FARTHEST = 4.0  # times as long, or a batch of so many times as many tokens: no choice is taken over from farther away


@dataclass(frozen=True, kw_only=True)
class Precedent:
    """A sibling's schedule, whose candidates were all tried."""

    schedule: Schedule
    batch: str  # in words

    @property
    def words(self) -> str:
        """The sibling, for people."""
        return f"{self.batch} ({self.schedule.key[:12]})"


def precedent_of(parts: Mapping[str, str], store: Store) -> Precedent | None:
    """The nearest sibling of the key with these parts that was itself searched for and passed its check.

    None for other inputs than texts, and if there is none within FARTHEST. Raises StoreError.
    """
    family = family_of(parts)
    if family is None or rows_of(parts) is None:
        return None
    own = schedule_key(parts)
    near = sorted(
        (_apart(parts, entry.parts), entry.key)
        for entry in store.schedules.list()
        if entry.state is ScheduleState.READY and entry.key != own and family_of(entry.parts) == family
    )
    for apart, key in near:
        if apart > FARTHEST:
            break
        stored = store.schedules.find(key)
        try:
            schedule = stored.load() if stored is not None else None
        except Damaged:
            continue  # whoever asks for it is told
        if stored is not None and schedule is not None and schedule.taken_from is None:
            return Precedent(schedule=schedule, batch=batch_words(stored.parts))
    return None


def choice_words(schedule: Schedule | None) -> str:
    """The end of a sentence about a schedule whose choice is a sibling's; empty for others."""
    if schedule is None or schedule.taken_from is None:
        return ""
    key, batch = schedule.taken_from
    return f"; its candidate was taken over from that of {batch} ({key[:12]})"


def _apart(one: Mapping[str, str], other: Mapping[str, str]) -> float:
    """How many times as long the texts of one are, or as large its batches: at least 1."""
    lengths = [float(bucket_of(parts) or 1) for parts in (one, other)]
    tokens = [length * (rows_of(parts) or 1) for length, parts in zip(lengths, (one, other), strict=True)]
    return max(max(pair) / min(pair) for pair in (lengths, tokens))
