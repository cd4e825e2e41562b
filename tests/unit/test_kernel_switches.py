"""Kernels and rewrites of our own that are switched off by name: in specs and keys, in searches, and when a stored
schedule is recorded again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from nimble_jobs import Nimble
from nimble_jobs.engine import device as devices
from nimble_jobs.engine import inductor, measure
from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.engine.record import record
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import EngineError, UsageError
from nimble_jobs.kernel_switches import NOTHING, PART, Kernel, Without, key_parts, switched_off
from nimble_jobs.kernels import epilogue_ways, epilogues, shared_products, split_k_pass
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.epilogue_ways import Group
from nimble_jobs.kernels.epilogues import choose_ways
from nimble_jobs.kernels.inductor_pass import inductor_pass
from nimble_jobs.planner.forward import restore as restoring
from nimble_jobs.planner.forward.build import Built, build_best
from nimble_jobs.planner.forward.restore import restore, source_of
from nimble_jobs.planner.forward.target import ForwardTarget
from nimble_jobs.planner.keys.options import BuildOptions, option_parts, options_of, schedule_fields
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.step import forward_parts
from nimble_jobs.planner.lookup.stored import Material
from nimble_jobs.planner.search import search as searching
from nimble_jobs.planner.sources import source as sources
from nimble_jobs.planner.sources.source import AS_GIVEN, Kernels, Source, Variants, record_source
from nimble_jobs.planner.step import record as step_record
from nimble_jobs.planner.step.target import StepTarget
from nimble_jobs.schedule import Schedule
from nimble_jobs.spec import ScheduleSpec
from nimble_jobs.workloads.training.keep.resume import began_with

# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
CPU = torch.device("cpu")
OURS = Source(kernels="epilogues", layout="given")
PASSES = {
    Kernel.SQUEEZE_EXCITE: sources.squeeze_excite_pass,
    Kernel.DEPTHWISE_ACTIVATION: sources.depthwise_pass,
    Kernel.POINTWISE: sources.pointwise_pass,
    Kernel.LINEAR_GELU: sources.product_gelu_pass,
    Kernel.ATTENTION: sources.attention_pass,
    Kernel.PATCHES: sources.patches_pass,
}


def without(*kernels: Kernel) -> Without:
    return frozenset(kernels)


# Specs and keys


def test_a_spec_switches_off_by_name() -> None:
    """False leaves out, true means the default; specs that mean the same are stored as the same."""
    spec = ScheduleSpec.model_validate({"kernels": {"split-k": False, "attention": True, "folded": False}})
    assert spec.kernels.without == without(Kernel.SPLIT_K, Kernel.FOLDED)
    assert spec.model_dump(mode="json")["kernels"] == {"split-k": False, "folded": False}
    assert ScheduleSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert options_of(spec).without == spec.kernels.without
    assert ScheduleSpec().model_dump(mode="json")["kernels"] == {}
    assert ScheduleSpec.model_validate({"kernels": {"merged": True}}).kernels.without == NOTHING
    with pytest.raises(ValidationError, match="Extra inputs"):
        ScheduleSpec.model_validate({"kernels": {"split_k": False}})


def test_the_schema_lists_every_name_with_what_it_is() -> None:
    fields = ScheduleSpec.model_json_schema()["$defs"]["KernelsSpec"]["properties"]
    assert {name: each["description"] for name, each in fields.items()} == {each.value: each.says for each in Kernel}
    assert all(each.says.endswith(".") for each in Kernel)


def test_the_documents_list_every_name() -> None:
    """In the order of the schema."""
    page = Path(__file__).parents[2] / "docs" / "how-it-works.md"
    table = page.read_text().partition("| name | what is left out |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [line.split("`")[1] for line in table.splitlines()] == [kernel.value for kernel in Kernel]


def test_keys_without_switches_stay_what_they_were() -> None:
    """Otherwise every stored schedule would be built again."""
    parts = option_parts(BuildOptions())
    assert parts == {"schedule.streams": "auto", "schedule.fuse": "auto"}
    assert schedule_key(parts) == "46ec6265affd2e99b9b8d4aacfbd0fed0ee1165c012eedcf8c3f2a0f4e2046e9"


def test_what_is_switched_off_is_in_the_key_and_comes_back_from_it() -> None:
    """Sorted by name; a forward pass of a training has the part of its step."""
    off = without(Kernel.SPLIT_K, Kernel.ATTENTION)
    parts = option_parts(BuildOptions(without=off))
    assert parts[PART] == "without attention, split-k"
    assert ScheduleSpec.model_validate(schedule_fields(parts)).kernels.without == off
    assert ScheduleSpec.model_validate(schedule_fields(option_parts(BuildOptions()))) == ScheduleSpec()
    for kernel in Kernel:
        assert switched_off(key_parts(without(kernel))[PART]) == without(kernel)
    step = {"model.source": "m", "mode": "training", **parts, "schedule.layout": "given"}
    assert forward_parts(step, torch.zeros(2), "given")[PART] == parts[PART]
    for strange in ("attention", "without attention, flash"):
        with pytest.raises(ValueError, match=r"flash|expected 'without '"):
            switched_off(strange)


def test_nimble_takes_the_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `kernels` of `prepare`; unknown names and other values are refused."""
    seen: list[Without] = []
    real = build_best

    def noted(*args: Any, **named: Any) -> Built:
        seen.append(args[3].without)
        return real(*args, **named)

    monkeypatch.setattr("nimble_jobs.nimble.inference.build_best", noted)
    with Nimble(nn.Linear(3, 2)) as nimble:
        nimble.prepare(torch.zeros(2, 3), kernels={"attention": False, "patches": True})
        nimble.prepare(torch.zeros(4, 3))
        assert seen == [without(Kernel.ATTENTION), NOTHING]
        wrong: list[tuple[Any, str]] = [
            ({"atention": False}, "kernels: found 'atention', did you mean 'attention'?"),
            ({"zzz": False}, "kernels: found 'zzz'; expected attention, depthwise, "),
            ({"attention": 0}, "kernels: attention: found 0; expected True or False"),
            (["attention"], "kernels: found ['attention']; expected a dict such as {'attention': False}"),
        ]
        for kernels, said in wrong:
            with pytest.raises(UsageError) as caught:
                nimble.prepare(torch.zeros(2, 3), kernels=kernels)
            assert str(caught.value).startswith(said)


# Recordings


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Operators stand for what a compiler would make of a module. Holds what each compilation was asked for."""
    asked: list[dict[str, Any]] = []

    def compile_module(module: nn.Module, **named: Any) -> nn.Module:
        asked.append({**named, "copies": measure.copies_at_once()})
        return module

    monkeypatch.setattr(sources, "compile_module", compile_module)
    monkeypatch.setattr(sources, "inductor_pass", lambda _, without: without)
    monkeypatch.setattr(
        sources, "record_compiled", lambda call, example, state, device: record(call, example, state, device, call)
    )
    return asked


@pytest.mark.parametrize("off", [None, *Kernel])
def test_each_name_leaves_out_its_own_pass(
    off: Kernel | None, compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other: of the passes over the graph, our depthwise kernels, and what the compiler's pass is told."""
    ran: list[Kernel] = []
    for kernel, module in PASSES.items():
        monkeypatch.setattr(module, "rewrite", lambda *_, kernel=kernel: ran.append(kernel))

    def own_depthwise(recording: Recording, *_: Any, **__: Any) -> Recording:
        ran.append(Kernel.DEPTHWISE)
        return recording

    monkeypatch.setattr(sources, "with_own_depthwise", own_depthwise)
    gone = NOTHING if off is None else without(off)
    record_source(nn.Linear(3, 2).eval(), replace(OURS, without=gone), {"x": torch.zeros(2, 3)}, CPU)
    (asked,) = compiled
    asked["rewrite"](torch.fx.Graph())
    assert set(ran) == {*PASSES, Kernel.DEPTHWISE} - gone
    assert len(ran) == len(set(ran))
    assert asked["last"] == gone


@pytest.mark.parametrize(("kernels", "most"), [("epilogues", 2), ("crowded", 2), ("inductor", None)])
def test_sums_are_stored_earlier_beside_kernels_of_our_own(
    kernels: Kernels, most: int | None, compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's own kernels are those of `torch.compile`. Its option is the one that says so."""
    record_source(nn.Linear(3, 2).eval(), replace(OURS, kernels=kernels), {"x": torch.zeros(2, 3)}, CPU)
    assert compiled[0]["most_reads"] == most
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda _, **named: options.append(named["options"]))
    inductor.compile_module(nn.Linear(3, 2), most_reads=most)
    assert options[0].get("realize_reads_threshold") == most
    assert torch._inductor.config.realize_reads_threshold == 4


@pytest.mark.parametrize("off", [None, *Kernel])
def test_the_pass_of_the_compiler_knows_what_is_off(off: Kernel | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes the ways on, leaves linear layers in parts out, and has another identity in Inductor's cache."""
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda _, **named: options.append(named["options"]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    gone = NOTHING if off is None else without(off)
    ran: list[Any] = []
    monkeypatch.setattr(shared_products, "share_products", lambda _: None)
    monkeypatch.setattr(epilogues, "choose_ways", lambda *_, without: ran.append(without))
    monkeypatch.setattr(split_k_pass, "split_products", lambda *_: ran.append("products"))
    for each in (gone, gone, without(Kernel.PATCHES, Kernel.MERGED)):
        inductor.compile_module(nn.Linear(3, 2), last=inductor_pass(CPU, each))
    one, same, other = (each["post_grad_custom_post_pass"] for each in options)
    one(torch.fx.Graph())
    assert ran == ([gone] if off is Kernel.SPLIT_K else [gone, "products"])
    assert one.uuid() == same.uuid() != other.uuid()
    with measure.crowded(4):
        assert one.uuid() == same.uuid() != other.uuid()
        crowded = one.uuid()
    assert crowded != one.uuid()


CONVOLUTIONS = {
    Kernel.FUSED_CONVOLUTION: "fused",
    Kernel.PRODUCT: "product",
    Kernel.POINTWISE: "pointwise 32x32x64",
    Kernel.SPLIT_K: "64x64x64/12",
}


class Pixels(nn.Module):
    """A convolution that is a product and may be fused, and one with a long sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(256, 256, 1)
        self.deep = nn.Conv2d(256, 16, (3, 1), stride=(2, 1), padding=(1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deep(self.one(x).relu()).sigmoid()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The last way that is allowed is the fastest."""

    def times_us(group: Group, _: torch.device, off: Without) -> dict[str, float]:
        return {way: 9.0 - number for number, way in enumerate(group.allowed(off))}

    monkeypatch.setattr(epilogue_ways, "times_us", times_us)
    with using(Choices()):
        yield


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("off", CONVOLUTIONS)
def test_convolutions_do_not_run_in_ways_that_are_off(off: Kernel) -> None:
    """The next fastest way is taken, and what earlier builds measured with all ways is not asked."""
    module = Pixels().eval().bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(1, 256, 5, 4).bfloat16().contiguous(memory_format=torch.channels_last)
    names, weights = zip(*module.named_parameters(), strict=True)

    def ways(gone: Without) -> list[str]:
        def call(x: torch.Tensor, *weights: torch.Tensor) -> Any:
            return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

        seen: list[str] = []
        with torch.no_grad():
            traced = make_fx(call, tracing_mode="fake")(x, *weights)
            choose_ways(traced.graph, CPU, lambda _, way: seen.append(way), without=gone)
        return seen

    everything = ways(NOTHING)
    alone = frozenset(CONVOLUTIONS) - {off}  # everything else is off
    assert everything[1] == "64x64x64/12"
    kind = "/" if off is Kernel.SPLIT_K else CONVOLUTIONS[off].partition(" ")[0]
    assert not [way for way in ways(without(off)) if kind in way]
    assert CONVOLUTIONS[off] in ways(alone)
    assert ways(frozenset(CONVOLUTIONS)) == ["library", "library"]
    assert ways(NOTHING) == everything


@pytest.mark.parametrize("off", [Kernel.FUSED_CONVOLUTION, Kernel.PRODUCT])
def test_ways_that_are_off_are_not_measured(off: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "kernel_times_us", lambda calls, _: [1.0] * len(calls))
    group = Group(
        dtype=torch.float32,
        x=(1, 8, 6, 6),
        weight=(4, 8, 1, 1),
        out=(1, 4, 6, 6),
        bias=True,
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
        groups=1,
        follows="relu",
    )
    found = tuple(epilogue_ways.times_us(group, CPU, without(off)))
    assert found == group.allowed(without(off))
    assert len(found) == len(group.ways) - 1


def test_inductor_takes_no_graph_that_was_compiled_with_other_ways(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache is asked by what is off: with all ways again, the graph of before is found."""
    if not request.config.getoption("--all"):
        pytest.skip("takes a C++ compiler half a minute; with --all")
    asked: list[tuple[str, ...]] = []

    def times_us(group: Group, _: torch.device, off: Without) -> dict[str, float]:
        asked.append(group.allowed(off))
        return {"library": 9.0} | {way: 1.0 for way in asked[-1] if way == "product"}

    monkeypatch.setattr(epilogue_ways, "times_us", times_us)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    for module in PASSES.values():
        monkeypatch.setattr(module, "rewrite", lambda *_: 0)
    module, x = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()).eval(), torch.randn(1, 8, 8, 8)
    found: list[bool] = []
    for off in (NOTHING, without(Kernel.PRODUCT), NOTHING):
        source = Source(kernels="epilogues", layout="channels-last", without=off)
        with using(Choices()):
            recording = record_source(Variants(module).use(source), source, {"x": x}, CPU)
        found.append(any(task.op.startswith("aten._addmm_activation") for task in recording.program.tasks))
    forget_compiled()
    assert found == [True, False, True]
    assert ("library", "fused") in asked


@pytest.mark.parametrize(("off", "ours"), [(NOTHING, True), (without(Kernel.DEPTHWISE), False)])
def test_training_steps_leave_our_depthwise_kernels_out(
    off: Without, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only kernels of our own that they have; their sources say what is off."""
    x = torch.zeros(2, 3)
    recording = _recorded(x)
    called: list[Recording] = []
    monkeypatch.setattr(step_record, "_recorded", lambda *_, **__: recording)
    monkeypatch.setattr(
        step_record, "with_own_depthwise", lambda found, _, like: called.append(found) or replace(found, kernels={})
    )
    arithmetic: Any = SimpleNamespace()
    step_record.record_step(arithmetic, {"x": x}, CPU, objective=lambda: None, compiled=True, update=True, without=off)
    assert bool(called) == ours
    monkeypatch.setattr(devices, "able", lambda _: SimpleNamespace(compilers=True))
    live: Any = SimpleNamespace(
        request=SimpleNamespace(
            only=None, options=BuildOptions(without=off), accumulate=1, x=x, programs=(), parameters={}
        ),
        device=CPU,
        layouts_differ=False,
    )
    (source,) = StepTarget(live, seed=0).further({}, ["inductor", "epilogues"])
    assert source == Source(kernels="inductor", layout="given", without=off)


def test_a_training_goes_on_with_what_its_spec_switches_off() -> None:
    """What a checkpoint says it began with is compared with stored schedules, which name what is off."""
    off = without(Kernel.DEPTHWISE)
    environment = {"schedule": "a", "kernels": "inductor", "layout": "channels-last"}
    environment |= {"schedule[1]": "b", "kernels[1]": "eager", "layout[1]": "given"}
    kept: Any = SimpleNamespace(sheet={"environment": environment})
    assert began_with(kept, BuildOptions(without=off)) == [
        Source(kernels="inductor", layout="channels-last", without=off),
        AS_GIVEN,
    ]


def _recorded(x: torch.Tensor) -> Recording:
    module = nn.ReLU()
    return record(module, {"x": x}, {}, CPU, module)


# Searches and stored schedules


class Block(nn.Module):
    """A normalisation to fold and two linear layers to merge."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x)).mean((2, 3))
        return self.a(x) * self.b(x)


@pytest.mark.parametrize(
    ("off", "name"),
    [
        (NOTHING, "eager kernels, channels-last, folded, merged products, 1 stream"),
        (without(Kernel.FOLDED), "eager kernels, channels-last, merged products, 1 stream"),
        (without(Kernel.MERGED), "eager kernels, channels-last, folded, 1 stream"),
        (without(Kernel.FOLDED, Kernel.MERGED), "eager kernels, channels-last, 1 stream"),
    ],
)
def test_weights_are_neither_folded_nor_merged_if_that_is_off(off: Without, name: str) -> None:
    assert candidates(fold=True, without=off | without(Kernel.PACKED))[-1] == name
    assert candidates(fold=True, without=off)[-1] == name.replace("eager kernels", "oneDNN kernels over packed weights")


def candidates(**named: Any) -> list[str]:
    """The names of what a search on a CPU tries, in its order."""
    x = torch.randn(2, 3, 8, 8)
    built = build_best(Block().eval(), {"x": x}, "key", BuildOptions(streams=1, **named), CPU)
    built.close()
    return [c.name for c in built.schedule.candidates]


def test_weights_are_packed_only_if_they_will_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that a program may change, not without compiled kernels, and not on a torch that was not tested."""
    assert any("oneDNN" in name for name in candidates(fold=True))
    assert not any("oneDNN" in name for name in candidates(fold=False))
    assert not any("oneDNN" in name for name in candidates(fold=True, fuse="off"))
    monkeypatch.setattr(searching, "tested_version", lambda: "torch 9 was not tested")
    assert "onednn kernels" in candidates(fold=True)


def test_sources_of_a_compiler_carry_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager kernels have none of ours; a candidate's name promises no fused convolutions that are off."""
    seen: list[Source] = []
    real = ForwardTarget.further

    def further(self: ForwardTarget, first: Any, _: Any) -> list[Source]:
        seen.extend(real(self, first, ["inductor", "epilogues", "max-autotune"]))
        return []

    monkeypatch.setattr(ForwardTarget, "further", further)
    off = without(Kernel.ATTENTION, Kernel.FUSED_CONVOLUTION)
    for fuse in ("auto", "max"):
        seen.clear()
        options = BuildOptions(fold=True, streams=1, without=off, fuse=fuse)
        build_best(Block().eval(), {"x": torch.randn(2, 3, 8, 8)}, "key", options, CPU).close()
        assert [(each.kernels, each.without) for each in seen] == [
            *([("inductor", off)] if fuse == "max" else []),
            ("epilogues", off),
            ("max-autotune", off),
            ("eager", NOTHING),  # folded: without compilers, unfolded too
        ]
    assert len({each.name for each in seen}) == len(seen)
    assert not [each.name for each in seen if "fused convolutions" in each.name]


@pytest.mark.parametrize(("kernels", "copies"), [("epilogues", 1), ("crowded", 4)])
def test_a_stored_schedule_is_recorded_again_with_the_same_off(
    kernels: Kernels, copies: int, compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was off is stored with the kernels, and reaches the compiler's pass when they are compiled again. So does
    how many copies of a task are timed at once.
    """
    off = without(Kernel.SPLIT_K, Kernel.ATTENTION)
    source = replace(OURS, kernels=kernels, without=off)
    monkeypatch.setattr(ForwardTarget, "further", lambda *_: [source])
    monkeypatch.setattr(measure, "time_us", _second_is_fastest())
    module, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval(), torch.randn(2, 3)
    options = BuildOptions(streams=1, without=off, eager="reference")
    built = build_best(module, {"x": x}, "key", options, CPU)
    built.close()
    assert built.schedule.kernels == kernels
    assert [asked["last"] for asked in compiled] == [off]
    schedule = Schedule.from_json(built.schedule.to_json())
    assert schedule.without == ("attention", "split-k")
    assert source_of(schedule) == source
    stored = Material(schedule=schedule, constants={}, binaries=b"", digest="")
    monkeypatch.setattr(restoring, "compact", lambda *_: None)
    restored = restore(module, stored, {"x": x}, CPU, lambda _: None)
    for instance in restored.instances:
        instance.close()
    assert [asked["last"] for asked in compiled] == [off, off]
    assert [asked["compiled_before"] for asked in compiled] == [False, True]
    assert [asked["copies"] for asked in compiled] == [copies, copies]


IN_ANOTHER_PROCESS = """
import sys

import torch

from nimble_jobs.engine import inductor
from nimble_jobs.kernels.inductor_pass import inductor_pass
from nimble_jobs.planner.forward.restore import source_of
from nimble_jobs.schedule import Schedule

options = []
torch.compile = lambda _, **named: options.append(named["options"])
torch.cuda.get_device_name = lambda _: "GPU"
source = source_of(Schedule.from_json(sys.stdin.read()))
inductor.compile_module(torch.nn.ReLU(), last=inductor_pass(torch.device("cpu"), source.without))
print(",".join(sorted(source.without)), options[0]["post_grad_custom_post_pass"].uuid().hex())
"""


def test_another_process_compiles_with_the_same_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored gives Inductor's cache the identity that it had in the process that built it."""
    off = without(*Kernel)
    options: list[dict[str, Any]] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda _, **named: options.append(named["options"]))
        patch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
        inductor.compile_module(nn.ReLU(), last=inductor_pass(CPU, off))
        uuid = options[0]["post_grad_custom_post_pass"].uuid()
    built = build_best(nn.ReLU(), {"x": torch.zeros(2, 3)}, "key", BuildOptions(streams=1), CPU)
    built.close()
    stored = replace(built.schedule, kernels="epilogues", without=tuple(sorted(off))).to_json()
    command = [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS]
    found = subprocess.run(command, input=stored, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [",".join(sorted(off)), uuid.hex()]


def _second_is_fastest() -> Callable[..., float]:
    """Times of eager and of two candidates."""
    times = iter([10.0, 9.0, 1.0, 1.0, 1.0])
    return lambda *_, **__: next(times)


def test_schedules_of_before_the_switches_have_nothing_off() -> None:
    """Their text lacks the field. One that names kernels of a later version is refused."""
    built = build_best(nn.ReLU(), {"x": torch.zeros(2, 3)}, "key", BuildOptions(streams=1), CPU)
    built.close()
    text = built.schedule.to_json()
    assert text.endswith(',"without":[]}')
    before = Schedule.from_json(text.replace(',"without":[]', ""))
    assert before == built.schedule
    assert source_of(before) == AS_GIVEN
    with pytest.raises((ValueError, EngineError), match="flash"):
        source_of(replace(before, without=("flash",)))
