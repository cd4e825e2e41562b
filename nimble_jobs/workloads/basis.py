"""What decides a job's output. An attempt takes over the work of another one only if this is the same for both."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from nimble_jobs import spec as specs
from nimble_jobs.data import Reader
from nimble_jobs.models import identity, weights_identity
from nimble_jobs.models.classes import classes_beside
from nimble_jobs.models.identity import python_identity
from nimble_jobs.spec import JobSpec, parse_source
from nimble_jobs.workloads.decode import Decode, on_host
from nimble_jobs.workloads.pooling import pooling_of

_NO_EFFECT = ("resume", "checkpoint", "tensorboard")  # fields of `train` that do not change the weights
_FIELDS = {"spec.train.best": "train.checkpoint.best"}  # what users call entries of `basis_parts`


def basis(spec: JobSpec, reader: Reader, decode: Decode | None = None, texts: dict[str, Any] | None = None) -> str:
    """SHA-256, in hex, of `basis_parts`, and of what decides the tokens of texts."""
    parts = basis_parts(spec, reader, decode=decode)
    return digest(parts if texts is None else {**parts, "texts": texts})


def basis_parts(
    spec: JobSpec, reader: Reader, held_out: Reader | None = None, *, decode: Decode | None = None
) -> dict[str, Any]:
    """The spec's model, input, output and training, and the present state of their files, as JSON-able values.

    `decode` is what decodes pictures; None means the CPU.
    """
    resolved = as_asked(spec, reader, held_out)
    resolved["input"].pop("only_new", None)  # it chooses files, which are in the input's fingerprint
    resolved["input"].pop("decode", None)  # the decoder that it chose is added below
    parts: dict[str, Any] = {
        "spec": {name: resolved.get(name) for name in ("kind", "model", "input", "train")},
        "output": {name: resolved["output"].get(name) for name in ("format", "fields", "shard_size")},
        "input": reader.fingerprint,
        "model": identity(spec.model),
        "weights": weights_identity(spec.model),
    }
    pooling = pooling_of(spec)
    if pooling is not None:
        parts["pooling"] = pooling.words
    if reader.decodes:
        parts["decode"] = (decode or on_host()).to_json()
    if spec.train is None:
        if reader.label_names is not None and "label" in spec.output.fields:
            parts["labels"] = list(reader.label_names)
        if "top1_label" in spec.output.fields and (classes := classes_beside(spec.model)) is not None:
            parts["classes"] = list(classes.names)
    else:
        train = {name: value for name, value in resolved["train"].items() if name not in _NO_EFFECT}
        train["best"] = spec.train.checkpoint.best if spec.train.checkpoint else None
        parts["spec"]["train"] = train
        if spec.train.init_from is not None:
            parts["weights"] = weights_identity(spec.model.model_copy(update={"weights": spec.train.init_from}))
        if ":" in spec.train.loss:
            parts["loss"] = python_identity(parse_source(spec.train.loss))
        if held_out is not None:
            parts["validation"] = held_out.fingerprint
    return parts


def as_asked(spec: JobSpec, reader: Reader, held_out: Reader | None = None) -> dict[str, Any]:
    """The spec as JSON-able values. Inputs that were fetched have their addresses, wherever their copies lie."""
    resolved = specs.dump(spec)
    if reader.origin is not None:
        resolved["input"]["source"] = reader.origin.source
    if held_out is not None and held_out.origin is not None:
        resolved["train"]["validation"]["source"] = held_out.origin.source
    return resolved


def digest(parts: dict[str, Any]) -> str:
    """SHA-256, in hex, of JSON-able values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """What two values of `basis_parts` disagree about, as `train.epochs was 3 and is 5 now`."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        return [
            line
            for name in names
            for line in differences(before.get(name), now.get(name), f"{where}.{name}" if where else name)
        ]
    if before == now:
        return []
    if where == "weights" and _but_seed(before) == _but_seed(now):
        return []  # the spec's seed has changed, which is said already
    field = _FIELDS.get(where) or where.removeprefix("spec.").replace("model.model.", "model.")
    if where in ("input", "validation", "weights") or where.startswith(("model.", "loss.")):
        return [f"the files or versions behind {field} changed"]
    return [f"{field} was {_shown(before)} and is {_shown(now)} now"]


def _but_seed(weights: Any) -> str:
    return re.sub(r"^seed:-?\d+", "seed", str(weights))


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]
