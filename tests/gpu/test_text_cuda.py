"""Texts on a GPU: in fp16, with several buckets resident over one copy of the weights, and warm in the next process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nimble_jobs.job import JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import real_station
from tests.text_jobs import one_by_one, outputs, run, sentences, text_spec, worst, write_texts
from tests.text_models import write_bert

pytest.importorskip("transformers")

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 256}
LONGEST = 256  # tokens
BUCKETS = [32, 64, 128, LONGEST]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("fp16", 3e-3)])
def test_buckets_are_resident_together_and_warm_in_the_next_process(
    tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """Built, then resident, then stored; each time every embedding is that of its text alone."""
    model = write_bert(tmp_path / "bert", initializer_range=0.05, **SIZES)
    texts = sentences(3000, 300)
    source = write_texts(tmp_path / "t.parquet", texts)
    expected = one_by_one(model, texts, LONGEST)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        station: Any = real_station(store, "w", "cuda:0", None)
        hits = []
        for out, where in (("a", station), ("b", station), ("c", real_station(store, "w", "cuda:0", None))):
            spec = text_spec(
                tmp_path,
                model,
                source,
                out=out,
                model={"dtype": dtype},
                input={"text": {"buckets": BUCKETS, "max_length": LONGEST}},
                schedule={"on_miss": "build", "progressive": False, "fuse": "off"},
                run={"device": "cuda"},
            )
            job = run(store, spec, where)
            assert job.state is JobState.SUCCEEDED, job.error
            assert [bucket["fallback"] for bucket in job.schedule["buckets"]] == [None] * len(BUCKETS)
            hits.append({bucket["hit"] for bucket in job.schedule["buckets"]})
            assert worst(np.stack(list(outputs(tmp_path / out).values())), expected) < tolerance
        assert hits == [{"miss"}, {"resident"}, {"stored"}]
        kept: list[Any] = [station.residents.get(key) for key in station.residents.keys]
        assert len({id(one.siblings) for one in kept}) == 1


def test_a_job_that_begins_in_eager_moves_bucket_by_bucket(tmp_path: Path) -> None:
    """Whatever each bucket runs on in the end, the embeddings are right."""
    model = write_bert(tmp_path / "bert", initializer_range=0.05, **SIZES)
    texts = sentences(20_000, 300)
    source = write_texts(tmp_path / "t.parquet", texts)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        text = {"max_length": LONGEST}
        spec = text_spec(
            tmp_path, model, source, input={"text": text}, schedule={"on_miss": "build"}, run={"device": "cuda"}
        )
        job = run(store, spec)
        assert job.state is JobState.SUCCEEDED, job.error
        some = np.random.default_rng(0).choice(len(texts), 500, replace=False)
        found = np.stack(list(outputs(tmp_path / "out").values()))[some]
        assert worst(found, one_by_one(model, [texts[i] for i in some], LONGEST)) < 1e-4
