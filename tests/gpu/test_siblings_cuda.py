"""Buckets that take over each other's choice on a real GPU, with compilers, streams and replays in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.verify import TOLERANCE
from nimble_jobs.job import Hit
from nimble_jobs.packing import text_layout
from nimble_jobs.planner import Request, prepare
from nimble_jobs.sentence import Pooling
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of
from tests.text_models import write_bert

pytest.importorskip("transformers")

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 512}
TOKENS = 4096  # of a batch


def asked(folder: Path, length: int, fuse: Any) -> Request:
    layout = text_layout(length, vocabulary=40)
    return Request(
        model=ModelSpec(source=f"transformers:{folder}", dtype="fp16"),
        shape=(layout.nbytes,),
        dtype="uint8",
        packing=layout,
        batch_size=TOKENS // length,
        pooling=Pooling(modes=("mean",)),
        schedule=ScheduleSpec(progressive=False, fuse=fuse),
    )


@pytest.mark.parametrize("fuse", ["off", "auto"])
def test_buckets_take_over_a_choice(tmp_path: Path, device: torch.device, fuse: str) -> None:
    """It is built in less time than it was searched for, agrees with eager, and is a stored hit like any other."""
    folder = write_bert(tmp_path / "bert", initializer_range=0.05, **SIZES)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        first = prepare(asked(folder, 64, fuse), device=device, store=store, residents=Residents(2**33)).loaded.schedule
        assert first is not None
        assert first.taken_from is None
        for length in (32, 128, 256):
            request = asked(folder, length, fuse)
            made = prepare(request, device=device, store=store, residents=Residents(2**33))
            schedule = made.loaded.schedule
            assert (made.loaded.fallback, made.hit) == (None, Hit.MISS)
            assert schedule is not None
            said = [(c.name, c.reason) for c in schedule.candidates]
            assert schedule.taken_from == (first.key, f"{TOKENS // 64}×64 tokens"), said
            assert (schedule.kernels, schedule.merged) == (first.kernels, first.merged)
            assert schedule.build_s < first.build_s, said
            made.loaded.close()
            again = prepare(request, device=device, store=store, residents=Residents(2**33))
            assert (again.hit, again.loaded.fallback) == (Hit.STORED, None)
            random = np.random.default_rng(length)
            values = {
                "input_ids": random.integers(4, 40, (request.batch_size, length)),
                "attention_mask": random.integers(1, length + 1, request.batch_size),
            }
            layout = request.packing
            assert layout is not None
            rows = torch.from_numpy(layout.pack(values))
            with torch.no_grad():
                expected = again.loaded.module(rows.to(device))["embedding"].cpu()
            found = outputs_of(again.loaded, rows)["embedding"]
            assert relative_norm(found, expected) < TOLERANCE["fp16"]
            again.loaded.close()
        far = prepare(asked(folder, 512, fuse), device=device, store=store, residents=Residents(2**33)).loaded.schedule
        assert far is not None
        assert far.taken_from is None, "eight times as long"
