"""Settings of the whole process that a model's code may change, so that they can be put back for the next model.

They are read and written one by one: torch's older names stand for several switches, and raise if these are apart.
Environment variables are not among them, but for those that NVIDIA's libraries read.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.engine.device import SWITCHES

log = logging.getLogger(__name__)

Values = Mapping[str, Any]
_Pair = tuple[Callable[[], Any], Callable[[Any], object]]


def taken() -> Values:
    """The present values by name. It takes microseconds."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def changed(since: Values) -> Values:
    """The present values of those settings that have changed."""
    now = taken()
    return {name: now[name] for name, value in since.items() if now[name] != value}


def put(values: Values) -> list[str]:
    """Write those of the values that differ from the present ones. Returns their names.

    One that cannot be written, such as a working folder that was removed, is left, and the log says so.
    """
    written = []
    for name, value in values.items():  # in order: a switch stands before those that it changes, too
        read, write = _SETTINGS[name]
        if read() == value:
            continue
        try:
            write(value)
        except (OSError, RuntimeError) as e:  # torch.backends.disable_global_flags makes torch refuse
            log.warning("%s: %s stays, as %s could not be set: %s", name, read(), value, e)
        else:
            written.append(name)
    return written


def _attribute(owner: Any, name: str) -> _Pair:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _older_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # a program has set some switches by their newer names
        return None


def _set_older_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _default_device() -> str | None:
    device = str(torch.get_default_device())
    return None if device == "cpu" else device


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # it was removed
        return None


def _set_folder(value: str | None) -> None:
    if value is not None:
        os.chdir(value)


def _set_path(value: list[str]) -> None:
    sys.path[:] = value


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


_backends: Any = torch.backends  # torch adds attributes at run time, so its annotations lack them
_SETTINGS: dict[str, _Pair] = {
    "float32_matmul_precision": (_older_precision, _set_older_precision),
    **{
        f"{name}fp32_precision": _attribute(owner, "fp32_precision")
        for name, owner in (
            ("", _backends),
            ("cuda.matmul.", _backends.cuda.matmul),
            ("cudnn.", _backends.cudnn),
            ("cudnn.conv.", _backends.cudnn.conv),
            ("cudnn.rnn.", _backends.cudnn.rnn),
            ("mkldnn.", _backends.mkldnn),
            ("mkldnn.matmul.", _backends.mkldnn.matmul),
            ("mkldnn.conv.", _backends.mkldnn.conv),
            ("mkldnn.rnn.", _backends.mkldnn.rnn),
        )
    },
    **{f"cudnn.{name}": _attribute(_backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")},
    "mkldnn.enabled": _attribute(_backends.mkldnn, "enabled"),
    **{
        f"cuda.matmul.{name}": _attribute(_backends.cuda.matmul, name)
        for name in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
    },
    **{
        f"cuda.{name}_sdp": (
            getattr(_backends.cuda, f"{name}_sdp_enabled"),
            getattr(_backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    "cuda.preferred_blas_library": (_backends.cuda.preferred_blas_library, _backends.cuda.preferred_blas_library),
    "deterministic algorithms": (_deterministic, _set_deterministic),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_default_device, torch.set_default_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "working folder": (_folder, _set_folder),
    "sys.path": (lambda: list(sys.path), _set_path),
    **{name: (partial(os.environ.get, name), partial(_set_variable, name)) for name in SWITCHES},
}
