"""`worker start --ray`: what the options mean on a Ray cluster."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs.errors import UsageError


def run(
    home: Path,
    *,
    address: str,
    gpus: int | None,
    node_home: str | None,
    device: str | None,
    devices: str | None,
    detach: bool,
    max_idle_s: float | None,
    max_time_s: float | None,
    gpu_memory_bytes: int | None,
) -> int:
    """Run workers on the cluster until they have ended. Raises UsageError for options that do not go together."""
    from nimble_jobs.ray import workers

    if detach:
        raise UsageError("--detach: found it with --ray; expected this command to go on running, as its workers do")
    if device is not None:
        raise UsageError("--device: found it with --ray; expected --gpus N, or --devices cpu,cpu")
    order = workers.order_of(
        home,
        address=address,
        gpus=gpus,
        cpus=_cpus(devices, gpus),
        node_home=node_home,
        max_idle_s=max_idle_s,
        gpu_memory_bytes=gpu_memory_bytes,
    )
    return workers.run(home, order, max_time_s=max_time_s)


def refuse_alone(**given: object) -> None:
    """Raises UsageError for options that need --ray."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')}: found it without --ray; expected --ray ADDRESS, too")


def _cpus(devices: str | None, gpus: int | None) -> int | None:
    """How many actors on CPUs; None: they have GPUs."""
    if devices is None or devices == "all":
        return None
    names = [name.strip() for name in devices.split(",")]
    if set(names) != {"cpu"}:
        raise UsageError(
            f"--devices: found {devices!r} with --ray, which chooses the GPUs; expected --gpus N, or cpu,cpu"
        )
    if gpus is not None:
        raise UsageError("--gpus and --devices: found both; expected one of them")
    return len(names)
