"""The models of a job over texts, one for each bucket, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nimble_jobs.buckets import shares
from nimble_jobs.data import Reader
from nimble_jobs.engine.device import separate_memory
from nimble_jobs.errors import DataError
from nimble_jobs.pipeline import usable_cores
from nimble_jobs.planner import Request, key_parts, schedule_key
from nimble_jobs.store import Store
from nimble_jobs.workloads.answering import no_dimensions
from nimble_jobs.workloads.bad_records import BadRecords
from nimble_jobs.workloads.context import JobContext
from nimble_jobs.workloads.cuts import Span
from nimble_jobs.workloads.parts import Lane
from nimble_jobs.workloads.stages import Stages
from nimble_jobs.workloads.text.feed import Bucket, Counts, Manner, TextFeed
from nimble_jobs.workloads.text.setup import TextSetup
from nimble_jobs.workloads.text.survey import Survey, buckets_of, lengths_of, survey
from nimble_jobs.workloads.text.windows import records_of


@dataclass(frozen=True, kw_only=True, eq=False)
class TextPlan:
    """The buckets of a job, and what each asks of the planner."""

    setup: TextSetup
    buckets: tuple[Bucket, ...]
    requests: tuple[Request, ...]
    shares: tuple[float, ...]  # of the records, as far as is known
    window: int  # records in a window, about

    @property
    def in_turn(self) -> list[int]:
        """The buckets in the order in which their schedules are to be built: what saves most time comes first.

        All batches have about as many tokens, so that is what has most batches.
        """
        return sorted(range(len(self.requests)), key=lambda number: -(self.requests[number].batches or 0.0))

    def to_json(self) -> dict[str, Any]:
        """What a later attempt must do as this one does."""
        return {"buckets": [bucket.length for bucket in self.buckets], "shares": list(self.shares)}


def request_for(base: Request, bucket: Bucket, records: float | None = None) -> Request:
    """What the batches of a bucket, of about so many `records`, ask of the planner. `base` says the rest."""
    return replace(
        base,
        shape=(bucket.layout.nbytes,),
        dtype="uint8",
        batch_size=bucket.rows,
        preprocess=None,
        packing=bucket.layout,
        batches=records / bucket.rows if records is not None else None,
    )


def plan_of(
    reader: Reader,
    setup: TextSetup,
    base: Request,
    *,
    fields: Sequence[str],
    device: torch.device,
    store: Store,
    noted: Any = None,
) -> TextPlan:
    """The buckets of a job, or those of an earlier attempt at it, which has `noted` them. `fields` are those of the
    output. Raises DataError.
    """
    pads = separate_memory(device)
    earlier = _noted(noted, setup) if noted is not None else None
    base = replace(base, model=setup.model(base.model))
    if earlier is not None:
        lengths, found = earlier
    else:
        seen = survey(reader, setup)
        lengths = lengths_of(
            seen,
            setup,
            stored=lambda length: _stored(base, setup, length, device, store),
            window=min(reader.total, records_of(fields, pads=pads, mean=seen.mean)),
            pads=pads,
        )
        found = tuple(_shares(seen, lengths))
    buckets = buckets_of(lengths, setup, pads=pads)
    requests = tuple(
        request_for(base, bucket, share * reader.total) for bucket, share in zip(buckets, found, strict=True)
    )
    mean = sum(share * bucket.length for share, bucket in zip(found, buckets, strict=True))
    window = records_of(fields, pads=pads, mean=mean)  # as in every attempt
    return TextPlan(setup=setup, buckets=buckets, requests=requests, shares=found, window=window)


def _noted(value: Any, setup: TextSetup) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The buckets that an earlier attempt noted, with their shares of the records. Raises DataError if none can be."""
    fields = value if isinstance(value, dict) else {}
    lengths, found = fields.get("buckets"), fields.get("shares")
    if (
        isinstance(lengths, list)
        and isinstance(found, list)
        and len(lengths) == len(found) > 0
        and all(type(length) is int and 0 < length <= setup.limit for length in lengths)
        and lengths == sorted(set(lengths))
        and all(isinstance(share, int | float) and 0 <= share <= 1 for share in found)
    ):
        return tuple(lengths), tuple(found)
    raise DataError(
        "what an earlier attempt at this job noted beside its output about buckets of texts is damaged; expected it "
        "as it was written; submit the job anew"
    )


def _shares(seen: Survey, lengths: Sequence[int]) -> list[float]:
    return shares(seen.lengths, lengths) if seen.lengths else [1 / len(lengths)] * len(lengths)


def _stored(base: Request, setup: TextSetup, length: int, device: torch.device, store: Store) -> bool:
    (bucket,) = buckets_of((length,), setup, pads=separate_memory(device))
    return store.schedules.ready(schedule_key(key_parts(request_for(base, bucket), device)))


def feed_of(
    context: JobContext,
    reader: Reader,
    plan: TextPlan,
    lanes: Sequence[Lane],
    turns: Callable[[], Iterable[tuple[Sequence[Span], int]]],
    *,
    windows: Sequence[Span] | None,
    bad: BadRecords,
    device: torch.device,
) -> tuple[Callable[[], TextFeed], Stages, Counts]:
    """What brings the texts to the lanes, each time that it is called; the meters; and what is counted.

    `windows` are those that this attempt scores; None: not known. `turns` makes them, as `TextFeed` takes them.
    """
    pads = separate_memory(device)
    records = sum(span.stop - span.start for span in windows) if windows is not None else None
    few = records is not None and records <= min(bucket.rows for bucket in plan.buckets)
    loaded = [lane.prepared.loaded for lane in lanes]
    in_flight = max(one.in_flight for one in loaded)
    stages = Stages(context, alone=few, in_flight=in_flight, texts=True)
    threads = usable_cores() if pads else max(1, usable_cores() // 2)  # the model itself needs the host's cores
    counts = Counts(by_bucket=[0] * len(plan.buckets))
    last = windows[-1].last if windows else -1
    manner = Manner(pads=pads, threads=threads, last=last, no_dimensions=no_dimensions(context.spec))

    def feed() -> TextFeed:
        both = list(zip(plan.buckets, loaded, strict=True))
        return TextFeed(reader, plan.setup, both, turns(), stages, bad=bad, counts=counts, manner=manner)

    return feed, stages, counts


def figures(counts: Counts, plan: TextPlan, lanes: Sequence[Lane], run_s: float) -> dict[str, Any]:
    """What `show` says about the texts."""
    return {
        "records": counts.records,
        "truncated": counts.cut,
        "max_length": plan.setup.limit,
        "tokens": counts.tokens,
        "tokens_per_s": counts.tokens / run_s if run_s > 0 else None,
        "padding_share": round(counts.padding_share, 4),
        "buckets": [
            {
                "length": bucket.length,
                "batch": bucket.rows,
                "records": records,
                "key": lane.prepared.loaded.key,
                "hit": lane.prepared.hit.value,
                "runs": "schedule" if lane.prepared.loaded.instances else "eager",
                "fallback": lane.prepared.loaded.fallback,
                "spared": lane.prepared.loaded.spared,
            }
            for bucket, records, lane in zip(plan.buckets, counts.by_bucket, lanes, strict=True)
        ],
    }


def tell_figures(context: JobContext, said: dict[str, Any]) -> None:
    """Record how many texts were cut, and how much padding there was."""
    if said["truncated"]:
        context.event(
            "truncated",
            f"{said['truncated']:,} of {said['records']:,} texts were cut to {said['max_length']} tokens",
            {"truncated": said["truncated"]},
        )
