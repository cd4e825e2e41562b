"""Decides what a job should build now and what later, by comparing expected seconds, and gives the reason.

These are pure functions: the caller passes measurements and gets a plan. Nothing here looks at a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Beside a job on the same device, a build rests as long as it works. While it works, both share the device equally. So
# the job loses a quarter of the device's time on average, and is a third slower.
RESTS = 1.0  # seconds of rest for each second on the device
_ON_DEVICE = 0.5  # share of a build spent on the device: capture, check, measure (`stages` of schedules)
_SLOWER_DEVICE = 1 / 3

# A build at niceness 10 gets about a tenth of a core that the job wants too (weight 110 against 1024). What it still
# costs the job is caches, memory bandwidth and late threads.
_SLOWER_HOST = 0.25
_STRETCHED = 4.0  # a build takes so many times as long if no core is idle
_HOST_CORES = 2.0  # cores that a build for a GPU keeps busy: one traces and measures, one compiles

STAKE = 0.2  # share of its whole time that a job may lose if a build gains nothing
QUICK_STAKE = 0.25  # the same for the quick candidate alone on a GPU, where what it saves is measured, not guessed
MARGIN_S = 0.05  # a plan must be expected to save at least this much


class Plan(StrEnum):
    """What to build now."""

    NOTHING = "nothing"
    QUICK = "quick"  # the quick candidate, in the job's process; the job stands still meanwhile
    BESIDE = "beside"  # the schedule, in a process of its own
    QUICK_BESIDE = "quick and beside"
    WAIT = "wait"  # the schedule; the job stands still meanwhile

    @property
    def quick(self) -> bool:
        return self in (Plan.QUICK, Plan.QUICK_BESIDE)

    @property
    def beside(self) -> bool:
        return self in (Plan.BESIDE, Plan.QUICK_BESIDE)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the stages of building are expected to cost and to gain on a device that is otherwise idle."""

    quick_s: float  # recording, capturing and checking the quick candidate
    quick_ratio: float  # its time per batch divided by eager's in the job
    build_s: float  # the whole search
    build_ratio: float  # its winner's time per batch divided by eager's, at most 1
    start_s: float  # starting a separate process: imports, device, model
    move_s: float  # loading and checking a stored schedule
    source: str  # where these figures come from, in words


@dataclass(frozen=True, kw_only=True)
class Situation:
    """How far a job is, and who else would gain from its schedule."""

    left: int  # records that are left
    record_s: float  # seconds per record, as measured lately
    busy: float = 1.0  # share of that time in which the model computes; 0: something else limits the job
    spent_s: float = 0.0  # seconds since the job began, its start included
    on_gpu: bool = True
    idle_cores: float = 0.0  # cores that nothing uses
    threads: int = 1  # threads with which the model computes on a CPU
    beside: bool = True  # whether a separate process may build
    outlives: bool = False  # whether that process goes on when the job has ended
    uses: float = 0.0  # expected uses of the schedule by other jobs before an idle worker would have built it
    records: int = 0  # records in one such use


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to build now. Expected figures, for this job and for uses elsewhere; `saving_s` is before costs."""

    plan: Plan
    later: bool  # whether an idle worker should build the schedule
    cost_s: float
    saving_s: float
    ends_s: float  # expected seconds to the end of the job
    eager_s: float  # the same if nothing is built
    why: str


def decide(situation: Situation, costs: Costs) -> Decision:
    """The plan with the least expected time, minus what it saves elsewhere.

    A plan may cost at most STAKE or QUICK_STAKE of the job's time, so that a wrong expectation costs no more than that.
    If other jobs are expected to use the schedule, a plan may cost whatever it saves them.
    """
    eager_s = situation.left * situation.record_s
    best, ends_s, cost_s, worth_s = Plan.NOTHING, eager_s, 0.0, 0.0
    for plan in _possible(situation):
        time_s, stake_s, elsewhere_s = _expected(plan, situation, costs)
        share = QUICK_STAKE if plan is Plan.QUICK and situation.on_gpu else STAKE
        risky = stake_s > share * (situation.spent_s + eager_s) and elsewhere_s <= stake_s
        if not risky and time_s - elsewhere_s < ends_s - worth_s - MARGIN_S:
            best, ends_s, cost_s, worth_s = plan, time_s, stake_s, elsewhere_s
    saving_s = eager_s - ends_s + worth_s + cost_s
    later = best in (Plan.NOTHING, Plan.QUICK)
    why = _why(best, situation, costs, eager_s=eager_s, ends_s=ends_s, worth_s=worth_s)
    return Decision(plan=best, later=later, cost_s=cost_s, saving_s=saving_s, ends_s=ends_s, eager_s=eager_s, why=why)


def _possible(situation: Situation) -> list[Plan]:
    """The possible plans, those that ask less of the job first. Of equal plans, `decide` takes the first.

    A background build is preferred, since the job loses little if it takes longer than expected. A job only waits
    for a build if no other process can build, or if others will use the schedule and no build would outlive the job.
    """
    beside = [Plan.BESIDE, Plan.QUICK_BESIDE] if situation.beside else []
    wait = [Plan.WAIT] if not beside or (situation.uses and not situation.outlives) else []
    return [Plan.QUICK, *beside, *wait]


def _expected(plan: Plan, now: Situation, costs: Costs) -> tuple[float, float, float]:
    """Seconds to the end of the job under a plan, how many of them the plan costs, and seconds saved elsewhere."""
    after_quick_s = _with(now, costs.quick_ratio)
    after_build_s = _with(now, min(costs.build_ratio, costs.quick_ratio) if plan.quick else costs.build_ratio)
    elsewhere_s = now.uses * now.records * max(0.0, now.record_s - after_build_s)
    if plan is Plan.QUICK:
        return costs.quick_s + now.left * after_quick_s, costs.quick_s, 0.0
    if plan is Plan.WAIT:
        return costs.build_s + now.left * after_build_s, costs.build_s, elsewhere_s
    first_s = costs.quick_s if plan.quick else 0.0
    record_s = after_quick_s if plan.quick else now.record_s
    slower, lasts_s = beside(now, costs)
    meanwhile = lasts_s / (record_s * (1 + slower)) if record_s > 0 else float("inf")
    if meanwhile >= now.left:  # the job ends first
        lost_s = now.left * record_s * slower
        return first_s + now.left * record_s + lost_s, first_s + lost_s, elsewhere_s if now.outlives else 0.0
    lost_s = lasts_s * slower / (1 + slower)
    last_s = (now.left - meanwhile) * record_s
    if move_pays(now.left - meanwhile, record_s, after_build_s, costs):
        lost_s, last_s = lost_s + costs.move_s, costs.move_s + (now.left - meanwhile) * after_build_s
    return first_s + lasts_s + last_s, first_s + lost_s, elsewhere_s


def move_pays(left: float, record_s: float, after_s: float, costs: Costs) -> bool:
    """Whether to load a stored schedule: loading must take less time than the schedule saves on the records left.

    `record_s` and `after_s` are the seconds per record without and with the schedule.
    """
    return left * (record_s - after_s) > costs.move_s


def beside(now: Situation, costs: Costs) -> tuple[float, float]:
    """How much slower a job is while another process builds for it, as a share, and for how many seconds."""
    wanted = _HOST_CORES if now.on_gpu else float(max(1, now.threads))
    short = min(1.0, max(0.0, 1 - now.idle_cores / wanted))  # share of the cores that it would take from the job
    slower = _SLOWER_HOST * short
    stretched = 1 + (_STRETCHED - 1) * short
    if now.on_gpu:
        slower += _SLOWER_DEVICE * _ON_DEVICE
        stretched += RESTS * _ON_DEVICE
    return slower, costs.start_s + costs.build_s * stretched


def _with(now: Situation, ratio: float) -> float:
    """Seconds per record if the model takes `ratio` of the present time. On a CPU the rest of that time is added; on a
    GPU the host does the rest while the device computes, so the longer of both counts.
    """
    rest, ratio = 1 - now.busy, min(1.0, ratio)
    return now.record_s * (max(ratio, rest) if now.on_gpu else rest + now.busy * ratio)


def _why(plan: Plan, now: Situation, costs: Costs, *, eager_s: float, ends_s: float, worth_s: float) -> str:
    left = f"{now.left:,} records left would take {_seconds(eager_s)} in eager"
    build = f"a build would take about {_seconds(costs.build_s)} ({costs.source})"
    saves = f"saves {_seconds(max(0.0, eager_s - ends_s))} of it"
    elsewhere = f", and {_seconds(worth_s)} in {now.uses:.0f} uses elsewhere" if worth_s > 0 else ""
    match plan:
        case Plan.NOTHING:
            return f"continues in eager: {left}; {build}"
        case Plan.QUICK:
            return (
                f"captures eager's kernels: {left}; that takes about {_seconds(costs.quick_s)} and {saves}; {build} "
                "and pays only later"
            )
        case Plan.WAIT:
            return f"builds first: {left}; {build}; it {saves}{elsewhere}"
    quick = f"captures eager's kernels in about {_seconds(costs.quick_s)}, and " if plan.quick else ""
    _, lasts_s = beside(now, costs)
    alongside = f"{_seconds(lasts_s)} alongside the job"
    return f"{quick}builds in the background: {left}; {build}, {alongside}; that {saves}{elsewhere}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"
