"""Chooses the decoder for a job's pictures. The choice is part of what decides the job's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch

from nimble_jobs.data import Reader
from nimble_jobs.engine import picture_trial, pictures
from nimble_jobs.engine.device import able
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.errors import UsageError
from nimble_jobs.pipeline import Meter
from nimble_jobs.planner import Loaded, Residents
from nimble_jobs.spec import JobSpec
from nimble_jobs.workloads.context import JobContext
from nimble_jobs.workloads.decoding import THREADS, DeviceDecoding


@dataclass(frozen=True, kw_only=True)
class Decode:
    """A choice of decoder, with its versions."""

    by: Literal["cpu", "gpu"]
    decoder: str  # names and versions; with gpu also of what decodes what a device cannot take
    resize: str = "bilinear with antialiasing"

    def to_json(self) -> dict[str, Any]:
        """The choice as JSON-able values, for the manifest."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.by}, {self.decoder}"


def choose(spec: JobSpec, reader: Reader, device: torch.device) -> tuple[Decode | None, str | None]:
    """The decoder for the input's pictures, None if it has none; and why it is not the device, if that was an option.

    The choice depends only on the spec and the machine. Raises UsageError if the spec asks for a device that cannot
    decode, and OutOfMemory or DeviceFault.
    """
    if not reader.decodes:
        return None, None
    wanted = spec.input.decode
    if wanted == "cpu":
        return on_host(reader.recipe.interpolation), None
    host = on_host(reader.recipe.interpolation)
    why = picture_trial.available(device, reader.recipe.interpolation)
    if why is None and reader.preprocess is None:
        why = "the transform's arithmetic gives values that are not finite"
    if why is None:
        return Decode(by="gpu", decoder=f"{pictures.decoder_name()}; {host.decoder}", resize=host.resize), None
    if wanted == "gpu":
        raise UsageError(f"input.decode: found gpu, but {why}; expected auto or cpu")
    return host, why if able(device).decoder else None


def check(spec: JobSpec, reader: Reader, device: torch.device) -> None:
    """Raises UsageError if the spec asks for a device that cannot decode."""
    if spec.input.decode == "gpu":
        choose(spec, reader, device)


def on_host(interpolation: str = "bilinear") -> Decode:
    """The decoder on the host."""
    from nimble_jobs.decoding.picture import decoder  # Pillow is loaded for pictures only

    return Decode(by="cpu", decoder=decoder(), resize=f"{interpolation} with antialiasing")


def may_keep(spec: JobSpec, decode: Decode | None, before: str | None) -> bool:
    """Whether a job that was to decode on the device can keep what decoded its earlier attempt's shards, `before`."""
    free = spec.input.decode == "auto" and decode is not None and decode.by == "gpu"
    return free and before == str(on_host())


def tell(context: JobContext, decode: Decode | None, why_not: str | None) -> None:
    """Record the decoder on the job, and why it is not the device."""
    if decode is None:
        return
    if why_not is not None:
        context.event("fallback", f"pictures are decoded by the CPU: {why_not}", {})
    context.event("decode", f"pictures are decoded by {decode}", {"decode": decode.to_json()})


def on_device(
    decode: Decode | None, reader: Reader, loaded: Loaded, residents: Residents
) -> Callable[[Meter], DeviceDecoding] | None:
    """A function that makes the stage that decodes on the device; None if nothing is decoded there.

    Residents make room for the memory that decoders take.
    """
    if decode is None or decode.by == "cpu":
        return None
    residents.make_room(THREADS * pictures.memory_bytes(loaded.device))
    make = partial(PictureDecoder, loaded.device, reader.recipe)
    return lambda meter: DeviceDecoding(reader.redo, loaded.arrivals, meter, make)
