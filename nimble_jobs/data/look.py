"""What the system says about many files: size, time of change and inode of each, or size -1 if it is no regular file.

Also a program of its own, which reads paths and writes what they are: about 2 us a file of which the interpreter is
held for most, so threads of one process do not get there sooner. It starts in 10 ms, since it imports next to nothing.
"""

from __future__ import annotations

import os
import stat
import sys
from array import array
from collections.abc import Sequence

_HALF = 1 << 63


def look(before: bytes, names: Sequence[bytes]) -> array[int]:
    """int64 [3 * n]: size in bytes, time of change in ns, and inode of each file; all paths begin with `before`."""
    facts = array("q")
    for name in names:
        try:
            info = os.stat(before + name)  # noqa: PTH116  # one of a million
        except OSError:  # a broken link counts as a bad record
            facts.extend((-1, 0, 0))
            continue
        if stat.S_ISREG(info.st_mode):
            inode = info.st_ino
            facts.append(info.st_size)
            facts.append(info.st_mtime_ns)
            facts.append(inode if inode < _HALF else inode - 2 * _HALF)
        else:  # a pipe or similar
            facts.extend((-1, 0, 0))
    return facts


if __name__ == "__main__":
    before, *names = sys.stdin.buffer.read().split(b"\0")
    sys.stdout.buffer.write(look(before, names).tobytes())
