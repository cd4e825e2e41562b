"""What a job records about itself for its user to see: where weights and schedule come from, and why it began again."""

from __future__ import annotations

from nimble_jobs.data import AnyStaging
from nimble_jobs.job import Hit
from nimble_jobs.models import random_weights
from nimble_jobs.planner import Prepared
from nimble_jobs.planner.lookup.siblings import choice_words
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.planner.search.contest import faster_in_eager
from nimble_jobs.plural import count
from nimble_jobs.spec import ModelSpec
from nimble_jobs.workloads.context import JobContext


def tell_weights(context: JobContext, model: ModelSpec) -> None:
    """Record that the weights are random: a forgotten `model.weights` must not look like a result."""
    made = random_weights(model)
    if made is not None:
        context.event("weights", made, {"seed": model.seed})


def tell_unchecked(context: JobContext, limits: Limits) -> None:
    """Record why numbers out of range will not be found before the model meets them, if so."""
    if limits.unchecked is not None:
        context.event("unchecked", f"the input is not checked for out-of-range numbers: {limits.unchecked}", {})


def tell(context: JobContext, prepared: Prepared, what: str = "") -> None:
    """Record how the job came by its schedule, and any fallback. `what` says which one, if it has several."""
    loaded = prepared.loaded
    if loaded.fallback is not None:
        context.event("fallback", f"{what}runs in eager: {loaded.fallback}", {"key": loaded.key})
        return
    reason = f" ({prepared.miss_reason})" if prepared.miss_reason else ""
    how = choice_words(loaded.schedule) + faster_in_eager(loaded.schedule)
    spared = f"; {loaded.spared}" if loaded.spared is not None else ""
    built = prepared.hit is Hit.MISS and prepared.progress is None
    took = f"loading took {prepared.load_s:.3f} s" + (f", building {prepared.build_s:.3f} s" if built else "")
    context.event(
        "schedule",
        f"{what}{prepared.hit.value} {loaded.key[:12]}{reason}: {took}{how}{spared}",
        {"key": loaded.key, "hit": prepared.hit.value},
    )


def tell_restart(context: JobContext, staging: AnyStaging) -> None:
    """Record why shards of an earlier attempt are not taken over, if so."""
    why = None
    if staging.begun_again is not None:
        why = f"the model carries {staging.begun_again!r} from batch to batch"
    elif staging.decoded_before is not None:
        why = f"pictures were decoded by {staging.decoded_before} before"
    if why is not None:
        context.event("restart", f"starts again at the first record: {why}", {})


def tell_troubles(context: JobContext, troubles: int) -> None:
    """Record how many requests to an object store were made again."""
    if troubles:
        text = f"{count(troubles, 'request')} to the object store got no answer and had to be made again"
        context.event("trouble", text, {"requests": troubles})


def tell_published(context: JobContext, staging: AnyStaging) -> None:
    """Record what is not as it should be about an output, or about how it was published."""
    for field, some in staging.not_finite.items():
        text = f"{field} has NaN or infinity for {count(some.records, 'record')}; the first is {some.first}"
        context.event("not-finite", text, {"field": field, **vars(some)})
    tell_troubles(context, staging.troubles)
    if staging.left_behind is not None:
        context.event("left-behind", f"files that nobody needs could not be removed: {staging.left_behind}", {})
