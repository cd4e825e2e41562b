"""Turns the columns of a shard into answers to the requests of a batch file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from nimble_jobs.data import BadRecord, Reader
from nimble_jobs.data.answers import Answers
from nimble_jobs.spec import JobSpec
from nimble_jobs.workloads.collected import Shard
from nimble_jobs.workloads.pooling import pooling_of

FIELDS = ("embedding", "token_count")  # what answers are made of


def answers_of(spec: JobSpec, reader: Reader) -> Answers | None:
    """What makes the lines of the output; None if it is no batch file. Raises ModelError."""
    if spec.output.format != "openai-batch" or reader.requests is None:
        return None
    pooling = pooling_of(spec)
    return Answers(reader.requests, normalized=pooling is not None and pooling.normalize, place=reader.place)


def no_dimensions(spec: JobSpec) -> str | None:
    """Why no request of a batch file may choose the length of its vectors; None if it may."""
    if spec.output.format == "openai-batch" or "embedding" not in spec.output.fields:
        return None
    return (
        f"expected none, because with output.format: {spec.output.format} all embeddings have one length; to answer "
        "such requests, set output.format: openai-batch"
    )


def requests_in(answers: Answers, shards: Iterable[tuple[int, int]]) -> int:
    """How many requests these ranges of records hold."""
    return sum(answers.number(stop) - answers.number(first) for first, stop in shards)


def answered(shard: Shard, answers: Answers, first: int, stop: int) -> tuple[Shard, list[BadRecord]]:
    """The shard with a line for each request with records [first, stop), and the requests that could not be answered
    though none of their records was bad, each as its first record.
    """
    vectors, counts = (shard.columns.get(name) for name in FIELDS)
    if not isinstance(vectors, np.ndarray) or not isinstance(counts, np.ndarray):  # no record is good
        vectors, counts = np.zeros((0, 0), dtype=np.float32), np.zeros(0, dtype=np.int32)
    lines, refused = answers.lines(first, stop, vectors, counts, shard.bad)
    known = {answers.number(record.index) for record in shard.bad}
    late = [answers.first_record(record) for record in refused if record.index not in known]
    return replace(shard, columns={"line": lines} if lines else {}, bad=refused), late
