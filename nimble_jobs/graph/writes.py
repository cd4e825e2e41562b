"""Which tensors that outlive a replay a program writes."""

from __future__ import annotations

from collections.abc import Iterable

from nimble_jobs.schedule import Port, Program


def names_written(program: Program, ports: Iterable[Port]) -> tuple[str, ...]:
    """Names of the ports into whose buffers the program writes, each once, in order of first write."""
    names = {port.view.buffer: port.name for port in ports}
    return tuple({names[v.buffer]: None for t in program.tasks for v in t.mutates if v.buffer in names})
