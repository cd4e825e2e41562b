"""Resolves the device of a job, and collects the facts about it that decide a schedule."""

from __future__ import annotations

import functools
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nimble_jobs import machine, plural
from nimble_jobs.engine.private import runtime
from nimble_jobs.errors import UsageError
from nimble_jobs.spec.units import BadValue, parse_device

SWITCHES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")  # read by NVIDIA's libraries


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a type of device can do. Who needs to know asks here, by ability and not by name."""

    asynchronous: bool  # works on while the host goes on
    streams: bool  # runs several streams at once, ordered by events
    graphs: bool  # replays captured graphs, whose outputs always lie in the same places
    separate_memory: bool  # has memory of its own, that batches are copied to
    random_states: bool  # draws random numbers from states of its own
    compilers: bool  # Inductor's kernels are worth a try
    kernels: bool  # runs our own kernels, and those of its libraries that write where they are told to
    packed_weights: bool  # has a library that computes faster over weights which it lays out once
    decoder: bool  # decodes pictures


_CPU = Abilities(
    asynchronous=False,
    streams=False,
    graphs=False,
    separate_memory=False,
    random_states=False,
    compilers=False,
    kernels=False,
    packed_weights=True,
    decoder=False,
)
_CUDA = Abilities(
    asynchronous=True,
    streams=True,
    graphs=True,
    separate_memory=True,
    random_states=True,
    compilers=True,
    kernels=True,
    packed_weights=False,
    decoder=True,
)
# The one table of devices: a new type is a line here, and the calls of its library in this file and in `capture`.
_ABILITIES = {"cpu": _CPU, "cuda": _CUDA}


def able(device: torch.device) -> Abilities:
    """What a device can do. Raises UsageError for a type that no schedule can be made for."""
    found = _ABILITIES.get(device.type)
    if found is None:
        raise UsageError(f"the device is {device}; expected {' or '.join(_ABILITIES)}")
    return found


def resolve(wanted: str, asker: str = "run.device") -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device with an index.

    Raises UsageError if there is no such device. `asker`, a field or an option, is named in the message.
    """
    try:
        parse_device(wanted)
    except BadValue as e:
        raise UsageError(f"{asker}: {e}") from e
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"{asker}: {wanted} is not available; torch finds no CUDA device on this machine")
    number = wanted.partition(":")[2]
    index = int(number) if number else torch.cuda.current_device()  # torch itself takes cuda:256 for cuda:0
    if index >= torch.cuda.device_count():
        devices = plural.count(torch.cuda.device_count(), "CUDA device")
        raise UsageError(f"{asker}: {wanted} does not exist; this machine has {devices}")
    return torch.device("cuda", index)


def present() -> list[torch.device]:
    """Every device of this machine, the CPU first."""
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def most_ranks(device: torch.device) -> int:
    """For how many ranks of a training this machine has devices like this one. On a CPU they share its cores."""
    if able(device).separate_memory:
        return sum(other.type == device.type for other in present())
    return len(os.sched_getaffinity(0))


def separate_memory(device: torch.device) -> bool:
    """Whether batches are copied to the device, so that they should cross as small as they are stored."""
    return able(device).separate_memory


def describe(device: torch.device) -> str:
    """The device in words, to print beside every speed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"{_cpu_name()}, {count} thread{'s' if count > 1 else ''}"


def memory_bytes(device: torch.device) -> int | None:
    """All the memory of a GPU; None for the CPU, whose memory others share."""
    return int(torch.cuda.get_device_properties(device).total_memory) if able(device).separate_memory else None


def facts(device: torch.device) -> dict[str, str]:
    """The parts of a schedule's key that name the device and the software under it. Equal devices give equal parts."""
    parts = {"torch": str(torch.__version__), **precision(device)}
    if device.type == "cpu":
        return parts | {
            "device": "cpu",
            "device.name": _cpu_name(),
            "device.isa": torch.backends.cpu.get_cpu_capability(),
            "device.threads": str(torch.get_num_threads()),
        }
    properties = torch.cuda.get_device_properties(device)
    return parts | {
        "device": "cuda",
        "device.name": properties.name,
        "device.capability": f"{properties.major}.{properties.minor}",
        "device.sms": str(properties.multi_processor_count),
        "device.memory_gib": str(round(properties.total_memory / 2**30)),
        "driver": _driver(),
        "cuda": str(torch.version.cuda),
        "triton": machine.package_version("triton"),
        "cudnn": str(torch.backends.cudnn.version()),
    }


def numerics(device: torch.device) -> dict[str, str]:
    """The `facts` that decide over numbers: a driver, or more memory, changes no kernel."""
    return {name: fact for name, fact in facts(device).items() if name not in ("driver", "device.memory_gib")}


def precision(device: torch.device) -> dict[str, str]:
    """The process's switches that decide which algorithms may run and how precisely they compute.

    They are read one by one. The older names stand for several switches, and raise if a program has set these apart.
    """
    backends = torch.backends
    deterministic = {"precision.deterministic": str(torch.are_deterministic_algorithms_enabled())}
    if device.type == "cpu":
        mkldnn: Any = backends.mkldnn  # torch adds its attributes at run time, so its annotations lack them
        return deterministic | {
            "precision.matmul": mkldnn.matmul.fp32_precision,
            "precision.conv": mkldnn.conv.fp32_precision,
            "precision.rnn": mkldnn.rnn.fp32_precision,
            "precision.mkldnn": str(mkldnn.enabled),
        }
    matmul: Any = backends.cuda.matmul
    cudnn: Any = backends.cudnn
    attention = {
        "flash": backends.cuda.flash_sdp_enabled(),
        "memory-efficient": backends.cuda.mem_efficient_sdp_enabled(),
        "math": backends.cuda.math_sdp_enabled(),
        "cudnn": backends.cuda.cudnn_sdp_enabled(),
    }
    environment = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    return deterministic | {
        "precision.matmul": matmul.fp32_precision,
        "precision.conv": cudnn.conv.fp32_precision,
        "precision.rnn": cudnn.rnn.fp32_precision,
        "precision.fp16_reduction": str(matmul.allow_fp16_reduced_precision_reduction),
        "precision.bf16_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "precision.fp16_accumulation": str(matmul.allow_fp16_accumulation),
        "precision.blas": str(backends.cuda.preferred_blas_library()).rpartition(".")[2],
        "precision.attention": ", ".join(name for name, on in attention.items() if on),
        "precision.cudnn": str(cudnn.enabled),
        "precision.cudnn_benchmark": str(cudnn.benchmark),
        "precision.cudnn_deterministic": str(cudnn.deterministic),
        "precision.environment": " ".join(f"{name}={value}" for name, value in sorted(environment.items())),
    }


def multiplies_in_tf32(device: torch.device) -> bool:
    """Whether products of fp32 tensors may be rounded to TF32's ten bits, in convolutions or elsewhere."""
    backends: Any = torch.backends
    return device.type == "cuda" and "tf32" in (
        backends.cudnn.conv.fp32_precision,
        backends.cuda.matmul.fp32_precision,
    )


def current(device: torch.device) -> AbstractContextManager[object]:
    """While inside, streams and events are those of the device."""
    return torch.cuda.device(device) if able(device).streams else nullcontext()


def make_current(device: torch.device) -> None:
    """Make a device the one that this process uses where none is named."""
    if able(device).streams:
        torch.cuda.set_device(device)


def seed(number: int, device: torch.device) -> None:
    """Set the random states of the host and of this device, and of no other."""
    torch.default_generator.manual_seed(number)
    if able(device).random_states:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def allocated_bytes(device: torch.device) -> int:
    """Memory of the device that tensors take now; 0 where it is the host's."""
    return torch.cuda.memory_allocated(device) if able(device).separate_memory else 0


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on the device."""
    if able(device).asynchronous:
        torch.cuda.synchronize(device)


def release_free_memory(device: torch.device) -> None:
    """Give memory that torch holds and nothing uses back to the device."""
    if able(device).separate_memory:
        torch.cuda.empty_cache()


def clear_workspaces(device: torch.device) -> None:
    """Let go of the memory that matrix products keep for every stream they ever ran on."""
    if able(device).streams:
        runtime.clear_workspaces()


@functools.cache  # a process never sees another CPU
def _cpu_name() -> str:
    return machine.cpu_name() or platform.processor() or platform.machine()


@functools.cache  # the driver cannot be replaced while it is in use
def _driver() -> str:
    return machine.driver_version() or f"supports CUDA {runtime.cuda_driver()}"
