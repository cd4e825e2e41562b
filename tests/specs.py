"""Changes of a spec that is still a mapping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], None]


def setting(path: str, value: Any) -> Change:
    """Sets a dotted field."""

    def change(spec: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            spec = spec.setdefault(name, {})
        spec[last] = copy.deepcopy(value)

    return change
