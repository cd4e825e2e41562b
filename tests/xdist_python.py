"""Stands for Python where xdist starts its test processes: `python tests/xdist_python.py -u -c CODE`.

The process is forked from one that has collected the tests, and need not import torch and all test modules by itself,
for 9 s of a core. This one waits for its end.
"""

from __future__ import annotations

import sys

import prefork  # this file's folder comes first on the import path

if __name__ == "__main__":
    code = sys.argv[sys.argv.index("-c") :]
    sys.exit(prefork.Process([sys.executable, *code], server=prefork.WORKERS).wait() & 0xFF)
