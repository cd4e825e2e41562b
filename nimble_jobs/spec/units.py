"""Durations, sizes and devices as people write them: `2h`, `1h30m`, `20GB`, `512MiB`, `cuda:1`."""

from __future__ import annotations

import math
import re

from nimble_jobs.errors import UsageError

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = {
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}
LONGEST_S = 3650 * SECONDS["d"]
LARGEST_BYTES = 2**63 - 1

DURATION_EXPECTED = "seconds or a duration such as 90, 5s, 10m, 2h or 1h30m"
BYTES_EXPECTED = "bytes or a size such as 512MiB or 20GB"

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_PART = re.compile(rf"({_NUMBER})(ms|s|m|h|d)")
DEVICE_PATTERN = r"auto|cpu|cuda|cuda:(?:0|[1-9][0-9]{0,2})"
DURATION_PATTERN = rf"^(?:{_NUMBER}|(?:{_NUMBER}(?:ms|s|m|h|d))+)$"
_DURATION = re.compile(DURATION_PATTERN)
_BYTES = re.compile(rf"({_NUMBER}) ?([A-Za-z]*)")


class BadValue(UsageError):
    """A value that its field cannot hold, with the problem and what was expected."""

    def __init__(self, problem: str, expected: str = "") -> None:
        self.problem, self.expected = problem, expected
        super().__init__(f"{problem}; expected {expected}" if expected else problem)


def show(value: object) -> str:
    """A value for a message: always one short line."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case str():
            text = repr(value)
            return text if len(text) <= 60 else f"{text[:57]}...{text[0]}"
        case _:
            return str(value)


def wrong(value: object) -> str:
    """The problem with a wrong value, for a message: `found 'x'`, or `is empty` for null."""
    return "is empty" if value is None else f"found {show(value)}"


def parse_device(text: str) -> str:
    """The name of a device, as it is. Raises BadValue."""
    if not re.fullmatch(DEVICE_PATTERN, text):
        raise BadValue(f"found {show(text)}", "auto, cpu, cuda or cuda:N")
    return text


def is_single_device(text: str) -> bool:
    """Whether it is the name of one device whatever the machine has: cpu or cuda:N."""
    return re.fullmatch(DEVICE_PATTERN, text) is not None and text not in ("auto", "cuda")


def parse_duration(value: object) -> float:
    """Seconds of a number, or of a text such as `2h`, `1h30m` or `500ms`. Raises BadValue."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value if abs(value) <= LONGEST_S else -math.inf if value < 0 else math.inf
    elif isinstance(value, str) and _DURATION.fullmatch(value):
        units = [unit for _, unit in _PART.findall(value)]
        if sorted(units, key=SECONDS.__getitem__, reverse=True) == units and len(set(units)) == len(units):
            seconds = sum(float(n) * SECONDS[unit] for n, unit in _PART.findall(value)) if units else float(value)
    if math.isnan(seconds):
        raise BadValue(wrong(value), DURATION_EXPECTED)
    if not 0 <= seconds <= LONGEST_S:
        raise BadValue(wrong(value), "a duration between 0 and 3650d")
    return float(seconds)


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back to the nearest millisecond: `1h30m`, `5.25s`, `12ms`."""
    total_ms = round(seconds * 1000)
    if total_ms < 1000:
        return f"{total_ms}ms" if total_ms else "0s"
    minutes, ms = divmod(total_ms, 60_000)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    parts = [f"{n}{unit}" for n, unit in ((day, "d"), (hour, "h"), (minute, "m")) if n]
    if ms:
        parts.append(f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s")
    return "".join(parts)


def parse_bytes(value: object) -> int:
    """Bytes of a whole number, or of a text such as `20GB` (powers of 1000) or `512MiB` (of 1024). Raises BadValue."""
    size = -1.0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (matched := _BYTES.fullmatch(value)):
        number, unit = matched.groups()
        if (factor := BYTES.get(unit.lower() or "b")) is not None:
            size = int(number) * factor if number.isdigit() else float(number) * factor
    if size < 0 or size > LARGEST_BYTES:
        raise BadValue(wrong(value), BYTES_EXPECTED)
    return int(size)


def format_bytes(size: int) -> str:
    """Three digits and a unit of powers of 1000: `1.5GB`. `parse_bytes` reads it back to within half a percent."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    if value >= 100:
        return f"{value:.0f}{unit}"
    return f"{value:.{2 if value < 10 else 1}f}".rstrip("0").rstrip(".") + unit
