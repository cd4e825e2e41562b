"""The memory that this process may still take."""

from __future__ import annotations

from pathlib import Path

_ENOUGH = 1 << 62


def available_bytes() -> int:
    """The machine's free memory, limited by the control group of this process."""
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    except OSError:
        own = ""
    return min(_machine(), _group(Path("/sys/fs/cgroup"), own))


def _machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return _ENOUGH
    return _ENOUGH


def _group(root: Path, own: str) -> int:
    """Bytes left in the control group (v2). File pages count as free, since the kernel can reclaim them."""
    free = _ENOUGH
    for folder in (root / own.strip("/"), *(root / own.strip("/")).parents):
        if not folder.is_relative_to(root):
            break
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((folder / "memory.current").read_text())
            pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, max(0, int(limit) - used + int(pages.get("file", 0))))
        except (OSError, ValueError):
            continue
    return free
