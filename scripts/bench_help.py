#!/usr/bin/env python3
"""Measure how long `--help` takes, from the start of a process to its end.

    python scripts/bench_help.py [--tries 20]

Prints the least and the median time of each command line, and the CPU time of the quickest try. Exits with 1 when a
least time is not under 0.3 s. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

LIMIT_S = 0.3
COMMANDS: tuple[tuple[str, ...], ...] = ((), ("submit",), ("run",), ("ls",), ("worker", "start"), ("cache", "ls"))


def main() -> int:
    """Measure, print; 0 when every command is quick enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tries", type=int, default=20, help="processes for each command line (%(default)s)")
    tries = parser.parse_args().tries
    print(f"{'command line':40}{'least, s':>10}{'median, s':>11}{'CPU, s':>9}")
    slow = False
    for command in COMMANDS:
        one_try(command)  # leaves the compiled modules
        found = sorted(one_try(command) for _ in range(tries))
        least_s, cpu_s = found[0]
        words = " ".join(("nimble-jobs", *command, "--help"))
        print(f"{words:40}{least_s:10.3f}{statistics.median(wall for wall, _ in found):11.3f}{cpu_s:9.3f}")
        slow |= least_s >= LIMIT_S
    if slow:
        print(f"bench_help: not every command answers in under {LIMIT_S} s", file=sys.stderr)
    return int(slow)


def one_try(command: tuple[str, ...]) -> tuple[float, float]:
    """Wall time and CPU time of one process, in seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, start = os.times(), time.perf_counter()
    words = [sys.executable, "-m", "nimble_jobs.cli.main", *command, "--help"]
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True, env=environment)
    wall_s, after = time.perf_counter() - start, os.times()
    return wall_s, after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    sys.exit(main())
