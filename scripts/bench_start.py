#!/usr/bin/env python3
"""Time the start of a fresh process up to its first checked replay: without a stored schedule, and with one.

    python scripts/bench_start.py [--models resnet18,...] [--device cpu] [--dtype fp32] [--rounds 3] [--phases]
                                  [--drawn] [--json FILE]

A process begins as `run` does: threads import torch and this package, and have the device load its libraries. The clock
starts once all is imported and the device answers; it stops after the first batch.
Models: names of torchvision's, or zoo:NAME for the networks of nimble_jobs.bench.zoo. Weights are read from a file, as
for a trained model; with --drawn every process draws random ones. Each model has a schedule store of its own. Processes
find Python's modules compiled: where torch was installed without, a build that is not counted comes first and leaves
them in a folder of this run's own.

With --phases, functions of the package are timed, each without the timed ones that it calls; on a GPU the device is
waited for at every begin and end, so that the sum is a little longer than the start without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import compiled_python, environment, save
from phases import Clock

if TYPE_CHECKING:
    from nimble_jobs.spec import JobSpec

ZOO = """\
from nimble_jobs.bench import zoo


def make():
    return zoo.create("{name}", drawn={drawn})
"""

WEIGHTS = "weights.safetensors"
SMALL = "resnet18"
SIDE = 224  # pixels, of images for torchvision's models
PHASES = {  # functions where they are called from, and the phase that each is
    "nimble_jobs.planner.jobs.prepare:key_parts": "key",
    "nimble_jobs.planner.jobs.building:identity": "key, again after loading",
    "nimble_jobs.planner.jobs.prepare:build_module": "module",
    "nimble_jobs.models.build:import_torchvision": "import torchvision",
    "nimble_jobs.models.build:_placed": "module to its dtype and device",
    "nimble_jobs.planner.jobs.prepare:Carried": "note what the module holds",
    "nimble_jobs.planner.jobs.take:Watched": "note what the module holds, for the check",
    "nimble_jobs.planner.jobs.take:example_of": "example",
    "nimble_jobs.planner.jobs.take:read_stored": "look up",
    "nimble_jobs.store:StoredSchedule.load": "decode",
    "nimble_jobs.planner.lookup.stored:read_material": "artifacts",
    "nimble_jobs.graph:check_plan": "check the plan",
    "nimble_jobs.planner.sources.source:Variants.use": "fold and lay out",
    "nimble_jobs.planner.forward.restore:compact": "move the weights together",
    "nimble_jobs.planner.forward.restore:unpack": "load compiled kernels",
    "nimble_jobs.planner.search.plans:capture": "warm-up runs",
    "nimble_jobs.engine.capture:bind": "bind",
    "nimble_jobs.engine.bind:check_memory": "check the memory plan",
    "nimble_jobs.engine.verify:check": "check: eager",
    "nimble_jobs.engine.verify:random_inputs": "check: inputs",
    "nimble_jobs.engine.verify:relative_norm": "check: comparison",
    "nimble_jobs.engine.verify:run_once": "check: replays",
    "nimble_jobs.engine.device:clear_workspaces": "give workspaces back",
    "nimble_jobs.planner.jobs.loaded:Loaded.take_off": "staging buffers",
}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="resnet18,resnet50", help="commas between (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", default="fp32", help="fp32, fp16 or bf16 (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="records a batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="processes that find the schedule (%(default)s)")
    parser.add_argument("--drawn", action="store_true", help="random weights, drawn by every process")
    parser.add_argument("--phases", action="store_true", help="the seconds of each phase of a start, too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "HOME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        model, home = options.child
        print(json.dumps(start(model, home, options)))
        return 0
    models = options.models.split(",")
    with compiled_python(lambda home: uncounted(Path(home), options)):
        rows = [measured(model, options) for model in models]
    where = [row.pop("environment") for row in rows]
    save(options.json, {"environment": where[0], "results": rows})
    return 0 if all(row["hits"] == ["miss", *["stored"] * options.rounds] for row in rows) else 1


def uncounted(home: Path, options: argparse.Namespace) -> None:
    """A build that imports what every other one does."""
    if not options.drawn:
        write_weights(SMALL, home / WEIGHTS)
    child(SMALL, str(home), options)


def write_weights(model: str, file: Path) -> None:
    """Write random weights under which fp16 does not overflow."""
    import torch
    from safetensors.torch import save_file

    from nimble_jobs.bench import zoo
    from nimble_jobs.bench.zoo.starting import start
    from nimble_jobs.models import from_torchvision

    if model.startswith("zoo:"):
        module = zoo.create(model.removeprefix("zoo:"))
    else:
        torch.manual_seed(0)
        module = start(from_torchvision.build(model, {}, None), SIDE)
    save_file(module.state_dict(), file)


def child(model: str, home: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own says about its start."""
    settings = ["--device", options.device, "--dtype", options.dtype, "--batch", str(options.batch)]
    command = [
        sys.executable,
        __file__,
        *settings,
        *["--phases"] * options.phases,
        *["--drawn"] * options.drawn,
        "--child",
        model,
        home,
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process that builds the schedule, and several that find it."""
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as home:
        if not options.drawn:
            write_weights(model, Path(home) / WEIGHTS)
        found = [child(model, home, options) for _ in range(1 + options.rounds)]
    miss, stored = found[0], found[1:]
    row = {
        "model": model,
        "dtype": options.dtype,
        "batch": options.batch,
        "weights": "drawn" if options.drawn else "from a file",
        "hits": [f["hit"] for f in found],
        "miss_s": miss["start_s"],
        "schedule": stored[0]["schedule"],
        "stored_s": statistics.median(f["start_s"] for f in stored),
        "stored_model_s": statistics.median(f["model_s"] for f in stored),
        "import_s": statistics.median(f["import_s"] for f in stored),
        "stored_each_s": [round(f["start_s"], 3) for f in stored],
        "modules": stored[0]["modules"],
        "environment": miss["environment"],
    }
    print(
        f"{model} {options.dtype} batch {options.batch}, weights {row['weights']}: miss {row['miss_s']:.2f} s, stored "
        f"{row['stored_s']:.2f} s (of which the model {row['stored_model_s']:.2f} s), "
        f"{row['miss_s'] / row['stored_s']:.1f}x less; imports before {row['import_s']:.2f} s",
        flush=True,
    )
    if options.phases:
        names = list(dict.fromkeys(name for f in stored for name in f["phases"]))
        row["phases_s"] = {n: round(statistics.median(f["phases"].get(n, 0.0) for f in stored), 4) for n in names}
        for name, seconds in row["phases_s"].items():
            print(f"  {seconds:7.3f} s  {name}", flush=True)
    return row


def start(model: str, home: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, which begins as `run` does: the seconds up to the first batch."""
    begin = time.perf_counter()
    from nimble_jobs.worker.early import Early

    source = f"torchvision:{model}"
    if model.startswith("zoo:"):
        file = Path(home) / "model.py"
        file.write_text(ZOO.format(name=model.removeprefix("zoo:"), drawn=options.drawn))
        source = f"python:{file}:make"
    spec = job(source, None if options.drawn else str(Path(home) / WEIGHTS), options)
    early = Early(spec)
    early.join()
    import torch

    from nimble_jobs import planner
    from nimble_jobs.bench import zoo
    from nimble_jobs.engine import capture, captures, tail
    from nimble_jobs.engine import device as devices
    from nimble_jobs.store import open_store
    from nimble_jobs.store.home import resolve
    from nimble_jobs.worker.residency import Residents, default_budget_bytes

    device = devices.resolve(options.device)
    torch.zeros(1, device=device)
    clock = Clock(lambda: devices.synchronize(device))
    if options.phases:
        clock.watch(PHASES)
        for module in (capture, tail):
            vars(module)["capturing"] = _timed_block(clock, captures.capturing)
    ready = time.perf_counter()
    shape: tuple[int, ...] = (3, SIDE, SIDE)
    if model.startswith("zoo:"):
        shape = zoo.entry(model.removeprefix("zoo:")).input_shape
    request = planner.Request(
        model=spec.model,
        shape=shape,
        dtype="float32",
        batch_size=options.batch,
        allowed_python=(Path(home),),
    )
    clock.turn("everything else")
    with clock.time("open the store"):
        store = open_store(resolve(str(Path(home) / "home")))
    with store:
        residents = Residents(default_budget_bytes(devices.memory_bytes(device)))
        prepared = planner.prepare(request, device=device, store=store, residents=residents)
        with clock.time("first batch"):
            batch = torch.zeros(request.input_shape, dtype=request.input_dtype)
            arrivals = prepared.loaded.arrivals
            arrivals.begin()
            for _ in prepared.loaded.run([(arrivals.upload(batch), None)]):
                devices.synchronize(device)
        end = time.perf_counter()
        clock.turn(None)
        made = prepared.loaded.schedule
        found = {
            "hit": prepared.hit.value,
            "fallback": prepared.loaded.fallback,
            "schedule": None if made is None else made.summary() | {"stages_s": dict(made.stages)},
            "start_s": end - ready,
            "model_s": prepared.load_s,
            "import_s": ready - begin,
            "phases": clock.seconds,
            "modules": [m for m in ("torch._dynamo", "torch._inductor.compile_fx", "triton") if m in sys.modules],
            "environment": environment(device=devices.describe(device), device_facts=devices.facts(device)),
        }
        residents.clear()
    early.close()
    return found


def job(source: str, weights: str | None, options: argparse.Namespace) -> JobSpec:
    """What `run` would be given."""
    from nimble_jobs import spec as specs

    return specs.restore(
        {
            "version": 1,
            "name": "start",
            "kind": "score",
            "model": {"source": source, "dtype": options.dtype, "weights": weights},
            "input": {"source": "x.npy", "format": "npy", "batch_size": options.batch},
            "output": {"path": "out", "format": "npy", "fields": ["id"]},
            "run": {"device": options.device},
        }
    )


def _timed_block(clock: Clock, block: Callable[..., Any]) -> Callable[..., Any]:
    """Captures of CUDA graphs as a phase."""

    @contextmanager
    def manager(*args: Any, **kwargs: Any) -> Iterator[None]:
        with clock.time("capture"), block(*args, **kwargs):
            yield

    return manager


if __name__ == "__main__":
    sys.exit(main())
