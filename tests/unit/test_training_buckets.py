"""How many buckets a training on texts has: as many as its steps are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nimble_jobs import buckets as lengths
from nimble_jobs.data import open_reader
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.step import texts
from nimble_jobs.workloads.training.step.texts import TrainTexts
from tests.text_trainings import lay_out, spec_of, write_texts
from tests.trainings import Attempt

AUTO = {"max_length": 32, "buckets": "auto"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("buckets")
    lay_out(found)
    write_texts(found / "many.parquet", 600, seed=5)
    return found


def read(folder: Path, *, epochs: int, batch_size: int = 8, **text: int) -> TrainTexts:
    spec = spec_of(
        folder,
        input__source=str(folder / "many.parquet"),
        input__batch_size=batch_size,
        input__text={**AUTO, **text},
        train__epochs=epochs,
    )
    with open_reader(spec.input) as reader:
        return TrainTexts.read(spec, reader, None)


def chosen(found: TrainTexts) -> tuple[int, ...]:
    return tuple(bucket.tokens for bucket in found.epochs.buckets)


def test_few_steps_have_few_buckets(folder: Path) -> None:
    """More epochs never have fewer, and a long training has those that tokens alone decide."""
    found = [chosen(read(folder, epochs=epochs)) for epochs in (1, 2, 8, 1000)]
    counts = [len(each) for each in found]
    assert counts == sorted(counts)
    assert counts[0] <= 3
    assert counts[0] < counts[-1]
    by_tokens = read(folder, epochs=1).epochs.tokens.histogram
    assert found[-1] == lengths.choose(by_tokens, limit=32, price=0.005, most=16)


def test_batches_that_their_tokens_fill_are_counted(folder: Path) -> None:
    """Batches with room for few tokens make more steps of the same texts, and thus more buckets."""
    assert len(chosen(read(folder, epochs=1, batch_size=600))) == 1
    assert len(chosen(read(folder, epochs=1, batch_size=600, tokens_per_batch=32))) > 1


def test_a_checkpoint_goes_with_its_buckets(folder: Path) -> None:
    """Its count of batches means nothing in other buckets: a version that chooses others starts over, and says why."""
    changes: dict[str, Any] = {"output": "chosen/net", "input__text": AUTO, "schedule__on_miss": "eager"}
    first = Attempt(spec_of(folder, **changes), stop=lambda asked: Stop.DRAIN if asked >= 5 else Stop.GO)
    first.run()
    again = Attempt(spec_of(folder, **changes), number=2, stop=lambda asked: Stop.DRAIN if asked >= 2 else Stop.GO)
    again.run()
    assert again.said("resumed"), "the same buckets are chosen again"
    with mock.patch.object(texts, "_BUCKET_STEPS", 0.0):
        other = Attempt(spec_of(folder, **changes), number=3)
        other.run()
    assert other.said("resumed") == []
    (said,) = other.said("other-training")
    assert "texts.buckets was [" in said
