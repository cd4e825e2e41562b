"""`python -m nimble_jobs.worker`: the program of a detached worker. It loads neither the command line nor torch."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from nimble_jobs.errors import NimbleError
from nimble_jobs.orphans import die_with
from nimble_jobs.settings import read_settings
from nimble_jobs.worker.devices import devices_of
from nimble_jobs.worker.serve import run

log = logging.getLogger("nimble_jobs.worker")


def main() -> int:
    """Run a worker in the foreground; its log goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m nimble_jobs.worker", description=main.__doc__)
    parser.add_argument("--home", type=Path, required=True, help="state folder")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N; by default as configured")
    parser.add_argument("--devices", help="all, or a list such as cuda:0,cuda:2; a child process for each")
    parser.add_argument("--max-idle-s", type=float, help="stop after this many seconds without work")
    parser.add_argument("--max-time-s", type=float, help="stop after this many seconds, as on SIGTERM")
    parser.add_argument("--gpu-memory-bytes", type=int, help="device memory for models that stay between jobs")
    parser.add_argument("--parent", type=int, help="id of the parent process, with which this one is to die")
    given = parser.parse_args()
    if given.parent is not None:
        die_with(given.parent)
    try:
        settings = read_settings(given.home)
        return run(
            given.home,
            devices=devices_of(given.devices) if given.devices else (given.device or settings.device,),
            max_idle_s=given.max_idle_s,
            max_time_s=given.max_time_s,
            gpu_memory_bytes=settings.gpu_memory if given.gpu_memory_bytes is None else given.gpu_memory_bytes,
        )
    except NimbleError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
