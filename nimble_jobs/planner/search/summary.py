"""The one place where what a search found becomes a schedule, with its table of candidates."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.lookup.siblings import Precedent
from nimble_jobs.planner.lookup.stored import Storable
from nimble_jobs.planner.search.candidate import PAYS, MeasuredCandidate, left_out
from nimble_jobs.planner.search.contest import Contest
from nimble_jobs.schedule import Candidate, Schedule


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the schedules of a target's programs share."""

    winner: MeasuredCandidate
    contest: Contest | None  # with eager; None if eager could not win, or was slower beyond doubt
    candidates: tuple[Candidate, ...]  # everything that was tried, with eager in front and the winner marked
    tolerance: float
    error: float | None  # relative norm against eager, of what was captured last
    device: torch.device
    build_s: float  # each program's share
    stages: tuple[tuple[str, float], ...]
    contested: Role | None = Role.FORWARD  # the program whose replay the contest timed; None: several together
    precedent: Precedent | None = None  # the sibling whose choice was taken over; None: all candidates were tried
    memories: Mapping[Role, int] = field(default_factory=dict)  # bytes, by program, of what was captured last

    @property
    def stays_eager(self) -> bool:
        """Whether eager is faster."""
        return self.contest is not None and self.contest.eager_wins

    def storable(
        self, role: Role, parts: Mapping[str, str], key: str, *, eager_us: float, failure: str | None = None
    ) -> Storable:
        """The schedule of one program, with what must be stored beside it. `failure`: why it must not be used."""
        winner, planned, contest = self.winner, self.winner.programs[role], self.contest
        compiled, binaries = pack(planned.recording.kernels) or ((), b"")
        timed_in_turns = contest is not None and role is self.contested and winner.in_flight == 1
        schedule = Schedule(
            key=key,
            program=planned.recording.program,
            plan=planned.plan,
            facts=planned.facts,
            offsets=planned.memory.offsets,
            arena_bytes=planned.memory.peak_bytes,
            durations_us=planned.durations_us,
            kernels=winner.source.kernels,
            layout=winner.source.layout,
            folded=winner.source.folded,
            merged=winner.source.merged,
            without=tuple(sorted(winner.source.without)),
            compiled=compiled,
            binaries=hashlib.sha256(binaries).hexdigest() if binaries else None,
            in_flight=winner.in_flight,
            candidates=self.candidates,
            runs="eager" if self.stays_eager else "schedule",
            noise=contest.noise if contest is not None else None,
            tolerance=self.tolerance,
            error=self.error,
            device=devices.describe(self.device),
            eager_us=eager_us,
            replay_us=contest.replay_us if contest is not None and timed_in_turns else planned.replay_us,
            peak_bytes=self.memories[role],
            build_s=self.build_s,
            stages=self.stages,
            choices=planned.recording.choices,
            taken_from=(self.precedent.schedule.key, self.precedent.batch) if self.precedent is not None else None,
        )
        constants = planned.recording.constants
        return Storable(schedule=schedule, parts=parts, constants=constants, binaries=binaries, refused=failure)


def table(
    tried: Sequence[Candidate],
    winner: MeasuredCandidate,
    *,
    eager_us: float,
    records: int,
    contest: Contest | None,
    failure: str | None = None,
    many: bool = False,
    precedent: Precedent | None = None,
) -> tuple[Candidate, ...]:
    """Everything that was tried, with eager in front and the winner marked. `many`: the choice was made by records a
    second. `precedent`: whose choice was taken over, so what was left out there is listed too.
    """
    row = winner.row
    stays_eager = contest is not None and contest.eager_wins
    said = "the reference"
    if failure is not None:
        said += "; runs because no candidate passed its check"
    elif contest is not None and stays_eager:
        said += f"; {contest.over(row.name)}"
    eager = Candidate(
        name="eager",
        replay_us=eager_us,
        records_per_s=records / eager_us * 1e6,
        peak_bytes=None,
        error=0.0,
        chosen=failure is not None or stays_eager,
        reason=said,
    )
    weighed = " for its memory" if winner.available_bytes else ""
    won = "the most records a second" if many else f"the least time{weighed}"
    won += " of the candidates that passed their check"
    if precedent is not None:
        won = f"the candidate that was chosen for {precedent.words}, and passed its check here too"
    rows = [
        replace(c, chosen=not stays_eager, reason=f"{won}; slower than eager" if stays_eager else won)
        if c == row and failure is None
        else replace(c, reason=c.reason or _why_not(c, row, many=many))
        for c in tried
    ]
    return (eager, *rows, *(_not_repeated(precedent, {c.name for c in rows}) if precedent is not None else ()))


def _not_repeated(precedent: Precedent, tried: Collection[str]) -> list[Candidate]:
    """What was tried for a sibling and not here."""
    others = [c for c in precedent.schedule.candidates if c.name != "eager" and c.name not in tried]
    return [left_out(c.name, f"not tried; for {precedent.words}: {c.reason}", streams=c.streams) for c in others]


def _why_not(candidate: Candidate, winner: Candidate, *, many: bool) -> str:
    rate, best = candidate.records_per_s or 0.0, winner.records_per_s or 0.0
    if rate > best:
        if rate * PAYS < best:
            return f"within the noise of {winner.name}"
        return f"faster than {winner.name}, but not by enough to justify its memory"
    return f"fewer records a second than {winner.name}" if many else f"slower than {winner.name}"
