"""Turns the columns of a shard into answers to the requests of a batch file."""

from __future__ import annotations

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
    return Answers(reader.requests, normalized=pooling is not None and pooling.normalize)


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
