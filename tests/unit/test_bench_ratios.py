"""From rows to ratios, and the requests that rows come from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.bench import FAMILIES, Request, compare, geometric_means
from nimble_jobs.bench import request as asked
from nimble_jobs.bench.ratios import best_of, geometric_mean
from nimble_jobs.bench.request import LAYOUTS
from nimble_jobs.bench.zoo import MORE, ZOO
from nimble_jobs.errors import UsageError
from tests.bench_samples import results, row, rows


def test_the_best_of_torch_compile_is_over_modes_and_layouts() -> None:
    """All modes, with and without a graph around, in both layouts, compete; the fastest is what ours is compared to."""
    extra = row(system="compile-default", layout="channels-last", replay_us=500.0)
    (comparison,) = compare([*rows(), extra])
    assert comparison.best_compile == extra
    assert comparison.over_best_compile == 500.0 / 400.0


def test_what_the_best_of_torch_compile_was_chosen_from_is_told() -> None:
    """Models that were measured in other modes or layouts are told apart; what has no figure is not claimed."""
    both = [row(system=s, layout=lay) for s in ("compile-default", "compile-default+graph") for lay in LAYOUTS["both"]]
    words = "default, default+graph in each layout"
    assert best_of(compare(both)) == [f"best compile: the fastest of {words}"]
    tokens = [row("bert_base", s) for s in ("compile-default", "compile-default+graph")]
    assert best_of(compare([*both, *tokens])) == [f"best compile: the fastest of {words}"]
    other = [row("darts", "compile-max-autotune"), row("darts", "compile-default", replay_us=None, error="too slow")]
    assert best_of(compare([*both, *other])) == [
        "best compile: the fastest of",
        f"  resnet50: {words}",
        "  darts: max-autotune in contiguous alone",
    ]
    assert best_of(compare([*both, row("darts")])) == [f"best compile, for 1 of 2 models: the fastest of {words}"]
    assert best_of(compare([row(), row(system="ours")])) == []


def test_a_comparison_says_what_it_compares_with() -> None:
    """Its JSON names every mode and layout of torch.compile that was measured, and those that were not."""
    fast = row(system="compile-default+graph", layout="channels-last", replay_us=500.0)
    (comparison,) = compare([row(), row(system="ours"), row(system="compile-default"), fast])
    found = comparison.to_json()
    assert (found["best_compile_us"], found["over_best_compile"]) == (500.0, 1.25)
    assert [(c["system"], c["layout"]) for c in found["compile_measured"]] == [
        ("compile-default+graph", "channels-last"),
        ("compile-default", "contiguous"),
    ]
    missing = {(c["system"], c["layout"]) for c in found["compile_not_measured"]}
    assert ("compile-default", "channels-last") in missing
    assert ("compile-max-autotune", "contiguous") in missing
    assert len(missing) == 2 * 5 - 2


def test_the_faster_layout_of_eager_counts() -> None:
    """Eager is taken at its best, too."""
    (comparison,) = compare([*rows(), row(layout="channels-last", replay_us=4000.0)])
    assert comparison.over_eager == 10.0


def test_a_wrong_or_failed_system_is_no_competitor() -> None:
    """A row with an error never wins, whatever time it holds; it is listed apart."""
    bad = row(system="compile-default", replay_us=1.0, error="wrong output")
    (comparison,) = compare([row(), row(system="ours"), bad])
    assert comparison.best_compile is None
    assert comparison.over_best_compile is None
    assert comparison.errors == (bad,)


def test_what_is_missing_gives_no_ratio() -> None:
    """Without ours, or without a figure, a ratio is None and does not raise."""
    (comparison,) = compare([row(), row(system="ours-streams", replay_us=None, note="not tried")])
    assert (comparison.over_eager, comparison.over_one_stream) == (None, None)


def test_the_planner_compares_its_own_times() -> None:
    """Single stream against chosen schedule: both timed by the planner, not one of them by the benchmark."""
    (comparison,) = compare([row(system="ours-1-stream"), row(system="ours", facts={"built_replay_us": 325.0})])
    assert comparison.over_one_stream == 2.0


def test_models_dtypes_and_batches_are_kept_apart() -> None:
    """One comparison for each; rows of throughput belong to none."""
    found = compare([row(), row(dtype="fp32"), row(batch=8), row("bert_base"), row(system="ours", in_flight=2)])
    assert [(c.model, c.dtype, c.batch) for c in found] == [
        ("resnet50", "fp16", 1),
        ("resnet50", "fp32", 1),
        ("resnet50", "fp16", 8),
        ("bert_base", "fp16", 1),
    ]
    assert found[0].ours is None


def test_geometric_means_count_their_models() -> None:
    """The mean is over the models that have the ratio, and says over how many."""
    means = geometric_means(compare([*results().rows, row("resnet18")]))
    mean, count = means["over_best_compile"]
    assert mean == pytest.approx(1.6)
    assert count == 2 * len(ZOO)


@given(st.lists(st.floats(0.01, 100), min_size=1), st.floats(0.1, 10))
def test_geometric_mean_scales(values: list[float], factor: float) -> None:
    """It lies between the extremes, and scaling every value scales it."""
    mean = geometric_mean(values)
    assert mean is not None
    assert min(values) * 0.999 <= mean <= max(values) * 1.001
    assert geometric_mean([v * factor for v in values]) == pytest.approx(mean * factor)


def test_no_values_have_no_mean() -> None:
    """None, not 1 and not an error."""
    assert geometric_mean([None]) is None


def test_units_of_a_gpu() -> None:
    """All families, fp16 and fp32, both layouts for images where the system does not choose itself, one for tokens."""
    units = Request(models=("resnet50", "bert_base")).units(cuda=True)
    assert {u.family for u in units} == set(FAMILIES)
    assert {u.dtype for u in units} == {"fp16", "fp32"}
    assert {u.layout for u in units if u.model == "resnet50" and u.family == "eager"} == {"contiguous", "channels-last"}
    assert {u.layout for u in units if u.model == "bert_base" and u.family == "eager"} == {"contiguous"}
    assert {u.layout for u in units if u.family == "ours"} == {"own choice"}
    assert len(units) == len(set(units))


def test_units_without_a_gpu() -> None:
    """Eager and ours in fp32, unless more is asked for."""
    units = Request(models=("resnet50",)).units(cuda=False)
    assert {(u.family, u.dtype) for u in units} == {("eager", "fp32"), ("ours", "fp32")}
    units = Request(models=("resnet50",), families=("torchscript",), dtypes=("bf16",)).units(cuda=False)
    assert {(u.family, u.dtype) for u in units} == {("torchscript", "bf16")}


def test_systems_by_name_and_group() -> None:
    """A system brings its family, a group all of its families, and nothing comes twice."""
    assert asked.families_of("all") == tuple(FAMILIES)
    assert asked.families_of("ours-1-stream,ours") == ("ours",)
    assert asked.families_of("compile-max-autotune") == ("compile-max-autotune",)
    assert asked.families_of("compile-default+graph,eager") == ("compile-default", "eager")
    assert all(f.startswith("compile") for f in asked.families_of("compile"))


def test_models_by_name_and_group() -> None:
    """`all` are the paper's twelve, `more` ten others; names of both stand beside groups, and nothing comes twice."""
    assert asked.models_of("all") == tuple(ZOO)
    assert asked.models_of("resnet50, more, hrnet_w18") == ("resnet50", *MORE)
    assert asked.models_of("all,torchvision:resnet18@64") == (*ZOO, "torchvision:resnet18@64")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: asked.models_of("resnet51"), "unknown model 'resnet51'"),
        (lambda: asked.models_of(" , "), "found no name"),
        (lambda: asked.families_of("tvm"), "unknown system 'tvm'"),
        (lambda: asked.dtypes_of("fp8"), "unknown dtype 'fp8'"),
        (lambda: asked.layouts_of("nhwc"), "unknown layout 'nhwc'"),
        (lambda: asked.numbers_of("0", "--batch"), "--batch: '0' is not a whole number from 1"),
        (lambda: asked.numbers_of("1,x", "--in-flight"), "--in-flight: 'x'"),
    ],
)
def test_what_nobody_can_mean_is_refused(call: object, message: str) -> None:
    """Bad words are named with what was expected."""
    assert callable(call)
    with pytest.raises(UsageError, match=message):
        call()
