"""Which steps of a training are built: only those that pay. And what a training says of its builds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from nimble_jobs.errors import JobFailed
from nimble_jobs.planner.step.worth import StepCosts, expected
from nimble_jobs.store.schedules import BuildFacts
from nimble_jobs.views.jobs import schedule_state
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.step import paying, prepare, validation
from tests import trainings
from tests.text_trainings import lay_out, spec_of
from tests.threaded_trainings import Team, threaded_ranks
from tests.trainings import Attempt, digests

__all__ = ["threaded_ranks"]

pytestmark = pytest.mark.usefixtures("one_thread")

AUTO: dict[str, Any] = {"schedule": {}}
SHORTER, LONGER = 4, 8  # batches of the two buckets in two epochs
ONCE = 14  # batches of the images in two epochs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("paying")
    lay_out(found)
    return found


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("images")
    trainings.lay_out(found)
    return found


@contextmanager
def pays_from(batches: float) -> Iterator[mock.Mock]:
    """Inside, a build of any step pays from so many batches on."""
    costs = StepCosts(build_s=0.0, build_steps=batches / 2, ratio=0.5, source="a guess")
    with mock.patch.object(paying, "expected", return_value=costs) as asked:
        yield asked


def facts(**changes: Any) -> BuildFacts:
    given: dict[str, Any] = {"model": "m", "dtype": "fp32", "input": "x", "build_s": 4.0, "quick_us": None}
    return BuildFacts(**{**given, "eager_us": 1e5, "replay_us": 5e4, "runs": "schedule", **changes})


# ---- the estimate


def test_a_build_must_save_more_than_it_takes() -> None:
    """Quick steps need more batches than slow ones, for what a build takes whatever the step; never fewer than any."""
    costs = StepCosts(build_s=10.0, build_steps=50.0, ratio=0.75, source="")
    assert costs.batches() == 200
    assert costs.batches(1.0) == 240
    assert costs.batches(0.01) == 4200
    assert StepCosts(build_s=1.0, build_steps=1.0, ratio=1.0, source="").batches() == math.inf


@pytest.mark.parametrize("on_gpu", [False, True])
def test_builds_of_the_same_model_count_alone(on_gpu: bool) -> None:
    """Where eager won, a schedule saves nothing. Two programs take twice the time of one's share."""
    others = [facts(model="other", build_s=1000.0, replay_us=9e4)] * 3
    own = expected([facts(), *others], model="m", on_gpu=on_gpu)
    assert own.ratio == 0.5
    assert own.build_s + own.build_steps * 0.1 == pytest.approx(4.0)
    assert "1 earlier build of this model" in own.source
    both = expected([facts()], model="m", on_gpu=on_gpu, programs=2)
    assert both.build_s == pytest.approx(2 * own.build_s)
    assert expected(others, model="m", on_gpu=on_gpu).ratio == pytest.approx(0.9)
    assert expected([facts(runs="eager")], model="m", on_gpu=on_gpu).batches() == math.inf
    assert "other machines" in expected([], model="m", on_gpu=on_gpu).source
    for_texts, for_others = (expected([], model="m", on_gpu=on_gpu, texts=texts) for texts in (True, False))
    assert on_gpu == (for_texts.batches() == for_others.batches())


@pytest.mark.parametrize("texts", [True, False])
def test_builds_of_other_models_count_beside_what_is_expected(texts: bool) -> None:
    """Of the same kind only, and they never end all builds: only a model's own do."""
    inputs = ["x:float32[16, 3, 64, 64], y:int64[16]", "x:uint8[16, 520], y:int64[16]"]
    none = expected([], model="m", on_gpu=False, texts=texts)
    other = facts(model="b", input=inputs[not texts])
    assert expected([other] * 3, model="m", on_gpu=False, texts=texts) == none
    one = expected([facts(model="b", input=inputs[texts], replay_us=4e4)], model="m", on_gpu=False, texts=texts)
    assert one.ratio == pytest.approx((none.ratio + 0.4) / 2)
    lost = facts(model="b", input=inputs[texts], runs="eager")
    assert none.ratio < expected([lost] * 9, model="m", on_gpu=False, texts=texts).ratio < 1


@pytest.mark.parametrize("began", [True, False])
def test_only_a_new_training_decides(began: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has begun may have no kind of step left to go on with, as with `fuse: off`: then its spec decides."""
    setup = cast(Any, SimpleNamespace(request=None, device=None, parts={}, check_code=None, tokens=None))
    means = cast(Any, mock.Mock(on_miss="build"))
    asked: list[Any] = []
    monkeypatch.setattr(prepare, "prepare_stored_step", lambda *_, on_miss, **__: asked.append(on_miss))
    monkeypatch.setattr(prepare, "replace", lambda request, **_: request)
    prepare.prepare_step(setup, means, began=began)
    assert (asked == [means.paying.answer.return_value]) is not began


# ---- what a training on texts does


def test_a_short_training_builds_nothing_and_says_so_once(folder: Path) -> None:
    """It gives the bytes of one that asks for eager: what is measured beforehand changes nothing."""
    short = Attempt(spec_of(folder, output="short/net", **AUTO))
    outcome = short.run()
    (said,) = short.said("fallback")
    assert said.startswith("2 of 2 buckets run in eager: building would not pay: 12 batches are too few")
    assert said.endswith("nimble-jobs cache build SPEC builds for later trainings")
    assert {bucket["fallback"] for bucket in outcome.schedule["buckets"]} == {outcome.schedule["fallback"]}
    assert short.said("building") == []
    assert outcome.timings["build_s"] == 0
    eager = Attempt(spec_of(folder, output="eager/net", schedule={"on_miss": "eager"}))
    eager.run()
    (said,) = eager.said("fallback")
    assert said.startswith("2 of 2 buckets run in eager: schedule.on_miss is eager")
    costs = StepCosts(build_s=1e6, build_steps=0.0, ratio=0.5, source="a guess")
    with mock.patch.object(paying, "expected", return_value=costs):  # steps must be measured to know
        Attempt(spec_of(folder, output="measured/net", **AUTO)).run()
    assert digests(folder / "short/net") == digests(folder / "eager/net") == digests(folder / "measured/net")


def runs(attempt: Attempt) -> list[str]:
    """What the steps of the longer and of the shorter bucket are."""
    summary = next(report["schedule"] for report in attempt.reports if report.get("phase") == "run")
    return [bucket["fallback"] or "schedule" for bucket in summary["buckets"]]


@pytest.fixture(scope="module")
def both(folder: Path) -> dict[str, str]:
    """What an undisturbed training publishes of which one bucket pays and the other does not."""
    undisturbed = Attempt(spec_of(folder, output="both/net", **AUTO))
    with pays_from((SHORTER + LONGER) / 2):
        undisturbed.run()
    longer, shorter = runs(undisturbed)
    assert (longer, shorter.partition(":")[0]) == ("schedule", "building would not pay")
    return digests(folder / "both/net")


@pytest.mark.parametrize("number", [2, 5, 8, 12])
def test_a_resumed_training_keeps_to_what_was_decided(folder: Path, both: dict[str, str], number: int) -> None:
    """The next attempt would build for the bucket in eager, too. It goes on as the first one did, bit for bit."""
    home = folder / "homes" / "both"
    with pays_from((SHORTER + LONGER) / 2):
        spec = spec_of(folder, output=f"resumed-{number}/net", **AUTO)
        stopped = Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= number else Stop.GO, home=home)
        assert stopped.run().stop is Stop.DRAIN
    with pays_from(0) as asked:
        resumed = Attempt(spec, number=2, home=home)
        resumed.run()
        asked.assert_not_called()
    assert runs(resumed) == ["schedule", "the training began in eager and stays exact"]
    (said,) = resumed.said("resumed")
    assert "not bit for bit" not in said
    assert digests(spec.output.path) == both


def test_a_resumed_training_builds_again_what_it_began_with(folder: Path, tmp_path: Path) -> None:
    """If its schedule is gone from the store, whether that pays is not asked."""
    spec = spec_of(folder, output="gone/net", **AUTO)
    with pays_from((SHORTER + LONGER) / 2):
        Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= 5 else Stop.GO).run()
    with pays_from(math.inf) as asked:
        resumed = Attempt(spec, number=2, home=tmp_path / "home")
        resumed.run()
        asked.assert_not_called()
    assert runs(resumed) == ["schedule", "the training began in eager and stays exact"]
    assert resumed.said("building") == ["builds the training step for texts of up to 32 tokens"]


def test_stored_steps_are_loaded_whatever_a_build_costs(folder: Path) -> None:
    """Loading is told once for all buckets, and is no building."""
    home = folder / "homes" / "stored"
    built = Attempt(spec_of(folder, output="built/net"), home=home)
    first = built.run()
    (said,) = built.said("schedule")
    assert said.startswith("2 of 2 buckets: miss (no schedule is stored under this key): loading took ")
    assert f", building {first.timings['build_s']:.3f} s" in said
    assert built.said("building") == [
        "builds the training step for texts of up to 32 tokens",
        "builds the training step for texts of up to 16 tokens",
    ]
    with pays_from(math.inf):
        again = Attempt(spec_of(folder, output="loaded/net", **AUTO), home=home)
        second = again.run()
    (said,) = again.said("schedule")
    assert said.startswith("2 of 2 buckets: stored: loading took ")
    assert "building" not in said
    assert again.said("building") == []
    assert second.timings["build_s"] == 0 < second.timings["load_s"]
    assert first.timings["replays"] == second.timings["replays"] == SHORTER + LONGER


def test_validations_of_buckets_in_eager_build_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where validations are replayed: only those of the bucket whose step is."""
    monkeypatch.setattr(validation, "able", lambda _: SimpleNamespace(graphs=True))
    with pays_from((SHORTER + LONGER) / 2):
        attempt = Attempt(spec_of(folder, output="validated/net", **AUTO))
        outcome = attempt.run()
    assert attempt.said("building") == [
        "builds the training step for texts of up to 32 tokens",
        "builds the forward pass of validations for texts of up to 32 tokens",
    ]
    assert outcome.timings["replays"] == LONGER
    assert outcome.schedule["runs"] == "schedule"
    job: Any = SimpleNamespace(schedule=outcome.schedule)
    assert schedule_state(job) == "eager in 1 of 2 buckets"
    (said,) = (text for text in attempt.said("fallback") if text.startswith("validation"))
    assert said == "validation of texts, up to 16 tokens, runs in eager: as its steps do, and none is stored"


def test_a_resumed_training_builds_no_validations_of_buckets_in_eager(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first attempt did not, whatever a build would cost now."""
    monkeypatch.setattr(validation, "able", lambda _: SimpleNamespace(graphs=True))
    spec = spec_of(folder, output="validated-later/net", **AUTO)
    with pays_from((SHORTER + LONGER) / 2):
        Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= 5 else Stop.GO).run()
    with pays_from(0):
        resumed = Attempt(spec, number=2)
        resumed.run()
    assert resumed.said("building") == []
    (said,) = resumed.said("resumed")
    assert "not bit for bit" not in said


def test_on_miss_fail_still_fails(folder: Path) -> None:
    """Nothing is decided where the spec has decided."""
    with pytest.raises(JobFailed, match=r"schedule\.on_miss is fail"):
        Attempt(spec_of(folder, output="fail/net", schedule={"on_miss": "fail"})).run()


def test_a_training_that_is_cancelled_while_it_builds_says_what(folder: Path) -> None:
    """While the second of two buckets is built."""
    attempt: Attempt

    def stop(_: int) -> Stop:
        return Stop.CANCEL if len(attempt.said("building")) == 2 else Stop.GO

    attempt = Attempt(spec_of(folder, output="cancelled/net"), stop=stop)
    assert attempt.run().stop is Stop.CANCEL
    (said,) = attempt.said("stopped")
    assert said.startswith("after ")
    assert said.endswith(" s of building the training step for texts of up to 16 tokens")


# ---- what a training with one step does


def once(images: Path, output: str, **changes: Any) -> Attempt:
    """A training on images that decides by itself."""
    return Attempt(trainings.spec_of(images, output=f"{output}/net", **{**AUTO, **changes}))


def test_a_short_training_with_one_step_stays_in_eager(images: Path) -> None:
    """It gives the bytes of one that asks for eager, whether the step was measured or not, and its words fit."""
    short = once(images, "short")
    outcome = short.run()
    (said,) = short.said("fallback")
    assert said == f"runs in eager: {outcome.schedule['fallback']}"
    assert said.startswith(f"runs in eager: building would not pay: {ONCE} batches are too few; ")
    assert said.endswith(
        "batches (estimated from other machines, as this one has built no training step yet); "
        "nimble-jobs cache build SPEC builds for later trainings"
    )
    assert short.said("building") == []
    assert (outcome.timings["build_s"], outcome.timings["replays"]) == (0, 0)
    once(images, "eager", schedule={"on_miss": "eager"}).run()
    costs = StepCosts(build_s=1e6, build_steps=0.0, ratio=0.5, source="a guess")
    with mock.patch.object(paying, "expected", return_value=costs):
        once(images, "measured").run()
    assert digests(images / "short/net") == digests(images / "eager/net") == digests(images / "measured/net")


@pytest.mark.parametrize(
    ("name", "batches", "changes"),
    [
        ("all", ONCE, {}),
        ("whole", ONCE - 2, {"train__last_batch": "drop"}),
        ("accumulated", ONCE, {"train__accumulate": 2}),
        ("one-epoch", 7, {"train__epochs": 1}),
    ],
)
def test_batches_of_all_epochs_count(images: Path, name: str, batches: int, changes: dict[str, Any]) -> None:
    """From the number on that pays for a build, the step is built."""
    changes = {"train__lr_schedule": {}, "train__validation": None, "train__checkpoint": None, **changes}
    with pays_from(batches) as asked:
        declined = once(images, f"{name}-declined", **changes).run()
    assert declined.schedule["fallback"].startswith(f"building would not pay: {batches} batches are too few")
    assert asked.call_args.kwargs["programs"] == changes.get("train__accumulate", 1)
    with pays_from(batches - 1):
        built = once(images, f"{name}-built", **changes)
        outcome = built.run()
    assert built.said("building") == ["builds the training step"]
    assert (outcome.schedule["runs"], outcome.timings["replays"] > 0) == ("schedule", True)


@pytest.mark.parametrize("began", ["eager", "schedule"])
def test_a_resumed_training_keeps_its_one_step(images: Path, tmp_path: Path, began: str) -> None:
    """Whatever a build would cost now, and whether or not its schedule is still stored, the bytes stay."""
    first, then = (math.inf, 0) if began == "eager" else (0, math.inf)
    with pays_from(first):
        once(images, f"{began}-whole").run()
        spec = trainings.spec_of(images, output=f"{began}-parts/net", **AUTO)
        Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= 5 else Stop.GO).run()
    with pays_from(then) as asked:
        resumed = Attempt(spec, number=2, home=tmp_path / "home")
        outcome = resumed.run()
        asked.assert_not_called()
    assert outcome.schedule["runs"] == began
    assert resumed.said("building") == ([] if began == "eager" else ["builds the training step"])
    (said,) = resumed.said("resumed")
    assert "not bit for bit" not in said
    assert digests(images / f"{began}-whole/net") == digests(images / f"{began}-parts/net")


def test_validations_of_a_step_in_eager_build_nothing(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where validations are replayed."""
    monkeypatch.setattr(validation, "able", lambda _: SimpleNamespace(graphs=True))
    attempt = once(images, "validated")
    attempt.run()
    assert attempt.said("building") == []
    assert "validation runs in eager: as its steps do, and none is stored" in attempt.said("fallback")


@pytest.mark.parametrize(("batches", "runs"), [(ONCE, "eager"), (ONCE - 1, "schedule")])
def test_the_first_of_several_ranks_decides(images: Path, threaded_ranks: list[Team], batches: int, runs: str) -> None:
    """Alone: the others do as it does."""
    with pays_from(batches) as asked:
        ranks = once(images, f"ranks-{runs}", run__gpus=2, run__device="cpu", model__args={"dropout": 0.0})
        outcome = ranks.run()
    asked.assert_called_once()
    assert threaded_ranks[0].errors == []
    assert (outcome.schedule["runs"], outcome.schedule["ranks"]) == (runs, 2)
    fallback = outcome.schedule["fallback"]
    assert fallback is None if runs == "schedule" else fallback.startswith("building would not pay")


def test_ranks_are_measured_too(images: Path, threaded_ranks: list[Team]) -> None:
    """The first one alone, before it knows the others."""
    costs = StepCosts(build_s=1e6, build_steps=0.0, ratio=0.5, source="a guess")
    with mock.patch.object(paying, "expected", return_value=costs):
        outcome = once(images, "ranks-measured", run__gpus=2, run__device="cpu").run()
    assert threaded_ranks[0].errors == []
    assert outcome.schedule["fallback"].startswith("building would not pay")
