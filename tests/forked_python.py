"""Stands for Python in a command that pytest does not start: `python tests/forked_python.py SOCKET WORD...`.

The process that `python WORD...` would be is forked from the server that listens at SOCKET. This one passes SIGTERM on
to it, waits for its end, and ends with its exit code. If this one is killed, so is that.
"""

from __future__ import annotations

import signal
import sys

import prefork  # this file's folder comes first on the import path


def main() -> int:
    server, *words = sys.argv[1:]
    if words[0] == "-u":  # the processes of xdist flush what they write by themselves
        del words[0]
    process = prefork.Process([sys.executable, *words], server=server, tied=True)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
