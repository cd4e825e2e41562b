"""Replay a stored schedule against eager, from what is stored alone: no spec is needed."""

from __future__ import annotations

import ast
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nimble_jobs.argument_paths import PART
from nimble_jobs.engine.capture import Instance
from nimble_jobs.errors import (
    CheckFailed,
    Damaged,
    DeviceFault,
    EngineError,
    ModelError,
    NimbleError,
    NotFound,
    OutOfMemory,
)
from nimble_jobs.packing import layout_of_words
from nimble_jobs.planner.forward.calls import example_of, observe_calls
from nimble_jobs.planner.forward.restore import check_loaded, restore
from nimble_jobs.planner.jobs.loaded import build_module
from nimble_jobs.planner.keys.files import file_of
from nimble_jobs.planner.keys.options import schedule_fields
from nimble_jobs.planner.keys.request import Request, key_parts, tolerance_of
from nimble_jobs.planner.lookup.stored import read_material
from nimble_jobs.planner.lookup.why import Difference, differences
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.preprocess import of_words
from nimble_jobs.sentence import Pooling
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import ScheduleEntry, Store

_INPUT = re.compile(r"x:(\w+)(\[.*\])")
_SEVERAL = re.compile(r"\[(\d+)\] .*")
_IN_FOLDERS = ("python", "exported")  # sources of which a key names the file without its folder


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay found."""

    agrees: bool | None  # None: it was not replayed
    said: str  # the tolerance that it kept to, or why it did not, or was not replayed


def replay(
    entry: ScheduleEntry,
    *,
    device: torch.device,
    store: Store,
    folders: Sequence[Path],
    allowed_python: tuple[Path, ...],
) -> Replay:
    """Load a schedule on `device` and check it against eager, with random weights. One that fails is quarantined.

    Files of models are looked for in `folders`; `python:` models run only from `allowed_python`. A schedule of another
    device, of other software, or of a model that is not here is not replayed, and no training step is.
    """
    if entry.mode == "training":  # it needs a loss, and labels that fit
        return Replay(agrees=None, said="a training step is not replayed; its bytes were hashed")
    try:
        request = request_of(entry.parts, folders, allowed_python)
        parts = key_parts(request, device)
    except (ValueError, ModelError) as e:
        return Replay(agrees=None, said=str(e))
    differ = [_told(difference) for difference in differences(parts, entry.parts)]
    if differ:
        more = f"; and {len(differ) - 3} more" if len(differ) > 3 else ""
        return Replay(agrees=None, said="; ".join(differ[:3]) + more)
    try:
        module = build_module(request, device)
    except (ModelError, OutOfMemory) as e:
        return Replay(agrees=None, said=str(e))
    return _checked(entry, request, module, device, store)


def _checked(entry: ScheduleEntry, request: Request, module: nn.Module, device: torch.device, store: Store) -> Replay:
    """Load and check the schedule as a job does, but do not count it as a use."""
    example = {"x": example_of(request, module, device)}
    found: list[float] = []
    try:
        store.guard()
        with store.artifacts.in_use():
            stored = store.schedules.verified(entry.key)
            material = read_material(stored.load(), store, digest=stored.sha256)

        observed = observe_calls(module, example, device, keep_integers=False)

        def check(instances: Sequence[Instance]) -> None:
            options: dict[str, Any] = {"seed": secrets.randbits(32), "below": numbers_for(module)}
            options |= {"tolerance": tolerance_of(request), "observed": observed}
            found.append(check_loaded(instances, module, material.schedule, device, **options))

        restored = restore(module, material, example, device, check)
    except DeviceFault:
        raise
    except OutOfMemory as e:
        return Replay(agrees=None, said=str(e))
    except (CheckFailed, Damaged, EngineError, NotFound, ValueError) as e:
        store.schedules.quarantine(entry.key, f"failed when it was replayed: {e}", time.time(), digest=entry.sha256)
        return Replay(agrees=False, said=str(e))
    for instance in restored.instances:
        instance.close()
    worst, allowed = max(found), tolerance_of(request)
    said = f"differs from eager by {worst:.1e}, at most {allowed:g} is allowed" if worst else "equals eager"
    return Replay(agrees=True, said=said)


def request_of(parts: Mapping[str, str], folders: Sequence[Path], allowed_python: tuple[Path, ...]) -> Request:
    """The request that has these key parts. Raises ValueError if none can be told from them."""
    source, given = _source(parts, folders), _input(parts)
    args: dict[str, Any] = json.loads(parts.get("model.args", "{}"))
    try:
        return Request(
            model=ModelSpec.model_validate(
                {
                    "source": source,
                    "args": args,
                    "dtype": parts["model.dtype"],
                    "weights": parts.get("model.weights_entry"),
                }
            ),
            **given,
            schedule=ScheduleSpec.model_validate({**schedule_fields(parts), "tolerance": float(parts["tolerance"])}),
            embedding="embedding" in parts.get("outputs", ""),
            pooling=Pooling.of_words(words) if (words := parts.get("outputs.pooling")) is not None else None,
            memory_bytes=int(memory) if (memory := parts.get("schedule.memory_bytes", "any")) != "any" else None,
            allowed_python=allowed_python,
        )
    except (KeyError, NimbleError) as e:
        raise ValueError(f"the request cannot be rebuilt from its key: {e}") from e


def _told(difference: Difference) -> str:
    file = file_of(difference.part)
    if file is not None:
        return f"file {file} has changed"
    return f"{difference.part} is {difference.stored or 'absent'}, here {difference.wanted or 'absent'}"


def _source(parts: Mapping[str, str], folders: Sequence[Path]) -> str:
    source = parts.get("model.source", "")
    scheme, _, target = source.partition(":")
    if scheme in ("torchvision", "timm"):
        return source
    if scheme not in _IN_FOLDERS:
        raise ValueError(f"its key names the model {source or 'unnamed'}, which cannot be rebuilt from the key alone")
    name, *rest = target.split(":")
    for folder in folders:
        if (folder / name).is_file():
            return ":".join([scheme, str(folder / name), *rest])
    raise ValueError(f"its model's file, {name}, is not in {', '.join(map(str, folders))}")


def _input(parts: Mapping[str, str]) -> dict[str, Any]:
    """What a request says of its records."""
    packed = {name.removeprefix(PART): said for name, said in parts.items() if name.startswith(PART)}
    if packed and (several := _SEVERAL.fullmatch(parts.get("input", ""))):
        layout = layout_of_words(packed)
        return {"batch_size": int(several[1]), "shape": (layout.nbytes,), "dtype": "uint8", "packing": layout}
    found = _INPUT.fullmatch(parts.get("input", ""))
    if not found:
        raise ValueError(f"its key names the input {parts.get('input') or 'unnamed'}, which no job can have")
    shape = [int(size) for size in ast.literal_eval(found[2])]
    if not shape:
        raise ValueError("its input has no batch dimension")
    batch, *record = shape
    words = parts.get("input.preprocess")
    if words is None:
        kind = "int64" if found[1] == "int64" else "float32"
        return {"batch_size": batch, "shape": tuple(record), "dtype": kind}
    steps = of_words(record, found[1], words)
    kind = "int64" if steps.whole else "float32"
    return {"batch_size": batch, "shape": steps.result, "dtype": kind, "preprocess": steps}
